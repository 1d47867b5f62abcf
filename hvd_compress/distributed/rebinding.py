"""Compressors that continue among the ranks of another process group."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hvd_compress.distributed.keys import Keys, kind_of
from hvd_compress.distributed.places import Norms, Place, Positions, check_lost, together
from hvd_compress.engine.residuals import Owned
from hvd_compress.engine.state import begin_with, own_part, restore, snapshot, unsent
from hvd_compress.engine.state_checks import check
from hvd_compress.process_group.agreement import forget_line
from hvd_compress.process_group.collectives import Collectives
from hvd_compress.process_group.compressor import ProcessGroupCompressor
from hvd_compress.process_group.device_collectives import collectives_of
from hvd_compress.process_group.launcher import Line
from hvd_compress.process_group.values import tell
from hvd_compress.ranks.errors import ExchangeError
from hvd_compress.ranks.values import records

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Meeting:
    """The ranks of a process group in which they are about to continue.

    Attributes:
        process_group: the group; None is the default group.
        ranks: the collectives among the ranks.
        places: each rank's place.
        positions: the keys of all ranks, and the furthest position of each.
        lost: the states of ranks that have left.
        values: the value that each rank has told.
    """

    process_group: dist.ProcessGroup | None
    ranks: Collectives
    places: Sequence[Place]
    positions: Positions
    lost: Sequence[dict[str, Any]]
    values: Sequence[Any]


def owed_everywhere(owned: Mapping[str, Any], shape: Sequence[int]) -> torch.Tensor:
    """The residual of an owned part in a state, at its places in the whole tensor, with zeros elsewhere.

    The result is in float32.
    """
    return Owned(**owned).spread(tuple(shape), 1.0).view(tuple(shape))


def owned_of(whole: torch.Tensor | None, cut: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`owed_everywhere`: an owned part in a state, without an owner step.

    Args:
        whole: the residual at its places; None if there is none.
        cut: the other fields of the part.
    """
    residual = None
    if whole is not None:
        residual = own_part(whole.reshape(-1), whole.shape, Owned(**cut))
    return {**cut, "residual": residual, "state": {}}


class RebindingCompressor(ProcessGroupCompressor):
    """The base of a compressor whose ranks may leave and join between two calls.

    For the arguments, see :class:`ProcessGroupCompressor`.
    """

    _made_by_use = ProcessGroupCompressor._made_by_use | {
        *("_routed", "_comparisons", "_calls", "_member", "_members", "_norms")
    }

    _keys: Keys
    _came_from: int | None = None  # The ranks of the last group.

    def _begin_unbound(self) -> None:
        super()._begin_unbound()
        self._routed: set[str] = set()
        self._comparisons: Line | None = None
        self._calls = self._dropped = 0
        self._member = uuid.uuid4().hex
        self._members: list[str] = []  # The group's, by rank, if they have told each other.
        self._norms: Norms | None = None

    @torch.no_grad()
    def rebind(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        lost: Iterable[dict[str, Any]] = (),
    ) -> None:
        """Continues among the ranks of another process group; all of them call it, including new ranks.

        Residuals keep their share in the ranks' average. A rank that stays multiplies its residual by
        ``K' / K``, if there were ``K`` ranks and now are ``K'``; the residuals of parts that it owned are
        included. A new rank begins with zero residuals, and with the keys of the other ranks and their
        positions in the noise. The residuals of a rank that has left are missing, unless ``lost`` holds
        them; a message in the log names these ranks, and the norm of what is missing if it is known.

        Args:
            process_group: the ranks; None is the default group, which may differ from the one before.
            lost: the latest available :meth:`state_dict` of each rank that has left, in CPU memory; the
                same on every rank that stays. The residuals in these states are shared out.

        Raises:
            ExchangeError: tensors are being exchanged; ranks have different seeds, or different keys or
                another order of keys; or something is wrong on another rank. Nothing is changed then.
            ValueError: a state in ``lost`` does not belong to a rank that has left, or has other keys; the
                other ranks raise an :class:`ExchangeError`. Nothing is changed then.
        """
        self.rebind_to(self.meet(process_group, lost))

    def meet(
        self,
        process_group: dist.ProcessGroup | None,
        lost: Iterable[dict[str, Any]],
        value: Any = None,
        problem: Exception | None = None,
    ) -> Meeting:
        """The first part of :meth:`rebind`, with the same errors; changes nothing.

        Args:
            process_group, lost: see :meth:`rebind`.
            value: a value for the other ranks, JSON-serializable.
            problem: an error that prevents the rest on this rank, or None.
        """
        ranks = collectives_of(process_group)
        lost = list(lost)
        try:
            if problem is not None:
                raise problem
            self._expect_idle("rebind")
            if any(slot.owned is not None and slot.owned.state for slot in self._slots):
                raise ValueError(
                    "rebind: expected a compressor without owner_step, got one whose state would be lost "
                    "with the rank that owns it"
                )
            check_lost(lost, self._keys.kinds, self._members)
            for state in lost:
                check("rebind.lost", [self._keys.slots[key] for key in state["keys"]], state, {})
        except (ExchangeError, TypeError, ValueError) as error:
            problem = error
        own_places = {
            key: (kind_of(slot.parameter), slot.step, slot.exchanges)
            for key, slot in self._keys.slots.items()
        }
        members = [str(state["member"]) for state in lost] if problem is None else []
        own = Place(self._member, self._came_from, self._seed, own_places, members)
        values = tell(ranks, [own, value], problem)
        told = records(Place, [place for place, _ in values])
        told_values = [one for _, one in values]
        return Meeting(process_group, ranks, told, together(told), lost, told_values)

    @torch.no_grad()
    def rebind_to(self, meeting: Meeting) -> None:
        """The second part of :meth:`rebind`: continues among ranks that have met."""
        ranks, told, lost = meeting.ranks, meeting.places, meeting.lost
        norms = Norms(ranks.among(range(ranks.size)))
        stayed = sum(one.size is not None for one in told)
        saved = snapshot(self._slots, 0, 1, self._seed)["tensors"]
        before = {slot.name: unsent(saved[slot.name], slot.shape) for slot in self._slots}
        old = self._came_from or ranks.size
        self._report(told, lost)
        self._process_group = meeting.process_group
        self._join_group()
        self._bound = True
        self._came_from = self._size
        forget_line(ranks)
        self._comparisons, self._norms = None, norms
        self._calls = self._dropped = 0
        self._routed.clear()
        self._members = [one.member for one in told]
        for key, (kind, step, exchanges) in meeting.positions.items():
            slot = self._keys.slots.get(key) or self._keys.add(key, kind)
            residual = before.get(key)
            if residual is not None:
                residual *= ranks.size / old
                for state in lost:
                    if key in state["tensors"]:
                        rest = unsent(state["tensors"][key], slot.shape)
                        residual += rest * (ranks.size / stayed / state["size"])
            begin_with(slot, residual)
            slot.route = slot.route.among(self._size)
            slot.step, slot.exchanges, slot.pending = step, exchanges, False

    def load_for_rebind(self, state: dict[str, Any]) -> None:
        """Loads the state of a rank of any group; :meth:`rebind` then carries it over to the next group.

        Raises:
            ValueError: the state has another seed or other tensors. Nothing is changed then.
            ExchangeError: tensors are being exchanged.
        """
        self._expect_idle("load_state_dict")
        with self._keys.of_states("load_state_dict", [state]):
            # rebind() refuses what an owner step's state belongs to, whatever the parts are.
            rank, size = state.get("rank"), state.get("size")
            if type(rank) is not int or type(size) is not int or not 0 <= rank < size:
                raise ValueError(
                    f"load_state_dict: expected a rank of some ranks, got rank {rank} of {size}"
                )
            restore(self._slots, state, rank, size, self._seed, owned_by=lambda slot: None)
        self._last.replace()
        self._came_from = size

    def _report(self, told: Sequence[Place], lost: Sequence[dict[str, Any]]) -> None:
        """Logs which ranks have left, on the first rank that stays."""
        here = {one.member for one in told}
        first = next((one.member for one in told if one.size is not None), None)
        gone = [rank for rank, member in enumerate(self._members) if member not in here]
        if not gone or first != self._member:
            return
        shared = {state["member"] for state in lost}
        missing = [rank for rank in gone if self._members[rank] not in shared]
        norm = self._norms.of(missing) if self._norms else "unknown"
        _log.log(
            logging.WARNING if missing else logging.INFO,
            "ranks %s of %d are gone; %s",
            gone,
            len(self._members),
            f"what ranks {missing} had not sent, of norm {norm}, is missing from training"
            if missing
            else "what they had not sent is shared out",
        )
