"""The parts of FSDP2 that PyTorch does not publish are what ``fsdp/sharding.py`` takes them for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import hvd_compress.fsdp as hvdc
from hvd_compress import Route
from hvd_compress.codecs import Int8, OneBit
from hvd_compress.fsdp.sharding import sharded
from tests.contract.cases import FULL
from tests.fsdp.probes import (
    SHAPES,
    Beside,
    Net,
    backward,
    gradient_dtypes,
    mesh_of,
    of_gradient_dtypes,
    shard,
)
from tests.ranks import on_ranks
from tests.torch_models import assert_same_bits, targets

THREE = {"first.a": (40, 170), "first.b": (3001,), "first.c": (8, 3, 5, 5)}


@on_ranks(2, launcher="torchrun")
def test_names_without_which_a_reduction_would_be_read_wrongly() -> None:
    """The package reads the others without a default, and so names them where they are missing."""
    net = shard(Net(SHAPES), mesh_of(2))
    backward(net, targets(SHAPES, dist.get_rank(), 0))
    for unit in sharded(net).units:
        parameters: list[Any] = unit.group.fsdp_params
        assert all(isinstance(one._unsharded_param, torch.nn.Parameter) for one in parameters)
        if hasattr(FSDPModule, "reset_iter_state"):
            assert callable(unit.group._reset_iter_state)
        if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            assert unit.group.reduce_scatter_unused_params is False
        assert all(hasattr(one, "sharded_grad_dtype") == gradient_dtypes for one in parameters)
        if gradient_dtypes:
            order = unit.group._reduce_scatter_param_indices
            assert sorted(order) == list(range(len(parameters)))


def _mixed(net: torch.nn.Module, dtype: torch.dtype | None) -> torch.nn.Module:
    net.first.b.grad_dtype = dtype  # type: ignore[union-attr]
    return net


@of_gradient_dtypes
@on_ranks(4, launcher="torchrun")
def test_gradients_that_fsdp2_orders_by_their_dtypes() -> None:
    mesh, rank = mesh_of(2), dist.get_rank()
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    net = shard(_mixed(Net(THREE), torch.bfloat16), mesh, mp_policy=policy)
    compressor = hvdc.Compressor(net, Route(OneBit(), FULL), mesh=mesh, threshold=0)
    beside = Beside(mesh, "allgather", OneBit(), FULL, shapes=THREE)
    for step in range(2):
        got, expected = backward(net, targets(THREE, rank, step)), beside.step(step)
        assert got["first.b"].dtype == torch.bfloat16
        expected["first.b"] = expected["first.b"].bfloat16()
        assert_same_bits(got, expected)
    beside.assert_kept(compressor)


@of_gradient_dtypes
@on_ranks(2, launcher="torchrun")
def test_gradients_that_fsdp2_may_reduce_in_several_dtypes() -> None:
    mesh = mesh_of(2)
    for dtype in (torch.bfloat16, None):
        net = shard(_mixed(Net(THREE), dtype), mesh)
        with pytest.raises(TypeError, match=r"first: .* one dtype, .*: set reduce_dtype"):
            hvdc.Compressor(net, Int8(), mesh=mesh)
