"""The record that a compressor keeps for each parameter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch

from hvd_compress.engine.residuals import Kept
from hvd_compress.exchanges.routing import UNCOMPRESSED_ROUTE, Route

NamedParameters = torch.nn.Module | Iterable[tuple[str, torch.Tensor]]


@dataclass(eq=False)
class Slot(Kept):
    """The record that a compressor keeps for one parameter.

    Attributes:
        name: the parameter's name, the same on every rank.
        index: the parameter's position among the compressor's parameters, which is its id in the noise.
        parameter: the parameter itself.
        route: the route of the parameter's gradient.
        step: the number of times that the gradient has been encoded and sent, which is the gradient's
            position in the noise.
        exchanges: the number of times that the gradient has been exchanged in any way.
        pending: whether a gradient waits for the end of the step.
        shape: the parameter's shape.
        count: the number of elements in the parameter.
    """

    name: str
    index: int
    parameter: torch.Tensor
    route: Route = UNCOMPRESSED_ROUTE
    step: int = 0
    exchanges: int = 0
    pending: bool = False

    @property
    def frozen(self) -> bool:
        """Whether the parameter is not trained now; plain tensors are never frozen."""
        parameter = self.parameter
        return not parameter.requires_grad and isinstance(parameter, torch.nn.Parameter)

    @property
    def dtype(self) -> str:
        """The parameter's dtype, without ``torch.`` in front."""
        return str(self.parameter.dtype).removeprefix("torch.")

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape."""
        return tuple(self.parameter.shape)

    @cached_property
    def count(self) -> int:
        """The number of elements in the parameter."""
        return self.parameter.numel()


def slots_of(named_parameters: NamedParameters) -> list[Slot]:
    """Makes a slot for each parameter, in the given order.

    Names are those in the user's own modules, without the prefixes that ``torch.compile`` inserts, and
    without the ``module.`` that data-parallel wrappers put in front of all names.

    Args:
        named_parameters: (name, parameter) pairs, as from ``model.named_parameters()``, or a module.

    Raises:
        TypeError: the argument is something else.
        ValueError: there is no parameter, two have the same name, or one is on the meta device.
    """
    expected = "named_parameters: expected pairs as model.named_parameters() gives them"
    if isinstance(named_parameters, torch.nn.Module):
        named_parameters = named_parameters.named_parameters()
    if isinstance(named_parameters, torch.Tensor) or not isinstance(named_parameters, Iterable):
        raise TypeError(f"{expected}, got {type(named_parameters).__name__}")
    pairs: list[tuple[str, torch.Tensor]] = []
    for pair in named_parameters:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TypeError(f"{expected}, got an element of type {type(pair).__name__}")
        name, parameter = pair
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(f"{expected}, got {type(parameter).__name__} for {name!r}")
        pairs.append((name.replace("_orig_mod.", ""), parameter))
    names = [name for name, _ in pairs]
    if not names:
        raise ValueError(f"{expected}, got none (a generator can be used only once)")
    while all(name.startswith("module.") for name in names):
        names = [name.removeprefix("module.") for name in names]
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise ValueError(f"{expected} with distinct names, got twice: {', '.join(twice)}")
    parameters = [parameter for _, parameter in pairs]
    for name, parameter in zip(names, parameters, strict=True):
        expect_memory(name, parameter)
    return [
        Slot(name, index, parameter)
        for index, (name, parameter) in enumerate(zip(names, parameters, strict=True))
    ]


def expect_memory(name: str, parameter: torch.Tensor) -> None:
    """Raises ``ValueError`` if a parameter is on the meta device.

    ``to_empty()`` replaces such a parameter with another one, whose gradients the compressor would miss.
    """
    if parameter.is_meta:
        raise ValueError(
            f"{name}: expected a parameter with memory, got one on the meta device: call model.to_empty() "
            f"and fill it first, and make the compressor behind that"
        )
