"""The record that a compressor keeps for each parameter."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from hvd_compress.codecs.base import Shape, as_matrix
from hvd_compress.engine.executors import keep_from_reuse
from hvd_compress.exchanges.layout import OwnedPart
from hvd_compress.exchanges.routing import UNCOMPRESSED_ROUTE, Route

Pair = tuple[torch.Tensor, torch.Tensor]
"""A residual, and the array for the next one."""

NamedParameters = torch.nn.Module | Iterable[tuple[str, torch.Tensor]]


@dataclass(eq=False, kw_only=True)
class Holder:
    """A residual, and the one that replaces it if the current step counts.

    Attributes:
        residual: the values that have been computed and not yet sent, shape=(n,), float32; None before the
            first step and without error feedback.
        residual_scale: the loss scale that is contained in the residual.
        next_residual: the array for the residual after the current step, like ``residual``; None before
            the first step. :meth:`accept` swaps the two.
    """

    residual: torch.Tensor | None = None
    residual_scale: float = 1.0
    next_residual: torch.Tensor | None = None

    @property
    def count(self) -> int:
        """The number of elements in the residual."""
        raise NotImplementedError

    def take_up(self, loss_scale: float, device: torch.device) -> Pair:
        """The residual in the units of the next gradient, zeros at first, and the array for the next one.

        Args:
            loss_scale: the loss scale of the next gradient.
            device: the device of the next gradient; the model may have moved.
        """
        if self.residual is None:
            self.residual = torch.zeros(self.count, dtype=torch.float32, device=device)
            self.residual_scale = loss_scale
        if self.residual.device != device:
            self.residual = self.residual.to(device)
        if self.residual_scale != loss_scale:
            self.residual.mul_(loss_scale / self.residual_scale)
            self.residual_scale = loss_scale
        if self.next_residual is None or self.next_residual.device != device:
            self.next_residual = torch.empty_like(self.residual)
        return self.residual, self.next_residual

    def accept(self, dropped: torch.Tensor | None = None) -> None:
        """Replaces the residual with the one that the step has written.

        Args:
            dropped: a word on the residual's device, shape=(1,), int32, that only the device knows; if the
                word is not 0, the residual keeps its value.
        """
        assert self.residual is not None and self.next_residual is not None
        if dropped is not None:
            keep_from_reuse(self.residual, self.next_residual)
            kept = torch.where(dropped != 0, self.residual, self.next_residual)
            self.next_residual.copy_(kept)
        self.residual, self.next_residual = self.next_residual, self.residual

    def take_back(self) -> None:
        """Undoes :meth:`accept`; the former residual exists until the next gradient is encoded."""
        self.residual, self.next_residual = self.next_residual, self.residual

    def __getstate__(self) -> dict[str, Any]:
        # What the next step writes first is not worth its memory in a copy.
        return {**self.__dict__, "next_residual": None}

    def forget(self) -> None:
        """Discards the residual and the array for the next one."""
        self.residual = self.next_residual = None


@dataclass(eq=False)
class Owned(Holder):
    """The record of a parameter's part that this rank owns.

    Attributes:
        begin: the part's first element, in row-major order of the gradient, or of its transposed matrix.
        end: the element behind the last one of the part.
        weight: the amount that a unit of ``residual`` would have added to the sum of all ranks' gradients.
        transposed: whether elements are in the order of the gradient's transposed matrix.
        state: the state of the owner step: tensors of shape (end - begin,), and numbers.
    """

    begin: int
    end: int
    weight: int
    transposed: bool = False
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of elements in the part."""
        return self.end - self.begin

    def spread(self, shape: Shape, factor: float) -> torch.Tensor:
        """The residual at its places in the gradient, with zeros elsewhere; the residual must not be None.

        Args:
            shape: the gradient's shape.
            factor: the factor of the residual.

        Returns:
            The scaled residual, shape=(n,), float32, on the residual's device.
        """
        assert self.residual is not None
        return in_place(self.residual * factor, self.begin, shape, self.transposed)

    @property
    def part(self) -> OwnedPart:
        """The part that this record describes."""
        return self.begin, self.end, self.weight, self.transposed


def in_place(part: torch.Tensor, begin: int, shape: Shape, transposed: bool) -> torch.Tensor:
    """A part's elements at their places in the gradient, with zeros elsewhere.

    Args:
        part: the elements of the part, shape=(n_part,).
        begin: the part's first element, in the order in which ranks divide the gradient.
        shape: the gradient's shape.
        transposed: whether that order is the one of the transposed matrix.

    Returns:
        The elements in row-major order of the gradient, shape=(n,).
    """
    whole = part.new_zeros(math.prod(shape))
    whole[begin : begin + part.numel()] = part
    return transpose_back(whole, as_matrix(shape)) if transposed else whole


def transpose(x: torch.Tensor, matrix: tuple[int, int]) -> torch.Tensor:
    """The elements of a matrix in the order of its columns, shape=(n,).

    Args:
        x: the elements in row-major order, in any shape.
        matrix: the numbers of rows and columns.
    """
    return x.reshape(matrix).t().reshape(-1)


def transpose_back(x: torch.Tensor, matrix: tuple[int, int]) -> torch.Tensor:
    """The inverse of :func:`transpose`."""
    return transpose(x, (matrix[1], matrix[0]))


@dataclass(eq=False)
class Slot(Holder):
    """The record that a compressor keeps for one parameter.

    Attributes:
        name: the parameter's name, the same on every rank.
        index: the parameter's position among the compressor's parameters, which is its id in the noise.
        parameter: the parameter itself.
        route: the route of the parameter's gradient.
        owned: the record of the part that this rank owns; None if the exchange has no owners.
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
    owned: Owned | None = None
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

    Args:
        name: the parameter's name.
        parameter: the parameter, or this rank's shard of it.
    """
    if parameter.is_meta:
        raise ValueError(
            f"{name}: expected a parameter with memory, got one on the meta device: call model.to_empty() "
            f"and fill it first, and make the compressor behind that"
        )


def columns(
    pairs: Sequence[Pair | None],
) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
    """The residuals, and the arrays for the next ones."""
    return [pair and pair[0] for pair in pairs], [pair and pair[1] for pair in pairs]
