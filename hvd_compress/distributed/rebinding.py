"""The ranks of a compressor's group, which may leave and join between two calls."""

from __future__ import annotations

import functools
import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hvd_compress.distributed.keys import Keys, kind_of
from hvd_compress.distributed.ranks import CallRanks, Norms
from hvd_compress.engine.state import State, begin_with, unsent
from hvd_compress.engine.state_checks import check
from hvd_compress.process_group.agreement import forget_comparisons
from hvd_compress.process_group.collectives import Collectives
from hvd_compress.process_group.device_collectives import collectives_of
from hvd_compress.process_group.values import tell
from hvd_compress.ranks.errors import ExchangeError
from hvd_compress.ranks.values import records

_log = logging.getLogger(__name__)


Positions = Mapping[str, tuple[dict[str, Any], int, int]]
"""For each key: the dtype and shape of its tensors, the number of times that they were encoded, and the
number of times that they were exchanged."""


@dataclass(frozen=True)
class Place:
    """A rank before it continues in another group.

    Attributes:
        member: a unique name of the rank's compressor.
        size: the size of the group that the rank comes from; None if the rank is new.
        seed: the seed of the noise.
        positions: the positions of the rank's keys, in the order of the keys' first calls.
        lost: the names of the ranks that have left and whose states this rank has.
    """

    member: str
    size: int | None
    seed: int
    positions: Positions
    lost: Sequence[str]


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


class Members:
    """The ranks of a compressor's group: who they are, since when, and what they carry over to the next.

    Every change of a group is a :meth:`meet` of the ranks of the next one, and a :meth:`move` to it:
    :meth:`.Compressor.rebind`, that of a DiLoCo, and a quorum of torchft.

    Args:
        ranks: the compressor's ranks.
        keys: its keys.
        state: its state.

    Attributes:
        own: a unique name of this compressor.
        came_from: the number of ranks of the last group; None before the first one.
    """

    def __init__(self, ranks: CallRanks, keys: Keys, state: State) -> None:
        self._ranks, self._keys, self._state = ranks, keys, state
        self.came_from: int | None = None
        self._names: Sequence[str] = ()  # By rank, if the members have told each other.

    @functools.cached_property
    def own(self) -> str:
        """A unique name of this compressor."""
        return uuid.uuid4().hex

    def meet(
        self,
        process_group: dist.ProcessGroup | None,
        lost: Iterable[dict[str, Any]],
        value: Any = None,
        problem: Exception | None = None,
    ) -> Meeting:
        """The first part of :meth:`.Compressor.rebind`, with the same errors; changes nothing.

        Args:
            process_group, lost: see :meth:`.Compressor.rebind`.
            value: a value for the other ranks, JSON-serializable.
            problem: an error that prevents the rest on this rank, or None.
        """
        ranks = collectives_of(process_group)
        lost = list(lost)
        try:
            if problem is not None:
                raise problem
            self._ranks.expect_idle("rebind")
            if any(slot.owned is not None and slot.owned.state for slot in self._state.slots):
                raise ValueError(
                    "rebind: expected a compressor without owner_step, got one whose state would be lost "
                    "with the rank that owns it"
                )
            _check_lost(lost, self._keys.kinds, self._names)
            for state in lost:
                check("rebind.lost", [self._keys.slots[key] for key in state["keys"]], state, {})
        except (ExchangeError, TypeError, ValueError) as error:
            problem = error
        positions = {
            key: (kind_of(slot.parameter), slot.step, slot.exchanges)
            for key, slot in self._keys.slots.items()
        }
        names = [str(state["member"]) for state in lost] if problem is None else []
        own = Place(self.own, self.came_from, self._state.seed, positions, names)
        told = tell(ranks, [own, value], problem)
        places = records(Place, [place for place, _ in told])
        values = [one for _, one in told]
        return Meeting(process_group, ranks, places, _together(places), lost, values)

    @torch.no_grad()
    def move(self, meeting: Meeting, join: Callable[[], None]) -> None:
        """The second part of :meth:`.Compressor.rebind`: continues among ranks that have met.

        ``join`` is a function that joins the ranks of the next group.
        """
        ranks, places, lost = meeting.ranks, meeting.places, meeting.lost
        norms = Norms(ranks.among(range(ranks.size)))
        stayed = sum(one.size is not None for one in places)
        saved = self._state.snapshot(0, 1)["tensors"]
        before = {key: unsent(saved[key], slot.shape) for key, slot in self._keys.slots.items()}
        old = self.came_from or ranks.size
        self._report(places, lost)
        self._ranks.move(meeting.process_group)
        join()
        self._ranks.joined = True
        self.came_from = ranks.size
        forget_comparisons(ranks)
        self._ranks.norms = norms
        self._keys.routed.clear()
        self._names = [one.member for one in places]
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
            slot.route = slot.route.among(ranks.size)
            slot.step, slot.exchanges, slot.pending = step, exchanges, False

    def load(self, state: dict[str, Any]) -> None:
        """Loads the state of a rank of any group, which :meth:`move` then carries over to the next group.

        Raises:
            ValueError: the state has another seed or other tensors. Nothing is changed then.
            ExchangeError: tensors are being exchanged.
        """
        self._ranks.expect_idle("load_state_dict")
        with self._keys.of_states("load_state_dict", [state]):
            # meet() refuses what an owner step's state belongs to, whatever the parts are.
            rank, size = state.get("rank"), state.get("size")
            if type(rank) is not int or type(size) is not int or not 0 <= rank < size:
                raise ValueError(
                    f"load_state_dict: expected a rank of some ranks, got rank {rank} of {size}"
                )
            self._state.restore(state, rank, size, owned_by=lambda slot: None)
        self.came_from = size

    def _report(self, places: Sequence[Place], lost: Sequence[dict[str, Any]]) -> None:
        """Logs which ranks have left, on the first rank that stays."""
        here = {one.member for one in places}
        first = next((one.member for one in places if one.size is not None), None)
        gone = [rank for rank, name in enumerate(self._names) if name not in here]
        if not gone or first != self.own:
            return
        shared = {state["member"] for state in lost}
        missing = [rank for rank in gone if self._names[rank] not in shared]
        norms = self._ranks.norms
        norm = norms.of(missing) if norms else "unknown"
        _log.log(
            logging.WARNING if missing else logging.INFO,
            "ranks %s of %d are gone; %s",
            gone,
            len(self._names),
            f"what ranks {missing} had not sent, of norm {norm}, is missing from training"
            if missing
            else "what they had not sent is shared out",
        )


def _together(told: Sequence[Place]) -> Positions:
    """The keys of all ranks, in their order, and the furthest position of each.

    Raises:
        ExchangeError: the ranks do not fit together.
    """
    seeds = [one.seed for one in told]
    if len(set(seeds)) > 1:
        raise ExchangeError(f"rebind: expected one seed on all ranks, got {seeds}")
    stayed = {rank: list(one.lost) for rank, one in enumerate(told) if one.size is not None}
    if len({tuple(lost) for lost in stayed.values()}) > 1:
        raise ExchangeError(
            f"rebind.lost: expected the same states on all ranks that stay, got {stayed} by rank"
        )
    here = {one.member: rank for rank, one in enumerate(told)}
    for member in next(iter(stayed.values()), []):
        if member in here:
            raise ExchangeError(
                f"rebind.lost: expected states of ranks that are gone, got that of rank {here[member]} of "
                f"the new group, which would count twice"
            )
    longest = max((list(one.positions) for one in told), key=len)
    found: dict[str, tuple[dict[str, Any], int, int]] = {}
    for rank, one in enumerate(told):
        # A rank that was interrupted has not seen the others' last keys, and a new one none.
        if list(one.positions) != longest[: len(one.positions)]:
            raise ExchangeError(
                f"rebind: expected the same keys in the same order on all ranks that stay, got "
                f"{list(one.positions)} on rank {rank} and {longest} on another one"
            )
        for key, (kind, step, exchanges) in one.positions.items():
            before = found.get(key, (kind, step, exchanges))
            if before[0] != kind:
                raise ExchangeError(
                    f"rebind: {key}: expected tensors of {before[0]}, got {kind} on rank {rank}"
                )
            found[key] = kind, max(step, before[1]), max(exchanges, before[2])
    return {key: found[key] for key in longest}


def _check_lost(
    lost: Sequence[dict[str, Any]], kinds: Mapping[str, dict[str, Any]], members: Sequence[str]
) -> None:
    """Raises ``ValueError`` if a state cannot belong to a rank that has left.

    Args:
        lost: the states.
        kinds: the dtype and shape of each key.
        members: the names of the last group's ranks; empty if they are not known.
    """
    for state in lost:
        keys = state.get("keys") if isinstance(state, dict) else None
        size = state.get("size") if isinstance(state, dict) else None
        if not isinstance(keys, dict) or "member" not in state or type(size) is not int or size < 1:
            raise ValueError(
                "rebind.lost: expected states of compressors of hvd_compress.distributed, got another "
                "object"
            )
        if members and state["member"] not in members:
            raise ValueError(
                f"rebind.lost: expected states of ranks of the last process group, got one of another "
                f"rank ({state['rank']} of {state['size']}), perhaps of one that was gone before: hand "
                f"over each state once"
            )
        for key, kind in keys.items():
            if kinds.get(key) != kind:
                raise ValueError(
                    f"rebind.lost: expected keys and shapes of this compressor's calls, got {key} of "
                    f"{kind}"
                )
    members = [state["member"] for state in lost]
    if len(set(members)) != len(members):
        raise ValueError(
            "rebind.lost: expected one state of each rank that is gone, got two of one"
        )
