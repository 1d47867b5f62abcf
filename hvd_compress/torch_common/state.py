"""A compressor's state as plain dictionaries, for checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hvd_compress.torch_common.slots import Slot

_VERSION = 1


def snapshot(slots: Iterable[Slot], rank: int, size: int, seed: int) -> dict[str, Any]:
    """Everything that makes the next payloads what they will be, beside the configuration."""
    tensors = {
        slot.name: {
            "residual": slot.residual,
            "residual_scale": slot.residual_scale,
            "step": slot.step,
            "exchanges": slot.exchanges,
        }
        for slot in slots
    }
    return {"version": _VERSION, "rank": rank, "size": size, "seed": seed, "tensors": tensors}


def restore(slots: Iterable[Slot], state: dict[str, Any], rank: int, size: int, seed: int) -> None:
    """Puts a snapshot back, or raises ``ValueError`` before anything is changed."""
    slots = list(slots)
    expected = {"version": _VERSION, "rank": rank, "size": size, "seed": seed}
    for field, want in expected.items():
        got = state.get(field)
        if got != want:
            raise ValueError(
                f"load_state_dict: expected {field} {want}, got {got}; each rank saves and loads a file of "
                f"its own, and another number of ranks starts without residuals"
            )
    tensors = state["tensors"]
    names = {slot.name for slot in slots}
    if names != set(tensors):
        missing, unknown = sorted(names - set(tensors)), sorted(set(tensors) - names)
        raise ValueError(
            f"load_state_dict: expected this model's parameters, got none for {missing[:5]} and "
            f"{unknown[:5]} that it does not have"
        )
    for slot in slots:
        residual = tensors[slot.name]["residual"]
        if residual is not None and residual.numel() != slot.parameter.numel():
            raise ValueError(
                f"load_state_dict: {slot.name}: expected a residual of {slot.parameter.numel()} elements, "
                f"got {residual.numel()}"
            )
    for slot in slots:
        saved = tensors[slot.name]
        residual = saved["residual"]
        slot.residual = None if residual is None else residual.to(torch.float32).clone()
        slot.residual_scale = saved["residual_scale"]
        slot.step = saved["step"]
        slot.exchanges = saved["exchanges"]
