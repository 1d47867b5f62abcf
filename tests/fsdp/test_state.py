"""Checkpoints of compressors for FSDP2, and other numbers of replicas."""

from __future__ import annotations

import copy
import io
import pickle
import shutil
import tempfile
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh

import hvd_compress.fsdp as hvdc
from hvd_compress.codecs import OneBit, Ternary
from tests.contract.cases import FLAT, FULL, USUAL
from tests.fsdp.probes import (
    SHAPES,
    Beside,
    Net,
    backward,
    make,
    mesh_of,
    shard,
)
from tests.ranks import on_ranks
from tests.torch_models import DEVICE, assert_same_bits, on_arrays, targets


def _states(compressor: hvdc.Compressor) -> list[Any]:
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, compressor.state_dict())
    return states


@on_ranks(4, launcher="torchrun")
def test_copies_are_refused() -> None:
    """FSDP2's modules are not copied either; the error says what to use."""
    _, compressor = make(mesh_of(2), OneBit(), FULL)
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"keep what state_dict\(\) returns"):
            attempt(compressor)


@on_ranks(4, launcher="torchrun")
def test_a_checkpoint_goes_on_bit_for_bit() -> None:
    mesh = mesh_of(2)
    net, compressor = make(mesh, OneBit(), FULL, exchange="two_shot")
    beside = Beside(mesh, "two_shot", OneBit(), FULL)
    for step in range(2):
        backward(net, targets(SHAPES, dist.get_rank(), step))
        beside.step(step)
    file = io.BytesIO()
    torch.save(compressor.state_dict(), file)
    net, other = make(mesh, OneBit(), FULL, exchange="two_shot")
    other.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    for step in range(2, 4):
        got = backward(net, targets(SHAPES, dist.get_rank(), step))
        assert_same_bits(got, beside.step(step))
    states = _states(compressor)
    with pytest.raises(ValueError, match=r"expected the state of a rank with shard . of 2, got \["):
        other.load_state_dict(states[dist.get_rank() ^ 1])
    with pytest.raises(ValueError, match=r"expected rank ."):
        other.load_state_dict(states[dist.get_rank() ^ 2])
    with pytest.raises(ValueError, match=r"of 'first\.a', .*: not a compressor's state"):
        other.load_state_dict(net.state_dict())


@on_ranks(4, launcher="torchrun")
def test_a_step_that_the_script_drops() -> None:
    """The step changes neither any shard's residual nor the state of an owner step."""
    mesh = mesh_of(2)
    for exchange in FLAT:
        step = hvdc.AdaGrad(initial=0.25) if exchange == "two_shot" else None
        options: dict[str, Any] = {} if step is None else {"owner_step": step}
        net, compressor = make(mesh, *USUAL[exchange], exchange=exchange, **options)
        if step is not None:
            options["owner_step"] = on_arrays(step)
        beside = Beside(mesh, exchange, *USUAL[exchange], **options)
        for number in range(5):
            got = backward(net, targets(SHAPES, dist.get_rank(), number))
            beside.assert_same(got, beside.step(number))
            if number in (1, 3):
                net.zero_grad()
                compressor.drop_step()
                beside.simulation.drop_step()
                beside.assert_kept(compressor)
        beside.assert_kept(compressor)


@on_ranks(4, launcher="torchrun")
def test_a_return_to_an_earlier_model() -> None:
    """After ``reset()``, nothing of the forgotten steps comes back to any shard; the noise goes on."""
    mesh, rank = mesh_of(2), dist.get_rank()
    for exchange in FLAT:
        step = hvdc.AdaGrad(initial=0.25) if exchange == "two_shot" else None
        options: dict[str, Any] = {} if step is None else {"owner_step": step}
        net, compressor = make(mesh, *USUAL[exchange], exchange=exchange, **options)
        if step is not None:
            options["owner_step"] = on_arrays(step)
        beside = Beside(mesh, exchange, *USUAL[exchange], **options)

        def explode(_: int, gradients: dict[str, torch.Tensor]) -> None:
            for one in gradients.values():
                one *= 1e7

        beside.assert_same(backward(net, targets(SHAPES, rank, 0)), beside.step(0))
        backward(net, targets(SHAPES, rank, 1, 1e7))
        beside.step(1, explode)
        compressor.reset()
        beside.simulation.reset()
        assert compressor.residual_norm() == 0
        for number in (2, 3):
            got = backward(net, targets(SHAPES, rank, number))
            beside.assert_same(got, beside.step(number))
        beside.assert_kept(compressor)


@on_ranks(4, launcher="torchrun")
def test_another_number_of_replicas() -> None:
    net, compressor = make(mesh_of(2), OneBit(), FULL)
    for step in range(2):
        backward(net, targets(SHAPES, dist.get_rank(), step))
    states = _states(compressor)
    # Two jobs of two ranks, each of one replica.
    meshes = [
        DeviceMesh(DEVICE.type, [ranks], mesh_dim_names=("replicate", "shard"))
        for ranks in ([0, 1], [2, 3])
    ]
    mesh = meshes[dist.get_rank() // 2]
    net, smaller = make(mesh, OneBit(), FULL)
    smaller.load_resized(states)
    place = mesh.get_local_rank("shard")
    for name, one in smaller.state_dict()["tensors"].items():
        kept = [state["tensors"][name]["residual"] for state in (states[place], states[2 + place])]
        if one["residual"] is not None:
            torch.testing.assert_close(one["residual"].cpu(), sum(part.cpu() for part in kept) / 2)
    backward(net, targets(SHAPES, dist.get_rank(), 2))
    net, another = make(mesh_of(4), OneBit(), FULL)
    with pytest.raises(
        ValueError, match=r"whose replicas had 1 shards, got .*2.*go on with as many"
    ):
        another.load_resized(states)


@on_ranks(4, launcher="torchrun")
def test_torch_distributed_checkpoint() -> None:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    mesh = mesh_of(2)
    net, compressor = make(mesh, OneBit(), FULL)
    for step in range(2):
        backward(net, targets(SHAPES, dist.get_rank(), step))
    dcp.save({"compressor": hvdc.RankStates(compressor)}, checkpoint_id=folder[0])
    net, other = make(mesh, OneBit(), FULL)
    dcp.load({"compressor": hvdc.RankStates(other)}, checkpoint_id=folder[0])
    kept, loaded = (c.state_dict()["tensors"] for c in (compressor, other))
    for name in SHAPES:
        if kept[name]["residual"] is not None:
            assert torch.equal(kept[name]["residual"], loaded[name]["residual"])
        assert (
            kept[name]["step"]
            == loaded[name]["step"]
            == (2 if kept[name]["residual"] is not None else 0)
        )
    meshes = [
        DeviceMesh(DEVICE.type, [ranks], mesh_dim_names=("replicate", "shard"))
        for ranks in ([0, 1], [2, 3])
    ]
    net, smaller = make(meshes[dist.get_rank() // 2], OneBit(), FULL)
    states = hvdc.RankStates(smaller, saved_ranks=4)
    dcp.load({"compressor": states}, checkpoint_id=folder[0])
    assert smaller.residual_norm() > 0
    dist.barrier()
    shutil.rmtree(folder[0], ignore_errors=True)


@on_ranks(1, launcher="torchrun")
def test_a_checkpoint_of_gpus_is_read_without_them() -> None:
    net, compressor = make(mesh_of(1), OneBit(), FULL)
    backward(net, targets(SHAPES, 0, 0))
    states = hvdc.RankStates(compressor)
    with mock.patch.object(torch.serialization, "location_tag", lambda _: "cuda:0"):
        saved = states.state_dict()
    before = compressor.residual_norm()
    states.load_state_dict(saved)
    assert compressor.residual_norm() == before > 0


@on_ranks(2, launcher="torchrun")
def test_an_encoded_reduce_scatter_goes_on_with_its_noise() -> None:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    rank = dist.get_rank()
    scatters, got = [], []
    for _ in range(2):
        net = shard(Net(SHAPES), mesh_of(1))
        scatters.append(hvdc.CompressedReduceScatter(net, Ternary(64), seed=5))
        if len(scatters) == 1:
            backward(net, targets(SHAPES, rank, 0))
            dcp.save({"scatter": scatters[0]}, checkpoint_id=folder[0])
        else:
            dcp.load({"scatter": scatters[1]}, checkpoint_id=folder[0])
        got.append(backward(net, targets(SHAPES, rank, 1)))
    assert_same_bits(got[1], got[0])
    later = backward(net, targets(SHAPES, rank, 1))
    assert any(not torch.equal(one, got[1][name]) for name, one in later.items())
    net = shard(Net(SHAPES), mesh_of(1))
    other = hvdc.CompressedReduceScatter(net, Ternary(64), seed=6)
    with pytest.raises(ValueError, match="expected seed 6, got 5"):
        other.load_state_dict(scatters[0].state_dict())
    with pytest.raises(TypeError, match=r"expected what state_dict.* got None"):
        other.load_state_dict(None)  # type: ignore[arg-type]
    state = other.state_dict()
    for altered in ({"exchanges": -1}, {"exchanges": "1"}, {"exchanges": 1.0}, {"exchanges": True}):
        with pytest.raises((TypeError, ValueError), match=r"exchanges: expected an integer"):
            other.load_state_dict({**state, **altered})
    del state["exchanges"]
    for wrong in (state, net.state_dict()):
        with pytest.raises(ValueError, match="not a compressor's state"):
            other.load_state_dict(wrong)
    if rank == 1:
        other.load_state_dict({**scatters[0].state_dict(), "seed": 6})
    with pytest.raises(hvdc.ExchangeError, match=r"number: 1 on rank 0, . on rank 1"):
        backward(net, targets(SHAPES, rank, 0))
    dist.barrier()
    shutil.rmtree(folder[0], ignore_errors=True)
