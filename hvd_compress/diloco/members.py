"""The ranks of a DiLoCo, which may leave and join between two exchanges."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hvd_compress.codecs.checks import check_number
from hvd_compress.diloco.common import CommonParameters
from hvd_compress.diloco.fragments import Fragments
from hvd_compress.distributed.compressor import Compressor
from hvd_compress.process_group.collectives import Collectives
from hvd_compress.process_group.device_collectives import collectives_of
from hvd_compress.process_group.values import problem_told, tell
from hvd_compress.ranks import agreement
from hvd_compress.ranks.errors import ExchangeError
from hvd_compress.ranks.values import records

if TYPE_CHECKING:
    from hvd_compress.diloco.shards import Shards


Counts = tuple[int, int]
"""The number of a fragment's exchanges whose average was used, and of those that were dropped."""


@dataclass(frozen=True)
class Progress:
    """A rank's progress, which ranks tell each other when they form a new group.

    Attributes:
        settings: the settings that have to be the same on every rank.
        group: the name of the group that the rank comes from; None if it comes from no group.
        offered: a name for the new group; the group takes the first rank's.
        steps: the number of training steps.
        history: the exchanges of each fragment, by the name of the group in which they were made.
        begins: for a new rank, a digest of its common parameters; otherwise empty.
        to_send: the parameters that the rank sends in the next exchanges, by name; see
            :attr:`.Fragment.to_send`.
    """

    settings: Mapping[str, Any]
    group: str | None
    offered: str
    steps: int
    history: Mapping[str, Sequence[Counts]] = field(default_factory=dict)
    begins: str = ""
    to_send: Mapping[str, bool] = field(default_factory=dict)

    @property
    def new(self) -> bool:
        """Whether the rank does not have the common parameters of any group yet."""
        return not self.history

    def total(self, fragment: int) -> int:
        """The number of a fragment's exchanges in all groups."""
        return sum(sum(counts[fragment]) for counts in self.history.values())

    def ended(self, other: Progress, fragment: int) -> Counts:
        """The exchanges in this rank's group that another rank completed and this rank did not."""
        if self.group is None:
            return 0, 0
        mine = self.history[self.group][fragment]
        theirs = other.history.get(self.group)
        used, dropped = mine if theirs is None else theirs[fragment]
        return used - mine[0], dropped - mine[1]


class Members:
    """The ranks with which a DiLoCo exchanges, and how far each of them has come.

    They change in :meth:`meet` alone, whether a script names the next group or a quorum of torchft.

    Args:
        common: the common parameters.
        fragments: the fragments.
        compressor: the compressor that sends the differences.
        shards: the ranks of this worker; None without a mesh.
        settings: the settings that have to be the same on every rank.

    Attributes:
        configuration: the settings that have to be those of a state.
        group: the name of the present group; None before the first one.
        fresh: whether ranks have not told each other yet what they begin with.
        steps: the number of training steps.
        history: the exchanges of each fragment, by the name of the group in which they were made.
    """

    def __init__(
        self,
        common: CommonParameters,
        fragments: Fragments,
        compressor: Compressor,
        shards: Shards | None,
        settings: dict[str, Any],
    ) -> None:
        self._common = common
        self._fragments = fragments
        self._compressor = compressor
        self._shards = shards
        self._settings = settings
        self.configuration = settings if shards is None else {**settings, "shard": shards.number}
        self.group: str | None = None
        self.fresh = True
        self.steps = 0
        self.history: dict[str, list[Counts]] = {}

    @property
    def counts(self) -> list[Counts]:
        """The exchanges of each fragment, in all groups."""
        every = [(0, 0)] * len(self._fragments), *self.history.values()
        return [
            (sum(u for u, _ in one), sum(d for _, d in one)) for one in zip(*every, strict=True)
        ]

    def count(self, fragment: int, used: bool) -> None:
        """Counts an exchange that has ended in the present group."""
        assert self.group is not None
        before = self.history[self.group][fragment]
        self.history[self.group][fragment] = before[0] + used, before[1] + (not used)

    def meet(self, process_group: dist.ProcessGroup | None, lost: Sequence[Any] = ()) -> None:
        """Continues among the ranks of a group: see :meth:`DiLoCo.rebind`."""
        if self._shards is None:
            self._meet(process_group, lost)
            return
        with self._shards.problem_told():
            group = self._shards.group_of(process_group)
        with problem_told(group):
            self._shards.agree({**self._settings, "parameters": list(self._common.own)})
        with self._shards.problem_told():
            self._meet(group, lost)
        self._shards.begin({"steps": self.steps, "rounds of fragments": self.counts})

    def begin(self) -> None:
        """Gives all ranks the weights with which the first rank makes its first step."""
        ranks = collectives_of(self._compressor.process_group)
        told = tell(ranks, list(self._common.loaded))
        loaded = {name for names in told for name in names}
        self._common.take_loaded([name for name in self._common.own if name in loaded], ranks)
        self._common.share_frozen(ranks, 0)
        self.fresh = False

    def check(self, who: str, state: Any) -> None:
        """Raises an error unless a state can be loaded now.

        Raises:
            TypeError, ValueError: it is not one of this model, with these settings.
            ExchangeError: exchanges are in progress.
        """
        if self._fragments.in_progress():
            raise ExchangeError(
                f"DiLoCo.{who}: expected no exchange under way; call synchronize() first"
            )
        if not isinstance(state, dict) or "configuration" not in state:
            kind = "None" if state is None else f"an object of type {type(state).__name__} without"
            raise TypeError(f"DiLoCo.{who}: expected what state_dict() returned, got {kind}")
        check_number(f"DiLoCo.{who}", "steps", state.get("steps"), 0, sys.maxsize, integer=True)
        if "compressor" not in state:
            raise ValueError(f"DiLoCo.{who}: expected a compressor's state, got none")
        _check_counts(who, state.get("history"), len(self._fragments))
        _check_due(who, state.get("due"), self._common, self._fragments)
        _check_to_send(who, state.get("to_send"), self._common)
        got = state["configuration"]
        for name, value in self.configuration.items():
            found = got.get(name) if isinstance(got, dict) else got
            if isinstance(found, torch.Tensor) or found != value:
                raise ValueError(f"DiLoCo.{who}: expected {name} {value}, got {found}")
        self._common.check(who, state)

    def load(self, state: dict[str, Any]) -> None:
        """Continues from :meth:`DiLoCo.state_dict`, except for the compressor's part."""
        self._common.load(state)
        self._fragments.load(state)
        self._continue(state["history"])
        self.fresh = False
        self.steps = state["steps"]

    def _continue(self, history: Mapping[str, Sequence[Counts]]) -> None:
        self.history = {name: list(counts) for name, counts in history.items()}
        if self.group is not None:
            self.history.setdefault(self.group, [(0, 0)] * len(self._fragments))

    def _meet(self, process_group: dist.ProcessGroup | None, lost: Sequence[Any]) -> None:
        problem = self._problem(lost)
        states = [] if problem is not None else [state["compressor"] for state in lost]
        own = self._progress()
        meeting = self._compressor.members.meet(process_group, states, own, problem)
        ranks, told = meeting.ranks, records(Progress, meeting.values)
        agreement.compare([dict(one.settings) for one in told])
        chosen = sources(told, len(self._fragments))
        for number, fragment in enumerate(self._fragments):
            used, _ = own.ended(told[chosen[number]], number)
            fragment.settle_failed(used=used != 0)
        self._compressor.rebind_to(meeting)
        self._catch_up(told, chosen, ranks)
        names = [fragment.names for fragment in self._fragments]
        self._fragments.load_to_send(all_to_send(told, chosen, names))
        self.group = told[0].offered
        self._continue(merged(told, chosen))
        self.fresh = self.fresh and self.steps == 0
        if not self.fresh:
            self._common.end_watch()
            self._common.share_frozen(ranks, chosen[0])

    def _progress(self) -> Progress:
        return Progress(
            {**self.configuration, "parameters": self._common.kinds},
            self.group,
            uuid.uuid4().hex,
            self.steps,
            self.history,
            "" if self.history else self._common.digest(),
            self._fragments.to_send(),
        )

    def _problem(self, lost: Sequence[Any]) -> Exception | None:
        """The error that prevents :meth:`meet` on this rank, or None."""
        if self._fragments.in_progress():
            return ExchangeError(
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
        self.steps = max(one.steps for one in told)


def sources(told: Sequence[Progress], fragments: int) -> list[int]:
    """For each fragment, the rank whose common parameters all other ranks take.

    This is the rank with the most exchanges; among equals, the first one that is not new.
    """

    def reached(rank: int, fragment: int) -> tuple[int, bool, int]:
        return told[rank].total(fragment), not told[rank].new, -rank

    return [
        max(range(len(told)), key=lambda rank: reached(rank, fragment))
        for fragment in range(fragments)
    ]


def behind(told: Sequence[Progress], chosen: Sequence[int], rank: int) -> list[int]:
    """The fragments whose latest common parameters a rank does not have.

    New ranks that begin with the same common parameters keep the training that they have done since.

    Args:
        told: the progress of each rank.
        chosen: for each fragment, the rank that has the latest parameters.
        rank: the rank.
    """
    return [
        fragment
        for fragment, source in enumerate(chosen)
        if rank != source
        and (
            told[rank].begins != told[source].begins
            or told[rank].total(fragment) < told[source].total(fragment)
        )
    ]


def all_to_send(
    told: Sequence[Progress], chosen: Sequence[int], fragments: Sequence[Sequence[str]]
) -> dict[str, bool]:
    """The parameters that some rank has to send; a rank that is behind sends what the others do.

    Such a rank takes the common parameters, and may not know yet which ones are frozen.

    Args:
        told: the progress of each rank.
        chosen: for each fragment, the rank that has the latest parameters.
        fragments: the names of each fragment's parameters.
    """
    found: dict[str, bool] = {}
    for rank, one in enumerate(told):
        taken = {name for number in behind(told, chosen, rank) for name in fragments[number]}
        for name, loaded in one.to_send.items():
            if name not in taken:
                found[name] = loaded or found.get(name, False)
    return found


def merged(told: Sequence[Progress], chosen: Sequence[int]) -> dict[str, list[Counts]]:
    """The history of the parameters that come from the chosen ranks, one for each fragment."""
    groups = {name: None for rank in chosen for name in told[rank].history}
    return {
        name: [
            _pair(told[rank].history[name][fragment]) if name in told[rank].history else (0, 0)
            for fragment, rank in enumerate(chosen)
        ]
        for name in groups
    }


def _pair(counts: Sequence[int]) -> Counts:
    used, dropped = counts  # A list, where it has travelled.
    return used, dropped


def _check_counts(who: str, history: Any, fragments: int) -> None:
    every = history.values() if isinstance(history, dict) else [history]
    if not all(
        isinstance(counts, list)
        and len(counts) == fragments
        and all(len(one) == 2 and all(type(n) is int and n >= 0 for n in one) for one in counts)
        for counts in every
    ):
        raise ValueError(
            f"DiLoCo.{who}: history: expected counts of {fragments} fragments, got {history}"
        )


def _check_due(who: str, due: Any, common: CommonParameters, fragments: Fragments) -> None:
    fragment: Any
    for fragment, one in due.items() if isinstance(due, dict) else [(None, due)]:
        known = type(fragment) is int and 0 <= fragment < len(fragments)
        names = fragments[fragment].names if known else []
        shapes = [common.values[name].shape for name in names]
        fits = known and isinstance(one, (tuple, list)) and len(one) == 4
        if (
            not fits
            or type(one[0]) is not int
            or [getattr(t, "shape", None) for t in one[1]] != shapes
            or [type(flag) for flag in (one[2], *one[3])] != [bool] * (1 + len(names))
        ):
            raise ValueError(
                f"DiLoCo.{who}: due: expected averages of fragments by number, got others for fragment "
                f"{fragment}"
            )


def _check_to_send(who: str, names: Any, common: CommonParameters) -> None:
    if not isinstance(names, dict) or not all(
        name in common.copies and type(loaded) is bool for name, loaded in names.items()
    ):
        raise ValueError(
            f"DiLoCo.{who}: to_send: expected names of parameters, each with a bool, got {names}"
        )
