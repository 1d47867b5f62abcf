"""The ranks of a DiLoCo, which may leave and join between two exchanges."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import hvd_compress.distributed as hvdc
from hvd_compress.diloco.common import CommonParameters
from hvd_compress.diloco.fragments import Fragments
from hvd_compress.diloco.progress import Progress, all_to_send, behind, merged, sources
from hvd_compress.diloco.states import check_fits
from hvd_compress.process_group.collectives import Collectives
from hvd_compress.process_group.values import problem_told
from hvd_compress.ranks import agreement
from hvd_compress.ranks.values import records

if TYPE_CHECKING:
    from hvd_compress.diloco.shards import Shards


class RebindingDiLoCo:
    """The base of :class:`DiLoCo`, with the part of its state that ranks give each other.

    Args:
        common: the common parameters.
        fragments: the fragments.
        compressor: the compressor that sends the differences.
        shards: the ranks of this worker; None without a mesh.
        settings: the settings that have to be the same on every rank.

    Attributes:
        steps: the number of calls of :meth:`DiLoCo.step`.
    """

    def __init__(
        self,
        common: CommonParameters,
        fragments: Fragments,
        compressor: hvdc.Compressor,
        shards: Shards | None,
        settings: dict[str, Any],
    ) -> None:
        self._common = common
        self._fragments = fragments
        self._compressor = compressor
        self._shards = shards
        self._settings = settings
        self._configuration = settings if shards is None else {**settings, "shard": shards.number}
        self._group: str | None = None
        self._fresh = True  # As long as ranks have not told each other what they begin with.
        self.steps = 0

    @torch.no_grad()
    def rebind(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        lost: Iterable[dict[str, Any]] = (),
    ) -> None:
        """Continues among the ranks of another process group, after ranks have left or joined.

        All ranks that stay call it; each new rank makes a ``DiLoCo``, which takes part in the same exchange
        when it is made. Ranks that are behind, which all new ranks are, take the common parameters, the
        outer optimizer's state and the number of steps from the rank with the most progress, and begin with
        these parameters. The other ranks keep their own parameters. An exchange that has failed counts on
        all ranks if one of them got its average; otherwise it counts as not begun, and its differences are
        part of the next exchange.

        The compressor's residuals keep their share in the average
        (:meth:`hvd_compress.distributed.Compressor.rebind`).

        Args:
            process_group: the ranks; None is the default group, which may differ from the one before. With
                a mesh, the ranks with the same shards; all ranks of a worker call this.
            lost: the latest available :meth:`state_dict` of each rank that has left; the same on every rank
                that stays. The residuals in these states are shared out.

        Raises:
            ExchangeError: an exchange is in progress, ranks differ, or something is wrong on another rank.
                It is raised on every rank, and training can go on as before.
            TypeError, ValueError: a state in ``lost`` does not belong to a rank that has left.
        """
        if self._shards is None:
            self._meet(process_group, list(lost))
            return
        with self._shards.problem_told():
            group = self._shards.group_of(process_group)
        with problem_told(group):
            self._shards.agree({**self._settings, "parameters": list(self._common.own)})
        with self._shards.problem_told():
            self._meet(group, list(lost))
        counts = [[one.used, one.dropped] for one in self._fragments]
        self._shards.begin({"steps": self.steps, "rounds of fragments": counts})

    def _meet(self, process_group: dist.ProcessGroup | None, lost: Sequence[Any]) -> None:
        """Meets the ranks of a group, and gets what this rank lacks."""
        problem = self._problem(lost)
        states = [] if problem is not None else [state["compressor"] for state in lost]
        meeting = self._compressor.meet(process_group, states, self._progress(), problem)
        ranks, told = meeting.ranks, records(Progress, meeting.values)
        agreement.compare([dict(one.settings) for one in told])
        chosen = sources(told, len(self._fragments))
        self._settle_failed([told[rank] for rank in chosen])
        self._compressor.rebind_to(meeting)
        self._catch_up(told, chosen, ranks)
        self._fragments.load_to_send(all_to_send(told))
        self._group = told[0].offered
        for fragment in self._fragments:
            fragment.history[self._group] = 0, 0
        self._fresh = self._fresh and self.steps == 0
        if not self._fresh:
            self._common.end_watch()
            self._common.share_frozen(ranks, chosen[0])

    def _progress(self) -> Progress:
        history = self._fragments.history()
        return Progress(
            {**self._configuration, "parameters": self._common.kinds},
            self._group,
            uuid.uuid4().hex,
            self.steps,
            history,
            "" if history else self._common.digest(),
            self._fragments.to_send(),
        )

    def _problem(self, lost: Sequence[Any]) -> Exception | None:
        """The error that prevents :meth:`rebind` on this rank, or None."""
        if self._fragments.in_progress():
            return hvdc.ExchangeError(
                "DiLoCo.rebind: expected no exchange under way; call synchronize() on all ranks before "
                "some of them leave; where one is lost, go on until step() has raised"
            )
        for state in lost:
            if not isinstance(state, dict) or "compressor" not in state:
                return TypeError(
                    f"DiLoCo.rebind.lost: expected what state_dict() returned on ranks that are gone, got "
                    f"{type(state).__name__}"
                )
        return None

    def _settle_failed(self, furthest: Sequence[Progress]) -> None:
        """Settles residuals after exchanges that failed on this rank, and perhaps not on other ranks.

        Args:
            furthest: for each fragment, the progress of the rank that is furthest ahead.
        """
        own = self._progress()
        for number, fragment in enumerate(self._fragments):
            used, _ = own.ended(furthest[number], number)
            fragment.settle_failed(used=used != 0)

    def _catch_up(
        self, told: Sequence[Progress], chosen: Sequence[int], ranks: Collectives
    ) -> None:
        """Gives ranks that are behind the parameters, state and counts of the other ranks."""
        missing = [behind(told, chosen, rank) for rank in range(ranks.size)]
        wanted = sorted({fragment for fragments in missing for fragment in fragments})
        if wanted:
            # The outer optimizer's settings are those of the source that has come furthest.
            totals = {source: sum(map(told[source].total, range(len(chosen)))) for source in chosen}
            best = max(sorted(totals), key=totals.__getitem__)
            self._common.receive(
                [one.names for one in self._fragments], chosen, wanted, best, ranks
            )
        for fragment in missing[ranks.rank]:
            self._fragments[fragment].take()
        self._fragments.load_history(merged(told, chosen), self._group)
        self.steps = max(one.steps for one in told)

    def _health(self) -> dict[str, Any]:
        """The state of this rank that a rank that is behind needs."""
        return {
            "configuration": self._configuration,
            **self._common.state_dict(),
            "progress": self._progress(),
        }

    @torch.no_grad()
    def _heal(self, state: dict[str, Any]) -> None:
        """Continues from another rank's :meth:`_health`."""
        check_fits("manager", state, self._common, self._configuration)
        progress: Progress = state["progress"]
        self._settle_failed([progress] * len(self._fragments))
        alike = progress.history == self._fragments.history() and self._common.are(state)
        self._load({**state, "steps": progress.steps, "history": progress.history})
        if not alike:
            self._fragments.take()
        self._fragments.load_to_send(progress.to_send)

    @torch.no_grad()
    def _load(self, state: dict[str, Any]) -> None:
        self._common.load(state)
        self._fresh = False
        self._fragments.load_history(state["history"], self._group)
        self.steps = state["steps"]
        for fragment in self._fragments:
            fragment.forget_failed()
