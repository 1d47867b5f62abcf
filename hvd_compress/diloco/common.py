"""The parameters that all ranks have in common, and the outer optimizer that steps them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from hvd_compress.process_group.collectives import Collectives


class CommonParameters:
    """A copy of a model's trainable parameters, the same on every rank, of 32 bits at least.

    Args:
        model: of this rank, whose parameters differ from the common ones between exchanges.
        outer_optimizer: called with the copies; returns their optimizer.

    Attributes:
        own: this rank's parameters, by name.

    Raises:
        ValueError: the model has no trainable parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        outer_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        self.own = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not self.own:
            raise ValueError("DiLoCo.model: expected trainable parameters, got none")
        self._copies = {name: _copy(parameter) for name, parameter in self.own.items()}
        self._outer = outer_optimizer(list(self._copies.values()))

    @property
    def values(self) -> Mapping[str, torch.Tensor]:
        """The common parameters, by name; their memory."""
        return MappingProxyType({name: copy.data for name, copy in self._copies.items()})

    @property
    def kinds(self) -> dict[str, list[Any]]:
        """This rank's dtypes and shapes, by name, fit for JSON."""
        return {name: [str(p.dtype), list(p.shape)] for name, p in self.own.items()}

    def differences(self, names: Sequence[str]) -> list[torch.Tensor]:
        """What this rank has learnt: the common parameters without its own, of the copies' dtypes."""
        copies = [self._copies[name].detach() for name in names]
        return [
            copy - self.own[name].detach().to(copy.dtype)
            for name, copy in zip(names, copies, strict=True)
        ]

    def step(self, names: Sequence[str], averages: Sequence[torch.Tensor]) -> None:
        """A step of the outer optimizer, with averages of differences for gradients."""
        for name, average in zip(names, averages, strict=True):
            self._copies[name].grad = average
        self._outer.step()
        for name in names:
            self._copies[name].grad = None

    def take(self, names: Iterable[str], mixing: float = 0.0) -> None:
        """Has this rank's parameters be the common ones.

        Args:
            names: of parameters.
            mixing: the share of its own that the rank keeps.
        """
        for name in names:
            own, copy = self.own[name], self._copies[name].detach()
            if mixing:
                copy = torch.lerp(copy, own.detach().to(copy.dtype), mixing)
            own.data.copy_(copy)

    def state_dict(self) -> dict[str, Any]:
        """The common parameters and the outer optimizer's state; tensors are references."""
        return {"common": dict(self.values), "outer_optimizer": self._outer.state_dict()}

    def check(self, who: str, state: dict[str, Any]) -> None:
        """Raises ``ValueError`` where a state is that of another model."""
        common: Any = state.get("common")
        names = list(common) if isinstance(common, dict) else None
        if names is None or set(names) != set(self._copies):
            raise ValueError(
                f"DiLoCo.{who}: common: expected the parameters {list(self._copies)}, got {names}"
            )
        for name, copy in self._copies.items():
            one = common[name]
            got = tuple(one.shape) if isinstance(one, torch.Tensor) else type(one).__name__
            if got != tuple(copy.shape) or one.is_meta or one.is_sparse:
                raise ValueError(
                    f"DiLoCo.{who}: common: expected {name} of shape {tuple(copy.shape)}, dense, got "
                    f"{got}"
                )

    @contextlib.contextmanager
    def outer_restored_on_error(self, state: dict[str, Any]) -> Iterator[None]:
        """Loads the outer optimizer's state of :meth:`state_dict`, unless what follows raises.

        Raises:
            ValueError: of another optimizer; nothing is changed then.
        """
        before = self._outer.state_dict()  # Loading puts others in their place.
        try:
            self._outer.load_state_dict(state["outer_optimizer"])
            yield
        except (KeyError, AttributeError) as error:
            self._outer.load_state_dict(before)
            raise ValueError(
                f"DiLoCo: outer_optimizer: expected a state of one, got {error}"
            ) from None
        except Exception:
            self._outer.load_state_dict(before)
            raise

    def are(self, state: dict[str, Any]) -> bool:
        """Whether the parameters are bit for bit those of a state."""
        return all(torch.equal(copy, state["common"][name]) for name, copy in self._copies.items())

    def load(self, state: dict[str, Any]) -> None:
        """Takes what :meth:`state_dict` returned; the rank's own parameters stay."""
        self._outer.load_state_dict(state["outer_optimizer"])
        for name, copy in self._copies.items():
            copy.data.copy_(state["common"][name])

    def receive(
        self,
        fragments: Sequence[Sequence[str]],
        sources: Sequence[int],
        wanted: Iterable[int],
        best: int,
        ranks: Collectives,
    ) -> None:
        """Has all ranks have the latest; every rank calls it alike.

        Args:
            fragments: names of the parameters of each.
            sources: for each fragment, the rank that has its latest parameters.
            wanted: the fragments that some rank has not the latest of.
            best: the source whose settings of the outer optimizer are taken.
            ranks: all of them.
        """
        outer = self._outer.state_dict()
        states = {source: ranks.broadcast_object(outer, source) for source in sorted(set(sources))}
        # What belongs to a parameter is that of its fragment's source.
        numbers = self._numbers()
        state = {
            numbers[name]: states[source]["state"][numbers[name]]
            for names, source in zip(fragments, sources, strict=True)
            for name in names
            if numbers[name] in states[source]["state"]
        }
        self._outer.load_state_dict({**states[best], "state": state})
        for fragment in wanted:
            for name in fragments[fragment]:
                ranks.broadcast(self._copies[name].data, sources[fragment])

    def _numbers(self) -> dict[str, int]:
        """What the outer optimizer's state calls the parameters, by name."""
        names = {id(copy): name for name, copy in self._copies.items()}
        parameters = [one for group in self._outer.param_groups for one in group["params"]]
        return {names[id(parameter)]: number for number, parameter in enumerate(parameters)}


def _copy(parameter: nn.Parameter) -> nn.Parameter:
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return nn.Parameter(parameter.detach().to(dtype, copy=True))
