"""A compressor's state as plain dictionaries, for checkpoints."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hvd_compress.codecs.base import Shape, as_matrix
from hvd_compress.engine.parameters import Slot
from hvd_compress.engine.residuals import Factor, LastExchange, Owned, in_place, norm_of, transpose
from hvd_compress.engine.state_checks import OWNED_FIELDS, check, check_parts, expect_state
from hvd_compress.exchanges.layout import OwnedPart
from hvd_compress.ranks import resize as rule

_VERSION = 1


class State:
    """The state that a compressor keeps from step to step: residuals, noise positions and owned parts.

    Args:
        slots: the parameters, which hold their own.
        seed: the seed of the noise.

    Attributes:
        slots, seed: the arguments of these names.
        last: the changes of the last exchange.
    """

    def __init__(self, slots: Iterable[Slot], seed: int) -> None:
        self.slots, self.seed = slots, seed
        self.last = LastExchange()

    def norm(self, device: torch.device) -> torch.Tensor:
        """The l2 norm of all residuals together, without loss scaling."""
        return norm_of(self.slots, device)

    def forget(self) -> None:
        """Discards everything but positions in the noise."""
        for slot in self.slots:
            begin_with(slot, None)
            slot.factor = None
        self.last.replace()

    def snapshot(self, rank: int, size: int) -> dict[str, Any]:
        """The state that determines the next payloads, in addition to the configuration."""
        tensors = {
            slot.name: {
                "residual": slot.residual,
                "residual_scale": slot.residual_scale,
                "step": slot.step,
                "exchanges": slot.exchanges,
                "owned": None if slot.owned is None else _as_dict(slot.owned),
                "factor": None if slot.factor is None else slot.factor.residual,
            }
            for slot in self.slots
        }
        return {
            "version": _VERSION,
            "rank": rank,
            "size": size,
            "seed": self.seed,
            "tensors": tensors,
        }

    def restore(
        self,
        state: dict[str, Any],
        rank: int,
        size: int,
        owned_by: Callable[[Slot], Owned | None],
    ) -> None:
        """Restores a snapshot, or raises an error before anything is changed.

        If ranks now divide a gradient in another way, the residual of the part that a rank owned is added
        to the rank's next gradient. The state of an owner step cannot be moved to another part.

        Args:
            owned_by: makes an empty record of this rank's part of a parameter, or returns None.

        Raises:
            TypeError, ValueError: see :func:`hvd_compress.engine.state_checks.check`; or an owner step's
                state is that of another part.
        """
        slots = list(self.slots)
        place = {"version": _VERSION, "rank": rank, "size": size, "seed": self.seed}
        check("load_state_dict", slots, state, place)
        tensors = state["tensors"]
        for slot in slots:
            part = _owned(tensors[slot.name])
            if part is not None and part.state:
                _check_cut(slot, part, owned_by(slot))
        # Copies are made before anything is changed: there may be no memory for them.
        copies = [_copy(tensors[slot.name], slot.parameter.device) for slot in slots]
        for slot, saved in zip(slots, copies, strict=True):
            slot.forget()
            slot.residual, slot.residual_scale = saved["residual"], saved["residual_scale"]
            slot.step, slot.exchanges = saved["step"], saved["exchanges"]
            slot.owned = _owned(saved)
            factor = saved["factor"]
            slot.factor = None if factor is None else Factor(factor.shape[1], residual=factor)
        self.last.replace()

    def resized(
        self,
        states: Iterable[dict[str, Any]],
        rank: int,
        size: int,
        owned_by: Callable[[Slot], Owned | None],
    ) -> dict[str, Any]:
        """Makes one rank's snapshot from those of all ranks of a job with another number of ranks.

        For the rule, see :mod:`hvd_compress.ranks.resize`.

        Args:
            states: the snapshots, one of each rank, in any order.
            size: the new number of ranks.
            owned_by: makes an empty record of this rank's part of a parameter, or returns None.

        Raises:
            TypeError, ValueError: see :func:`hvd_compress.engine.state_checks.check`; or there is not one
                snapshot of each rank, or the snapshots are those of different steps or models.
        """
        slots, states = list(self.slots), list(states)
        for state in states:
            expect_state("load_resized", state)
        places = [(state.get("rank"), state.get("size")) for state in states]
        numbers = all(type(rank) is int and type(of) is int for rank, of in places)
        if not numbers or sorted(places) != [
            (rank, len(states)) for rank in range(len(states) or 1)
        ]:
            raise ValueError(
                f"load_resized: expected one state of each rank, got those of ranks "
                f"{[rank for rank, _ in places]} of {sorted({str(of) for _, of in places})}"
            )
        states.sort(key=lambda state: state["rank"])
        # Seeds are compared where the result is loaded, and among the states here.
        place = {"version": _VERSION, "seed": states[0].get("seed", 0)}
        for number, state in enumerate(states):
            check(f"load_resized: rank {number}", slots, state, place)
        tensors = {}
        for slot in slots:
            saved = [state["tensors"][slot.name] for state in states]
            for field in ("step", "exchanges"):
                if len({one[field] for one in saved}) > 1:
                    raise ValueError(
                        f"load_resized: {slot.name}: expected states of one step, got {field} "
                        f"{[one[field] for one in saved]}"
                    )
            check_parts(f"load_resized: {slot.name}", slot.shape, [one["owned"] for one in saved])
            tensors[slot.name] = _resized(saved, slot.shape, rank, size, owned_by(slot))
        return {**states[0], "rank": rank, "size": size, "tensors": tensors}


def unsent(saved: dict[str, Any], shape: Shape) -> torch.Tensor:
    """The values that a rank would still add to the sum of all ranks' gradients of one parameter.

    ``saved`` is the parameter's entry in a snapshot. The result is the sum of the rank's residual and that
    of the part that it owns, shape=(n,), float32, in the memory of the CPU, without loss scaling.
    """
    total = _zeros(math.prod(shape))
    if saved["residual"] is not None:
        total += _numbers(saved) / saved["residual_scale"]
    owned = _owned(saved)
    if owned is not None and owned.residual is not None:
        total += owned.spread(shape, owned.weight / owned.residual_scale).cpu()
    return total


def own_part(whole: torch.Tensor, shape: Shape, owned: Owned) -> torch.Tensor:
    """A copy of a rank's part of numbers that are in the order of the gradient, shape=(n,)."""
    ordered = transpose(whole, as_matrix(shape)) if owned.transposed else whole
    return ordered[owned.begin : owned.end].clone()


def begin_with(slot: Slot, residual: torch.Tensor | None) -> None:
    """Sets the state with which a rank begins among other ranks: a residual, and no part that it owns.

    The residual has shape=(n,), float32, without loss scaling; it may be None.
    """
    slot.forget()
    slot.owned = None
    if residual is not None and bool(residual.any()):
        slot.residual, slot.residual_scale = residual, 1.0


def _resized(
    saved: list[dict[str, Any]], shape: Shape, rank: int, size: int, owned: Owned | None
) -> dict[str, Any]:
    scale = saved[0]["residual_scale"]
    parts = [part for part in map(_owned, saved) if part is not None]
    residual, sums = rule.hand_on(
        [
            None if one["residual"] is None else (_numbers(one), scale / one["residual_scale"])
            for one in saved
        ],
        (
            part.spread(shape, part.weight / len(saved) * (scale / part.residual_scale)).cpu()
            for part in parts
            if part.residual is not None
        ),
        size,
        rank,
        divided=owned is not None,
    )
    if owned is not None:
        owned.residual_scale = scale
        owned.residual = None if sums is None else own_part(sums, shape, owned)
        owned.state = _cut_anew(parts, shape, owned)
    return {
        **saved[0],
        "residual": residual,
        "owned": None if owned is None else _as_dict(owned),
    }


def _cut_anew(parts: list[Owned], shape: Shape, owned: Owned) -> dict[str, Any]:
    """The owner step's state for a part, from its states for the parts of an earlier job."""
    state: dict[str, Any] = {}
    if not owned.count:
        return state
    whole: dict[str, torch.Tensor] = {}
    for part in parts:
        for key, value in part.state.items():
            if not part.has_elements(value):
                state.setdefault(key, copy.deepcopy(value))
                continue
            placed = in_place(value.cpu(), part.begin, shape, part.transposed)
            whole[key] = whole[key] + placed if key in whole else placed
    return state | {key: own_part(value, shape, owned) for key, value in whole.items()}


def _as_dict(owned: Owned) -> dict[str, Any]:
    return {field: getattr(owned, field) for field in OWNED_FIELDS}


def _owned(saved: dict[str, Any]) -> Owned | None:
    """The record of the owned part in a snapshot's entry."""
    return None if saved["owned"] is None else Owned(**saved["owned"])


def _check_cut(slot: Slot, saved: Owned, owned: Owned | None) -> None:
    """Raises ``ValueError`` if an owner step's state is that of another part than the rank owns now."""
    if owned is not None and owned.part != saved.part:
        raise ValueError(
            f"load_state_dict: {slot.name}: expected the state of an owner_step for "
            f"{_described(owned.part)}, got one for {_described(saved.part)}: the codec or the exchange "
            f"shares gradients out in another way; load_resized() the states of all ranks"
        )


def _described(part: OwnedPart) -> str:
    begin, end, _, transposed = part
    return f"elements [{begin}, {end}) of the {'transposed ' if transposed else ''}gradient"


def _copy(saved: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """A copy of a snapshot's entry for a parameter or an owned part, with the residual on a device."""
    residual = saved["residual"]
    copied = {**saved, "residual_scale": float(saved["residual_scale"])}
    if residual is not None:
        dtype = residual.dtype if residual.dtype == torch.bfloat16 else torch.float32
        copied["residual"] = residual.to(device, dtype, copy=True)
    if saved.get("owned") is not None:
        copied["owned"] = _copy(saved["owned"], device)
    if saved.get("factor") is not None:
        copied["factor"] = saved["factor"].to(device, torch.float32, copy=True)
    if "state" in saved:
        copied["state"] = copy.deepcopy(saved["state"])
    return copied


def _numbers(saved: dict[str, Any]) -> torch.Tensor:
    """The residual in a snapshot's entry, float32, in the memory of the CPU."""
    return saved["residual"].to("cpu", torch.float32)


def _zeros(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.float32, device="cpu")
