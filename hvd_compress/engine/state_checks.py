"""Checks that a snapshot fits a compressor, before anything is changed."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from hvd_compress.codecs.base import Shape, as_matrix
from hvd_compress.codecs.checks import check_number
from hvd_compress.engine.parameters import Slot

_POSITIONS = ("step", "exchanges")
_FIELDS = ("residual", "residual_scale", *_POSITIONS, "owned", "factor")
OWNED_FIELDS = ("begin", "end", "weight", "transposed", "residual", "residual_scale", "state")

_MOST = 2**63 - 1


def expect_state(
    who: str, state: Any, fields: Sequence[str] = ("version", "rank", "tensors")
) -> None:
    """Raises an error unless a state has all fields, as what ``state_dict()`` returned.

    Raises:
        TypeError: it is not a dictionary.
        ValueError: fields are missing, as in a model's state.
    """
    if not isinstance(state, dict):
        got = "None" if state is None else f"an object of type {type(state).__name__}"
        raise TypeError(f"{who}: expected what state_dict() returned, got {got}")
    if not state.keys() >= set(fields):
        found = ", ".join(map(repr, list(state)[:3])) or "nothing"
        raise ValueError(
            f"{who}: expected what the compressor's state_dict() returned, with {', '.join(fields)}, got a "
            f"dictionary of {found}: not a compressor's state"
        )


def check(who: str, slots: Iterable[Slot], state: Any, place: Mapping[str, int]) -> None:
    """Raises an error unless a snapshot can be loaded.

    Args:
        who: the beginning of the error message.
        place: the expected values of some fields of the whole snapshot.

    Raises:
        TypeError: a field is of the wrong type.
        ValueError: a field is missing, unknown or out of range; or the snapshot does not fit the place or
            the model. The message names the parameter and the field.
    """
    expect_state(who, state)
    for field, want in place.items():
        got = state.get(field)
        if type(got) is not int or got != want:
            raise ValueError(
                f"{who}: expected {field} {want}, got {got}; each rank saves and loads a file of its own; "
                f"another number of ranks needs those of all: load_resized()"
            )
    tensors = state.get("tensors")
    _expect(f"{who}: tensors", tensors, dict)
    slots = list(slots)
    _check_names(who, slots, tensors)
    for slot in slots:
        _check_saved(f"{who}: {slot.name}", slot.shape, tensors[slot.name])


def check_parts(who: str, shape: Shape, parts: Sequence[dict[str, Any] | None]) -> None:
    """Raises ``ValueError`` unless the parts that all ranks own make up a gradient.

    Args:
        who: the beginning of the error message.
        shape: the gradient's shape.
        parts: one part for each rank, already checked; all None if the exchange had no owners.
    """
    owned = [part for part in parts if part is not None]
    if not owned:
        return
    # Each element has an owner on every host, and together these speak for all ranks.
    weights = dict.fromkeys((0, math.prod(shape)), 0)
    for part in owned:
        weights[part["begin"]] = weights.get(part["begin"], 0) + part["weight"]
        weights[part["end"]] = weights.get(part["end"], 0) - part["weight"]
    total, gap = 0, False
    for place in sorted(weights)[:-1]:
        total += weights[place]
        gap |= total != len(parts)
    if gap or len(owned) < len(parts) or len({part["transposed"] for part in owned}) > 1:
        cut = [part and (part["begin"], part["end"], part["weight"]) for part in parts]
        raise ValueError(
            f"{who}: expected parts owned by the ranks that make up {math.prod(shape)} elements, got "
            f"(begin, end, weight) {cut}"
        )


def _check_saved(who: str, shape: Shape, saved: Any) -> None:
    count = math.prod(shape)
    _check_fields(who, saved, _FIELDS)
    for field in _POSITIONS:
        check_number(who, field, saved[field], 0, _MOST, integer=True)
    _check_residual(who, saved, count)
    if saved["factor"] is not None:
        _check_factor(f"{who}.factor", saved["factor"], as_matrix(shape)[1])
    owned = saved["owned"]
    if owned is None:
        return
    who = f"{who}'s part"
    _check_fields(who, owned, OWNED_FIELDS)
    for field, low, high in (("begin", 0, count), ("end", 0, count), ("weight", 1, _MOST)):
        check_number(who, field, owned[field], low, high, integer=True)
    if owned["begin"] > owned["end"]:
        raise ValueError(f"{who}: expected begin <= end, got [{owned['begin']}, {owned['end']})")
    _expect(f"{who}.transposed", owned["transposed"], bool)
    if owned["transposed"]:
        as_matrix(shape)
    _check_residual(who, owned, owned["end"] - owned["begin"])
    _expect(f"{who}.state", owned["state"], dict)
    for key, value in owned["state"].items():
        if isinstance(value, torch.Tensor):
            _check_in_memory(f"{who}.state[{key!r}]", value)
        nan = isinstance(value, float) and math.isnan(value)
        if nan or (isinstance(value, torch.Tensor) and bool(value.isnan().any())):
            raise ValueError(f"{who}.state[{key!r}]: expected numbers, got a NaN")


def _check_residual(who: str, saved: dict[str, Any], count: int) -> None:
    check_number(who, "residual_scale", saved["residual_scale"], sys.float_info.min, 1e300)
    residual = saved["residual"]
    if residual is None:
        return
    _check_numbers(f"{who}.residual", residual)
    if tuple(residual.shape) != (count,):
        got = residual.numel() if residual.dim() == 1 else f"shape {tuple(residual.shape)}"
        raise ValueError(f"{who}: expected a residual of {count} elements, got {got}")
    _check_finite(f"{who}.residual", residual)


def _check_factor(what: str, factor: Any, columns: int) -> None:
    _check_numbers(what, factor)
    if factor.dim() != 2 or factor.shape[0] != columns:
        raise ValueError(
            f"{what}: expected a matrix of {columns} rows, got shape {tuple(factor.shape)}"
        )
    _check_finite(what, factor)


def _check_numbers(what: str, tensor: Any) -> None:
    _expect(what, tensor, torch.Tensor)
    _check_in_memory(what, tensor)
    if not tensor.is_floating_point():
        raise TypeError(f"{what}: expected floating-point numbers, got {tensor.dtype}")


def _check_finite(what: str, tensor: torch.Tensor) -> None:
    if not bool(tensor.to(torch.float32).isfinite().all()):
        raise ValueError(
            f"{what}: expected finite numbers, got an Inf or a NaN, which every later gradient "
            f"would have"
        )


def _check_in_memory(what: str, tensor: torch.Tensor) -> None:
    if tensor.is_meta or tensor.layout is not torch.strided:
        got = "a meta tensor" if tensor.is_meta else f"layout {tensor.layout}"
        raise TypeError(f"{what}: expected a dense tensor with memory, got {got}")


def _check_fields(who: str, saved: Any, fields: Sequence[str]) -> None:
    _expect(who, saved, dict)
    missing = [field for field in fields if field not in saved]
    unknown = sorted(str(field) for field in saved if field not in fields)
    if missing or unknown:
        raise ValueError(
            f"{who}: expected the fields {', '.join(fields)}, got none of {missing}, and {unknown} that "
            f"state_dict() does not have"
        )


def _check_names(who: str, slots: Iterable[Slot], tensors: dict[str, Any]) -> None:
    names = {slot.name for slot in slots}
    if names != set(tensors):
        missing = sorted(names - set(tensors))
        unknown = sorted(map(str, set(tensors) - names))
        raise ValueError(
            f"{who}: expected this model's parameters, got none for {missing[:5]} and {unknown[:5]} that "
            f"it does not have"
        )


def _expect(what: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{what}: expected a {kind.__name__}, got {type(value).__name__}")
