"""The record that a compressor keeps for each parameter."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from hvd_compress.engine.parameters import NamedParameters, parameters
from hvd_compress.engine.residuals import Kept
from hvd_compress.exchanges.routing import UNCOMPRESSED_ROUTE, Route


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
    def largest(self) -> tuple[int, ...]:
        """The largest shape of the parameter's gradient on any rank with the same routes."""
        return self.shape

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


def slots_of(given: NamedParameters) -> list[Slot]:
    """Makes a slot for each parameter, in the given order; see :func:`parameters`, also for errors."""
    named = parameters(given)
    return [Slot(name, index, one) for index, (name, one) in enumerate(named.items())]
