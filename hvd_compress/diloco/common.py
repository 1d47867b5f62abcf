"""The parameters that all ranks have in common, and the outer optimizer that updates them."""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hvd_compress.engine.autograd import add_first_gradient_hook
from hvd_compress.engine.parameters import local, parameters
from hvd_compress.process_group.collectives import Collectives
from hvd_compress.process_group.values import broadcast_state, tell


class CommonParameters:
    """A copy of a model's trainable parameters in at least 32 bits, the same on every rank.

    Weights that are loaded into the model afterwards are detected when the model gets its first gradients;
    :attr:`loaded` then holds them.

    Args:
        model: this rank's model, whose parameters differ from the common ones between exchanges.
        outer_optimizer: a function that takes the copies and returns their optimizer.

    Attributes:
        own: this rank's parameters, by name.
        copies: the common parameters, by name.
        outer: the outer optimizer.
        loaded: the values, by name and from before the first step, of the parameters that differed from
            the common ones then.

    Raises:
        TypeError: trainable parameters are not floating-point numbers.
        ValueError: the model has no trainable parameters; or see
            :func:`hvd_compress.engine.parameters.parameters`.
    """

    def __init__(
        self,
        model: nn.Module,
        outer_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        self.own = {n: p for n, p in parameters(model, "DiLoCo.model").items() if p.requires_grad}
        if not self.own:
            raise ValueError("DiLoCo.model: expected trainable parameters, got none")
        for name, parameter in self.own.items():
            if not parameter.is_floating_point():
                raise TypeError(
                    f"DiLoCo.model: expected floating-point numbers to train, got {parameter.dtype} for "
                    f"{name}: make a parameter of its view_as_real()"
                )
        self._model = model
        self.copies = {name: _copy(parameter) for name, parameter in self.own.items()}
        self.outer = outer_optimizer(list(self.copies.values()))
        self.loaded: dict[str, torch.Tensor] = {}
        self._seen = False  # Whether there was a gradient.
        self._watching = [self._watch(parameter) for parameter in self.own.values()]
        weakref.finalize(self, _remove, self._watching).atexit = False

    @property
    def values(self) -> Mapping[str, torch.Tensor]:
        """The common parameters, by name; these tensors share their memory."""
        return MappingProxyType({name: copy.data for name, copy in self.copies.items()})

    @property
    def kinds(self) -> dict[str, list[Any]]:
        """The dtypes and shapes of this rank's parts of the parameters, by name, JSON-serializable."""
        every = {**self.own, **self._frozen}
        return {name: [str(p.dtype), list(local(p.detach()).shape)] for name, p in every.items()}

    def shown(self) -> Mapping[str, torch.Tensor]:
        """The common parameters, by name, placed on the mesh of the model's parameters if there is one."""
        return MappingProxyType({n: as_placed(one, self.own[n]) for n, one in self.values.items()})

    def digest(self) -> str:
        """A digest of the common parameters' bits."""
        return hashlib.sha256("".join(map(_digest, self.copies.values())).encode()).hexdigest()

    @property
    def _frozen(self) -> dict[str, torch.Tensor]:
        """The parameters without a copy."""
        every = parameters(self._model, "DiLoCo.model")
        return {name: one for name, one in every.items() if name not in self.own}

    def step(self) -> None:
        """Makes a step of the outer optimizer; the number of PyTorch's threads does not change a bit."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # Norms, for example, are added up in another order by several.
        try:
            self.outer.step()
        finally:
            torch.set_num_threads(threads)

    def state_dict(self) -> dict[str, Any]:
        """The common parameters and the outer optimizer's state; tensors are references."""
        return {"common": dict(self.values), "outer_optimizer": self.outer.state_dict()}

    def check(self, who: str, state: dict[str, Any]) -> None:
        """Raises ``ValueError`` if a state belongs to another model."""
        common: Any = state.get("common")
        names = list(common) if isinstance(common, dict) else None
        if names is None or set(names) != set(self.copies):
            raise ValueError(
                f"DiLoCo.{who}: common: expected the parameters {list(self.copies)}, got {names}"
            )
        for name, copy in self.copies.items():
            one = common[name]
            got = tuple(one.shape) if isinstance(one, torch.Tensor) else type(one).__name__
            if got != tuple(copy.shape) or one.is_meta or one.is_sparse:
                raise ValueError(
                    f"DiLoCo.{who}: common: expected {name} of shape {tuple(copy.shape)}, dense, got "
                    f"{got}"
                )

    @contextlib.contextmanager
    def outer_restored_on_error(self, state: dict[str, Any]) -> Iterator[None]:
        """Loads the outer optimizer's part of a state; undoes it if the ``with`` block raises an error.

        Raises:
            ValueError: the state belongs to another optimizer. Nothing is changed then.
        """
        before = self.outer.state_dict()  # Loading puts others in their place.
        try:
            self.outer.load_state_dict(state["outer_optimizer"])
            yield
        except (KeyError, AttributeError) as error:
            self.outer.load_state_dict(before)
            raise ValueError(
                f"DiLoCo: outer_optimizer: expected a state of one, got {error}"
            ) from None
        except Exception:
            self.outer.load_state_dict(before)
            raise

    def load(self, state: dict[str, Any]) -> None:
        """Loads a result of :meth:`state_dict`; the rank's own parameters stay unchanged."""
        self.end_watch()
        # An optimizer keeps the tensors it is given, and changes them.
        self.outer.load_state_dict(deepcopy(state["outer_optimizer"]))
        for name, copy in self.copies.items():
            copy.data.copy_(state["common"][name])

    def end_watch(self) -> None:
        """Stops detecting weights that are loaded into the model."""
        _remove(self._watching)
        self.loaded.clear()

    def _watch(self, parameter: torch.Tensor) -> RemovableHandle:
        # The hook lives as long as the model: it must not hold the copies.
        note = weakref.WeakMethod(self._note_loaded)

        def noted(_: torch.Tensor) -> None:
            called = note()
            if called is not None:
                called()

        # One of the other hooks may be an optimizer's step.
        return add_first_gradient_hook(parameter, noted)

    def _note_loaded(self) -> None:
        """Called with the model's gradients; looks at the first one, before any optimizer step."""
        # FSDP2 calls hooks in a loop over them, which must not lose any in it.
        if self._seen:
            return
        self._seen = True
        for name, copy in self.copies.items():
            own = local(self.own[name].detach())
            if not torch.equal(own, copy.detach().to(own.dtype)):
                self.loaded[name] = own.clone()

    def take_loaded(self, names: Iterable[str], ranks: Collectives | None) -> None:
        """Sets the common parameters to weights that were loaded; keeps the steps made since.

        Args:
            names: the names of parameters that were loaded on some rank.
            ranks: all ranks, which get the first rank's values; None for this rank alone.
        """
        for name in names:
            own, copy = local(self.own[name].detach()), self.copies[name].detach()
            begun = self.loaded.get(name, copy.to(own.dtype, copy=True))
            copy.copy_(begun)
            if ranks is not None:
                ranks.broadcast(copy, 0)
            begin = copy.to(own.dtype)
            if not torch.equal(begin, begun):
                own.copy_(begin + (own - begun))
        self.end_watch()

    def share_frozen(self, ranks: Collectives, source: int) -> None:
        """Gives all ranks one rank's parameters without a copy, where the ranks' values differ.

        Every rank makes the same call. Bytes are sent, so parameters may have any dtype. A parameter that
        only some ranks have is left alone: if it is to be trained, the next exchange raises an error.
        """
        frozen = self._frozen
        told = tell(ranks, {name: _digest(local(one.detach())) for name, one in frozen.items()})
        for name, parameter in frozen.items():
            if len({one.get(name) for one in told}) > 1 and all(name in one for one in told):
                values = local(parameter.detach()).contiguous()
                ranks.broadcast(values.reshape(-1).view(torch.uint8), source)
                local(parameter.data).copy_(values)

    def receive(
        self,
        fragments: Sequence[Sequence[str]],
        sources: Sequence[int],
        wanted: Iterable[int],
        best: int,
        ranks: Collectives,
    ) -> None:
        """Gives all ranks the latest common parameters and optimizer state; every rank makes the same call.

        Args:
            fragments: the names of each fragment's parameters.
            sources: for each fragment, the rank that has its latest parameters.
            wanted: the fragments whose latest parameters some rank does not have.
            best: the source whose settings of the outer optimizer all ranks take.
            ranks: all ranks.
        """
        outer = self.outer.state_dict()
        elements = sum(copy.numel() for copy in self.copies.values())
        states = {
            source: broadcast_state(ranks, outer, source, elements)
            for source in sorted(set(sources))
        }
        # A parameter takes its part of the state from its fragment's source.
        numbers = self.numbers()
        state = {
            numbers[name]: states[source]["state"][numbers[name]]
            for names, source in zip(fragments, sources, strict=True)
            for name in names
            if numbers[name] in states[source]["state"]
        }
        self.outer.load_state_dict({**states[best], "state": state})
        for fragment in wanted:
            for name in fragments[fragment]:
                ranks.broadcast(self.copies[name].data, sources[fragment])

    def numbers(self) -> dict[str, int]:
        """The numbers of the parameters in the outer optimizer's state, by name."""
        names = {id(copy): name for name, copy in self.copies.items()}
        parameters = [one for group in self.outer.param_groups for one in group["params"]]
        return {names[id(parameter)]: number for number, parameter in enumerate(parameters)}


def as_placed(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor as a ``DTensor`` like another tensor, if that is one."""
    if not hasattr(like, "to_local"):
        return part
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


def _digest(values: torch.Tensor) -> str:
    content = values.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(content.numpy().data).hexdigest()


def _copy(parameter: torch.Tensor) -> nn.Parameter:
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return nn.Parameter(local(parameter.detach()).to(dtype, copy=True))
