"""One record per parameter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from hvd_compress.exchange.routing import DENSE, Route

NamedParameters = torch.nn.Module | Iterable[tuple[str, torch.Tensor]]


@dataclass(eq=False)
class Owned:
    """What a rank keeps for the part of a parameter that it adds up for all ranks.

    Attributes:
        begin: the part's first element, in row-major order.
        end: one behind its last element.
        weight: what one unit of ``residual`` would have added to the sum of all ranks' gradients.
        residual: what has been added up and not yet sent, shape=(end - begin,), float32; None without
            error feedback.
        residual_scale: the loss scale that the residual's numbers are in.
        state: of the owner's step: tensors of shape (end - begin,), and numbers.
    """

    begin: int
    end: int
    weight: float
    residual: torch.Tensor | None = None
    residual_scale: float = 1.0
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Elements of the part."""
        return self.end - self.begin

    def replaces(self, other: Owned | None) -> bool:
        """Whether a record of another exchange, or of none, is in this one's place."""
        return other is None or any(
            getattr(self, field) != getattr(other, field) for field in ("begin", "end", "weight")
        )


@dataclass
class Slot:
    """What a compressor keeps for one parameter.

    Attributes:
        name: the parameter's name, the same on every rank; gathers are called by it.
        index: its position among the compressor's parameters: its id in the noise.
        parameter: the parameter itself.
        route: how its gradient travels.
        residual: what has been computed but not yet sent, shape=(n,), float32; None before the first
            step and without error feedback.
        residual_scale: the loss scale that the residual's numbers are in.
        owned: the same for the part that this rank adds up; None where the exchange has no owners.
        step: how many times its gradient has been encoded: its position in the noise.
        exchanges: how many times its gradient has been exchanged in any way.
        pending: whether an encoded gradient waits for its decompression.
    """

    name: str
    index: int
    parameter: torch.Tensor
    route: Route = DENSE
    residual: torch.Tensor | None = None
    residual_scale: float = 1.0
    owned: Owned | None = None
    step: int = 0
    exchanges: int = 0
    pending: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape."""
        return tuple(self.parameter.shape)

    @property
    def count(self) -> int:
        """The parameter's elements."""
        return self.parameter.numel()


def slots_of(named_parameters: NamedParameters) -> list[Slot]:
    """A slot for each parameter, in the order given.

    Args:
        named_parameters: (name, parameter) pairs, as ``model.named_parameters()`` gives them, or a module.

    Raises:
        TypeError: something else.
        ValueError: none at all, or two of one name.
    """
    expected = "named_parameters: expected pairs as model.named_parameters() gives them"
    if isinstance(named_parameters, torch.nn.Module):
        named_parameters = named_parameters.named_parameters()
    if isinstance(named_parameters, torch.Tensor) or not isinstance(named_parameters, Iterable):
        raise TypeError(f"{expected}, got {type(named_parameters).__name__}")
    slots: list[Slot] = []
    for pair in named_parameters:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TypeError(f"{expected}, got an element of type {type(pair).__name__}")
        name, parameter = pair
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(f"{expected}, got {type(parameter).__name__} for {name!r}")
        slots.append(Slot(name, len(slots), parameter))
    names = [slot.name for slot in slots]
    if not names:
        raise ValueError(f"{expected}, got none (a generator can be used only once)")
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"{expected} with distinct names, got twice: {', '.join(twice)}")
    return slots
