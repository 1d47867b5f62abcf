"""Parameters as they enter every PyTorch frontend, and the record that a compressor keeps for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from hvd_compress.engine.residuals import Kept
from hvd_compress.exchanges.routing import UNCOMPRESSED_ROUTE, Route

NamedParameters = torch.nn.Module | Iterable[tuple[str, torch.Tensor]]

Groups = Iterable[Mapping[str, Any]]
"""The parameter groups of an optimizer."""


def parameters(
    given: NamedParameters | Groups, owner: str = "named_parameters", taken: Collection[str] = ()
) -> dict[str, torch.Tensor]:
    """The parameters by name, in the given order, frozen ones included.

    Names are those in the user's own modules, without the prefixes that ``torch.compile`` inserts, and
    without the ``module.`` that data-parallel wrappers put in front of all names.

    Args:
        given: a module; (name, parameter) pairs, as from ``model.named_parameters()``; or the groups of an
            optimizer. Parameters of an optimizer that was made without names are numbered.
        owner: the argument that was given, for errors.
        taken: the names of parameters that came before these.

    Raises:
        TypeError: the argument is something else.
        ValueError: there is no parameter; a name or a parameter occurs twice; or a parameter has no values
            yet, because it is on the meta device or belongs to a lazy module.
    """
    expected = f"{owner}: expected pairs as model.named_parameters() gives them"
    got_none = f"{expected}, got none (a generator can be used only once)"
    if isinstance(given, torch.nn.Module):
        got_none = f"{owner}: expected a model with parameters, got one without"
        given = given.named_parameters()
    if isinstance(given, torch.Tensor | str) or not isinstance(given, Iterable):
        raise TypeError(f"{expected}, got {type(given).__name__}")
    pairs: list[Any] = []
    for one in given:
        pairs += _of_group(one, len(taken) + len(pairs)) if isinstance(one, dict) else [one]
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TypeError(f"{expected}, got an element of type {type(pair).__name__}")
        if not isinstance(pair[1], torch.Tensor):
            raise TypeError(f"{expected}, got {type(pair[1]).__name__} for {pair[0]!r}")
    if not pairs:
        raise ValueError(got_none)
    names = [name.replace("_orig_mod.", "") for name, _ in pairs]
    while all(name.startswith("module.") for name in names):
        names = [name.removeprefix("module.") for name in names]
    twice = sorted(name for name, count in Counter([*names, *taken]).items() if count > 1)
    if twice:
        raise ValueError(
            f"{expected} with distinct names, got twice: {', '.join(twice)}: for several models, put a "
            f"prefix in front of each one's names: model.named_parameters(prefix='encoder')"
        )
    found = dict(zip(names, (parameter for _, parameter in pairs), strict=True))
    first: dict[int, str] = {}
    for name, parameter in found.items():
        same = first.setdefault(id(parameter), name)
        if same != name:
            raise ValueError(f"{expected}, each once, got one parameter as {same} and as {name}")
        _check(name, parameter)
    return found


def _of_group(group: Mapping[str, Any], count: int) -> list[tuple[str, torch.Tensor]]:
    """A group's parameters and their names; without names, numbers from ``count`` on."""
    numbers = range(count, count + len(group["params"]))
    names = group.get("param_names") or [f"parameter.{number}" for number in numbers]
    return list(zip(names, group["params"], strict=True))


def _check(name: str, parameter: torch.Tensor) -> None:
    """Raises ``ValueError`` if a parameter has no values yet.

    A lazy module draws values on each rank by itself, in its first forward pass. ``to_empty()`` replaces a
    parameter on the meta device with another one, whose gradients the compressor would miss.
    """
    if is_lazy(parameter):
        raise ValueError(
            f"{name}: expected an initialized parameter, got one of a lazy module: call the model with one "
            f"batch first, and make the compressor behind that"
        )
    if parameter.is_meta:
        raise ValueError(
            f"{name}: expected a parameter with memory, got one on the meta device: call model.to_empty() "
            f"and fill it first, and make the compressor behind that"
        )


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


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that a mesh shares out, in the same memory; or the tensor itself."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def like(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of the same shape, device and, without another one, dtype; with memory for one element."""
    return tensor.detach().new_empty((), dtype=dtype).expand(tensor.shape)
