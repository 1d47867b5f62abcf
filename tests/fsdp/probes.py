"""FSDP2 models whose gradients are known, and the reference of every shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import hvd_compress.fsdp as hvdc
from hvd_compress import Route
from hvd_compress.codecs import Codec, ErrorFeedback
from tests.torch_models import DEVICE, Probe, Shapes, Simulation, assert_same, targets

of_today = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="needs PyTorch 2.13's FSDP2"
)
"""A mark for tests of what only FSDP2 as in PyTorch 2.13 has."""

gradient_dtypes = hasattr(MixedPrecisionPolicy, "param_dtype_override_fn")
"""Whether FSDP2, as from PyTorch 2.15 on, reduces gradients in their parameters' ``grad_dtype``."""

of_gradient_dtypes = pytest.mark.skipif(not gradient_dtypes, reason="needs PyTorch 2.15's FSDP2")
"""A mark for tests of what only FSDP2 as in PyTorch 2.15 has."""

SHAPES = {"first.a": (40, 170), "first.b": (3001,), "second.c": (8, 3, 5, 5), "second.tiny": (3,)}
"""Uneven shards, with padding, and one that a rank has nothing of."""


class Net(torch.nn.Module):
    """Two modules, of which the second one runs on what the first one gives."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name in ("first", "second"):
            own = {n.split(".")[1]: s for n, s in shapes.items() if n.startswith(name)}
            setattr(self, name, Probe(own, dtype))

    def forward(self, gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
        total = torch.zeros(())
        for name in ("first", "second"):
            own = {n.split(".")[1]: g for n, g in gradients.items() if n.startswith(name)}
            if own:
                total = total + getattr(self, name)(own)
        return total


class Stumbling(torch.autograd.Function):
    """The identity, whose backward pass fails where :attr:`stumbles` is set."""

    stumbles = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if Stumbling.stumbles:
            raise ArithmeticError("on purpose")
        return gradient


class Layers(torch.nn.Module):
    """Two layers, between which a backward pass may fail."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = torch.nn.Linear(40, 40), torch.nn.Linear(40, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(Stumbling.apply(self.first(x)))


def mesh_of(replicas: int) -> DeviceMesh:
    """Returns a mesh of all ranks: replicas first, shards second."""
    shape = (replicas, dist.get_world_size() // replicas)
    return init_device_mesh(DEVICE.type, shape, mesh_dim_names=("replicate", "shard"))


def shard(net: torch.nn.Module, mesh: DeviceMesh, **options: Any) -> Any:
    """Each module by itself, and then the whole."""
    for module in net.children():
        fully_shard(module, mesh=mesh["shard"], **options)
    return fully_shard(net, mesh=mesh["shard"], **options)


def make(
    mesh: DeviceMesh,
    codec: Codec,
    feedback: ErrorFeedback,
    *,
    shapes: Shapes = SHAPES,
    sharding: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[Any, hvdc.Compressor]:
    """A model and its compressor, which encodes everything unless the options say otherwise."""
    net = shard(Net(shapes), mesh, **(sharding or {}))
    return net, hvdc.Compressor(
        net, Route(codec, feedback), mesh=mesh, **{"threshold": 0, **options}
    )


def backward(net: Any, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One backward pass; returns this rank's shards of the gradients that it leaves."""
    net.zero_grad()
    net(gradients).backward()
    return gradients_of(net)


def gradients_of(net: Any) -> dict[str, torch.Tensor]:
    """This rank's shards."""
    named = net.named_parameters()
    return {n: p.grad.to_local().clone() for n, p in named if p.grad is not None}


class Beside:
    """The reference of this rank's shards.

    Args:
        mesh: the mesh of the model.
        exchange: the compressor's exchange; ``codec``, ``feedback`` and ``seed`` are the compressor's, too.
        shapes: the shapes of the whole parameters.
        dtype: the dtype in which gradients are reduced.
        dimension: the dimension along which parameters are cut.
        simulated: options of the reference alone.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        exchange: str,
        codec: Codec,
        feedback: ErrorFeedback,
        *,
        shapes: Shapes = SHAPES,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        dimension: int = 0,
        **simulated: Any,
    ) -> None:
        self._exchange = exchange
        self._ranks, (self._replicas, self._shards) = mesh.mesh.tolist(), tuple(mesh.mesh.shape)
        self._own = mesh.get_local_rank("shard")
        self._replica = mesh.get_local_rank("replicate")
        self._shapes, self._dtype, self._dimension = shapes, dtype, dimension
        local = {name: tuple(self._cut(torch.empty(s)).shape) for name, s in shapes.items()}
        self.simulation = Simulation(
            exchange, codec, feedback, local, self._replicas, seed=seed, **simulated
        )
        self._local = local

    def step(
        self, step: int, change: Callable[[int, dict[str, torch.Tensor]], None] = lambda *_: None
    ) -> dict[str, torch.Tensor]:
        """Returns the averages that this rank's shards of the gradients of ``targets`` must become.

        Args:
            step: the number of the gradients.
            change: alters a rank's gradients in place.
        """
        everybodys = [targets(self._shapes, rank, step) for rank in range(dist.get_world_size())]
        for rank, one in enumerate(everybodys):
            change(rank, one)
        return self.average(everybodys)

    def average(self, everybodys: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Returns the averages that this rank's shards of the ranks' gradients must become."""
        replicas = [
            self._within(ranks, [everybodys[rank] for rank in ranks]) for ranks in self._ranks
        ]
        expected = self.simulation.average(replicas)
        return {name: one.to(self._dtype).float() for name, one in expected.items()}

    def assert_kept(self, compressor: hvdc.Compressor) -> None:
        """The residuals are the reference's."""
        tensors = compressor.state_dict()["tensors"]
        expected = self.simulation.residuals[self._replica]
        kept = {n: t["residual"] for n, t in tensors.items() if t["residual"] is not None}
        filled = {n for n, one in expected.items() if one.size}
        assert kept.keys() == filled
        self.assert_same(kept, {n: torch.from_numpy(expected[n]) for n in filled})

    def assert_same(
        self, got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
    ) -> None:
        """Fails unless both are the same, as far as the exchange promises it."""
        assert_same(self._exchange, got, expected)

    def _within(
        self, ranks: list[int], everybodys: list[dict[str, torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        """Returns the averages that this rank's shards get from the ranks of one replica."""
        return {name: self._mean([one[name] for one in everybodys]) for name in self._shapes}

    def _mean(self, parts: list[torch.Tensor]) -> torch.Tensor:
        total = parts[0].to(self._dtype)
        for part in parts[1:]:
            total = total + part.to(self._dtype)
        return self._cut(total / len(parts))

    def _cut(self, whole: torch.Tensor) -> torch.Tensor:
        parts = torch.chunk(whole, self._shards, self._dimension)
        if self._own < len(parts):
            return parts[self._own].contiguous()
        return whole.new_empty((0, *whole.shape[1:]))


def assert_replicas_are_alike(mesh: DeviceMesh, net: Any) -> None:
    """Every replica holds the same numbers in this rank's shards."""
    _assert_alike(mesh, [parameter.to_local().detach() for parameter in net.parameters()])


def assert_gradients_are_alike(mesh: DeviceMesh, net: Any) -> None:
    """Every replica has the same gradients, finite ones, in this rank's shards."""
    gradients = list(gradients_of(net).values())
    assert gradients and all(one.isfinite().all() for one in gradients)
    _assert_alike(mesh, gradients)


def _assert_alike(mesh: DeviceMesh, tensors: Sequence[torch.Tensor]) -> None:
    group = mesh.get_group("replicate")
    for own in tensors:
        everywhere = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everywhere, own.contiguous(), group=group)
        assert all(torch.equal(everywhere[0], other) for other in everywhere)
