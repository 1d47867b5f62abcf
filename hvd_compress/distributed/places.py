"""The information that ranks exchange for the case that some of them continue in another process group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hvd_compress.process_group.collectives import Collectives
from hvd_compress.ranks.errors import ExchangeError

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


def together(told: Sequence[Place]) -> Positions:
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


def check_lost(
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
