"""One record per parameter."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from hvd_compress.codecs.base import Shape, as_matrix
from hvd_compress.engine.executors import keep_from_reuse
from hvd_compress.exchanges.layout import OwnedPart
from hvd_compress.exchanges.routing import UNCOMPRESSED_ROUTE, Route

NamedParameters = torch.nn.Module | Iterable[tuple[str, torch.Tensor]]


@dataclass(eq=False, kw_only=True)
class Holder:
    """A residual, and what it becomes if the step under way counts.

    Attributes:
        residual: what has been computed and not yet sent, shape=(n,), float32; None before the first step
            and without error feedback.
        residual_scale: the loss scale that the residual's numbers are in.
        next_residual: where the step under way writes the residual, like ``residual``; None before the
            first step. :meth:`accept` exchanges the two.
    """

    residual: torch.Tensor | None = None
    residual_scale: float = 1.0
    next_residual: torch.Tensor | None = None

    @property
    def count(self) -> int:
        """Elements of the residual."""
        raise NotImplementedError

    def take_up(self, loss_scale: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual, zeros at first, in the units of the next gradient, and where the next one goes.

        Args:
            loss_scale: what the next gradient is multiplied by.
            device: where the next gradient is: the model may have moved.
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
        """Has the residual be the one that the step has written.

        Args:
            dropped: a word on the residual's device, shape=(1,), int32, that only the device knows; where
                it is not 0, the residual stays as it is.
        """
        assert self.residual is not None and self.next_residual is not None
        if dropped is not None:
            keep_from_reuse(self.residual, self.next_residual)
            kept = torch.where(dropped != 0, self.residual, self.next_residual)
            self.next_residual.copy_(kept)
        self.residual, self.next_residual = self.next_residual, self.residual

    def take_back(self) -> None:
        """Undoes :meth:`accept`: until the next gradient is encoded, the former residual is still there."""
        self.residual, self.next_residual = self.next_residual, self.residual

    def __getstate__(self) -> dict[str, Any]:
        # What the next step writes first is not worth its memory in a copy.
        return {**self.__dict__, "next_residual": None}

    def forget(self) -> None:
        """Has no residual any more: it was added to a gradient that has been sent."""
        self.residual = self.next_residual = None


@dataclass(eq=False)
class Owned(Holder):
    """What a rank keeps for the part of a parameter that it adds up for all ranks.

    Attributes:
        begin: the part's first element, in row-major order of the gradient, or of its transposed matrix.
        end: one behind its last element.
        weight: what one unit of ``residual`` would have added to the sum of all ranks' gradients.
        transposed: whether the part is one of the gradient's transposed matrix.
        state: of the owner's step: tensors of shape (end - begin,), and numbers.
    """

    begin: int
    end: int
    weight: int
    transposed: bool = False
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Elements of the part."""
        return self.end - self.begin

    def spread(self, shape: Shape, factor: float) -> torch.Tensor:
        """The residual at its places in the gradient, zeros elsewhere.

        Args:
            shape: the gradient's.
            factor: on the residual.

        Returns:
            shape=(n,), float32, where the residual is, which there has to be.
        """
        assert self.residual is not None
        return in_place(self.residual * factor, self.begin, shape, self.transposed)

    @property
    def part(self) -> OwnedPart:
        """What it is the record of."""
        return self.begin, self.end, self.weight, self.transposed


def in_place(part: torch.Tensor, begin: int, shape: Shape, transposed: bool) -> torch.Tensor:
    """A part's elements at their places in the gradient, zeros elsewhere.

    Args:
        part: shape=(n_part,).
        begin: its first element, in the order in which ranks share the gradient out.
        shape: the gradient's.
        transposed: whether that is the order of the transposed matrix.

    Returns:
        shape=(n,), in row-major order of the gradient.
    """
    whole = part.new_zeros(math.prod(shape))
    whole[begin : begin + part.numel()] = part
    return transpose_back(whole, as_matrix(shape)) if transposed else whole


def transpose(x: torch.Tensor, matrix: tuple[int, int]) -> torch.Tensor:
    """The elements of a matrix in the order of its columns, shape=(n,).

    Args:
        x: in row-major order, of as many elements.
        matrix: rows and columns.
    """
    return x.reshape(matrix).t().reshape(-1)


def transpose_back(x: torch.Tensor, matrix: tuple[int, int]) -> torch.Tensor:
    """The inverse of :func:`transpose`."""
    return transpose(x, (matrix[1], matrix[0]))


@dataclass(eq=False)
class Slot(Holder):
    """What a compressor keeps for one parameter.

    Attributes:
        name: the parameter's name, the same on every rank.
        index: its position among the compressor's parameters: its id in the noise.
        parameter: the parameter itself.
        route: how its gradient travels.
        owned: what this rank keeps for the part that it adds up; None where the exchange has no owners.
        step: how many times its gradient has been encoded and sent: its position in the noise.
        exchanges: how many times its gradient has been exchanged in any way.
        pending: whether a gradient waits for the step's end.
        shape: the parameter's shape.
        count: the parameter's elements.
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
        """Whether it is a parameter that is not trained now; a plain tensor never is."""
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
        """The parameter's elements."""
        return self.parameter.numel()


def slots_of(named_parameters: NamedParameters) -> list[Slot]:
    """A slot for each parameter, in the order given.

    Names are those of the user's own modules: what ``torch.compile`` puts into them, and the ``module.``
    that data-parallel wrappers put in front of all of them, is left out.

    Args:
        named_parameters: (name, parameter) pairs, as ``model.named_parameters()`` gives them, or a module.

    Raises:
        TypeError: something else.
        ValueError: none at all, two of one name, or one on the meta device.
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
    """Raises ``ValueError`` where a parameter is on the meta device.

    ``to_empty()`` makes another one of it, whose gradients nobody would know.

    Args:
        name: of the parameter.
        parameter: or this rank's shard of it.
    """
    if parameter.is_meta:
        raise ValueError(
            f"{name}: expected a parameter with memory, got one on the meta device: call model.to_empty() "
            f"and fill it first, and make the compressor behind that"
        )
