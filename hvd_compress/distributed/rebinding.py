"""Compressors that continue among the ranks of another process group."""

from __future__ import annotations

import functools
import logging
import uuid
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from hvd_compress.distributed.keys import Keys, kind_of
from hvd_compress.distributed.ranks import CallRanks
from hvd_compress.engine.residuals import Owned
from hvd_compress.engine.slots import Slot
from hvd_compress.engine.state import begin_with, own_part, restore, snapshot, unsent
from hvd_compress.engine.state_checks import check
from hvd_compress.exchanges.routing import Route
from hvd_compress.process_group.agreement import forget_comparisons
from hvd_compress.process_group.collectives import Collectives
from hvd_compress.process_group.compressor import ProcessGroupCompressor
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


@dataclass
class Norms:
    """The norms of all ranks' residuals, which ranks tell each other without waiting.

    Attributes:
        ranks: the collectives among the ranks, in a group that nothing else uses.
        shares: the number of times that this rank has told its own.
        early: whether it told the last one before an exchange, and not after it.
        arrived: the number of this rank's share that the others' latest norms belong to.
        values: these norms, shape=(ranks,), float64.
    """

    ranks: Collectives
    shares: int = 0
    early: bool = False
    arrived: int = 0
    values: torch.Tensor = field(
        default_factory=lambda: torch.empty(0, dtype=torch.float64, device="cpu")
    )

    @property
    def complete(self) -> bool:
        """Whether the norms of all ranks have arrived since the last exchange."""
        return 0 < self.shares == self.arrived and not self.early

    def of(self, ranks: Iterable[int]) -> str:
        """The norm of the residuals of some ranks together, in words."""
        if not self.arrived:
            return "unknown"
        together = self.values.square()[list(ranks)].sum().sqrt().item()
        return f"{together:.6g}" + ("" if self.complete else " before the last exchange")


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

    _ranks: CallRanks
    _keys: Keys

    _came_from: int | None = None  # The ranks of the last group.
    _members: Sequence[str] = ()  # The group's, by rank, if they have told each other.
    _norms: Norms | None = None

    @functools.cached_property
    def _member(self) -> str:
        return uuid.uuid4().hex

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "came from": self._came_from}

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
            _check_lost(lost, self._keys.kinds, self._members)
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
        return Meeting(process_group, ranks, told, _together(told), lost, told_values)

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
        self._ranks.move(meeting.process_group)
        self._join()
        self._ranks.joined = True
        self._came_from = ranks.size
        forget_comparisons(ranks)
        self._norms = norms
        self._keys.routed.clear()
        self._members = [one.member for one in told]
        for key, (kind, step, exchanges) in meeting.positions.items():
            slot = self._keys.slots.get(key) or self._keys.add(key, kind, self._route_of)
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

    @abstractmethod
    def _route_of(self, slot: Slot, dtype: str) -> Route:
        """The route of a new record for a dtype."""

    def load_for_rebind(self, state: dict[str, Any]) -> None:
        """Loads the state of a rank of any group; :meth:`rebind` then carries it over to the next group.

        Raises:
            ValueError: the state has another seed or other tensors. Nothing is changed then.
            ExchangeError: tensors are being exchanged.
        """
        self._expect_idle("load_state_dict")
        with self._keys.of_states("load_state_dict", [state], self._route_of):
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
