"""States of sharded workers in checkpoints of torch.distributed.checkpoint, for any mesh."""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import hvd_compress.distributed as hvdc
from hvd_compress import NoCompression, OneBit, PowerSGD
from hvd_compress.diloco import ShardedState
from hvd_compress.diloco.common import as_placed
from hvd_compress.engine.state import unsent
from tests.diloco.nesterov import DiLoCo
from tests.diloco.test_shards import CODED, FRAGMENTS, SHAPES, learn, parts, train
from tests.fsdp.probes import Net, mesh_of, shard
from tests.ranks import on_ranks
from tests.torch_models import DEVICE, assert_same_bits


def _folder() -> str:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    return str(folder[0])


def _begin(mesh: DeviceMesh, codec: Any, exchange: str = "auto") -> tuple[Any, DiLoCo]:
    net = shard(Net(SHAPES), mesh)
    compressor = hvdc.Compressor(codec, exchange=exchange, threshold=0)
    return net, DiLoCo(net, compressor, mesh=mesh, **FRAGMENTS)


def _save(net: Any, diloco: DiLoCo, mesh: DeviceMesh, folder: str) -> None:
    worker = f"worker {mesh.get_local_rank('replicate')}"
    dcp.save({worker: net.state_dict(), "diloco": ShardedState(diloco)}, checkpoint_id=folder)


def _load(net: Any, diloco: DiLoCo, mesh: DeviceMesh, folder: str, group: Any = None) -> None:
    worker = f"worker {mesh.get_local_rank('replicate')}"
    state = {worker: net.state_dict(), "diloco": ShardedState(diloco, folder)}
    dcp.load(state, checkpoint_id=folder, process_group=group)
    net.load_state_dict(state[worker])


def _unsent(net: Any, diloco: DiLoCo) -> dict[str, torch.Tensor]:
    """Returns the whole tensors that a worker has yet to add to the sum of all workers' differences."""
    tensors, found = diloco.compressor.state_dict()["tensors"], {}
    for name, one in net.named_parameters():
        shape = one.to_local().shape
        placed = as_placed(unsent(tensors[name], shape).view(shape), one)
        assert isinstance(placed, DTensor)
        found[name] = placed.full_tensor()
    return found


@on_ranks(4, launcher="torchrun")
def test_the_same_mesh_goes_on_bit_for_bit() -> None:
    mesh, folder = mesh_of(2), _folder()
    worker = mesh.get_local_rank("replicate")
    for codec, exchange in (*CODED, (PowerSGD(2), "auto")):
        net, diloco = _begin(mesh, codec, exchange)
        train(diloco, net, worker, range(4))
        _save(net, diloco, mesh, folder)
        assert diloco.state_dict()["due"]
        train(diloco, net, worker, range(4, 9))
        again, other = _begin(mesh, codec, exchange)
        _load(again, other, mesh, folder)
        assert other.steps == 4
        train(other, again, worker, range(4, 9))
        assert_same_bits(parts(again), parts(net))
        assert_same_bits(parts(other.common_parameters), parts(diloco.common_parameters))
        assert other.compressor.residual_norm() == diloco.compressor.residual_norm() > 0
        assert (other.steps, other.rounds) == (diloco.steps, diloco.rounds)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


@on_ranks(4, launcher="torchrun")
def test_averages_that_are_due_return_to_their_parameters() -> None:
    """All of one shape; several ranks write them, in an order of their own."""
    mesh, folder, shapes = mesh_of(2), _folder(), {f"first.w{n}": (16, 16) for n in range(8)}
    options: dict[str, Any] = {"sync_every": 3, "delay": 2, "mesh": mesh}
    net = shard(Net(shapes), mesh)
    diloco = DiLoCo(net, NoCompression(), **options)
    for step in range(3):
        learn(net, mesh.get_local_rank("replicate"), step, shapes)
        diloco.step()
    _save(net, diloco, mesh, folder)
    again = shard(Net(shapes), mesh)
    other = DiLoCo(again, NoCompression(), **options)
    _load(again, other, mesh, folder)
    got, expected = (one.state_dict()["due"][0] for one in (other, diloco))
    assert got[0] == expected[0] == 5
    assert all(map(torch.equal, got[1], expected[1]))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


@on_ranks(4, launcher="torchrun", alone=True)
def test_other_numbers_of_shards_and_workers_read_their_parts() -> None:
    """Two workers of two shards; then one worker of four, two of one, or one of two."""
    mesh = mesh_of(2)
    worker = mesh.get_local_rank("replicate")
    saved = []
    for codec, exchange in (*CODED, (NoCompression(), "auto")):
        folder = _folder()
        net, diloco = _begin(mesh, codec, exchange)
        train(diloco, net, worker, range(4))
        _save(net, diloco, mesh, folder)
        rest = {} if exchange == "auto" else _unsent(net, diloco)
        for one in rest.values():
            dist.all_reduce(one, group=mesh.get_group("replicate"))
        common = {n: one.full_tensor() for n, one in diloco.common_parameters.items()}
        train(diloco, net, worker, range(4, 9))
        ends: list[Any] = [None] * 4
        dist.all_gather_object(ends, {n: one.full_tensor() for n, one in net.named_parameters()})
        saved.append((codec, exchange, folder, rest, common, [ends[0], ends[2]]))
    names = {"mesh_dim_names": ("replicate", "shard")}
    meshes = [
        mesh_of(1),
        DeviceMesh(DEVICE.type, [[0], [1]], **names),
        DeviceMesh(DEVICE.type, [[0, 1]], **names),
    ]
    pair = dist.new_group([0, 1])
    for other_mesh, group in zip(meshes, (None, pair, pair), strict=True):
        if dist.get_rank() not in other_mesh.mesh:
            continue
        workers, place = other_mesh.size(0), other_mesh.get_local_rank("replicate")
        for codec, exchange, folder, rest, common, ends in saved:
            net, diloco = _begin(other_mesh, codec, exchange)
            _load(net, diloco, other_mesh, folder, group)
            kept = _unsent(net, diloco) if rest else {}
            for name, one in rest.items():
                dist.all_reduce(kept[name], group=other_mesh.get_group("replicate"))
                torch.testing.assert_close(kept[name] / workers, one / 2)
            if workers == 2:
                got = {n: one.full_tensor() for n, one in diloco.common_parameters.items()}
                assert_same_bits(got, common)
            train(diloco, net, place, range(4, 9))
            assert diloco.steps == 9
            if workers == 2 and not rest:  # Nothing depends on the shards.
                got = {name: one.full_tensor() for name, one in net.named_parameters()}
                assert_same_bits(got, ends[place])
    dist.barrier()
    if dist.get_rank() == 0:
        for _, _, folder, *_ in saved:
            shutil.rmtree(folder)


@on_ranks(4, launcher="torchrun")
def test_what_cannot_be_saved_or_loaded() -> None:
    mesh, folder = mesh_of(2), _folder()
    net, diloco = _begin(mesh, NoCompression())
    _save(net, diloco, mesh, folder)
    with pytest.raises(TypeError, match="ShardedState"):
        ShardedState(net)
    plain = DiLoCo(Net(SHAPES), NoCompression(), sync_every=2)
    with pytest.raises(ValueError, match="made with a mesh"):
        ShardedState(plain)
    shapes = {**SHAPES, "first.b": (7,)}
    other = shard(Net(shapes), mesh)
    its = DiLoCo(other, NoCompression(), mesh=mesh, **FRAGMENTS)
    with pytest.raises(
        ValueError, match=r"got first.b of shape \(3001,\), and the model has \(7,\)"
    ):
        ShardedState(its, folder).state_dict()
    more = DiLoCo(net, NoCompression(), mesh=mesh, **{**FRAGMENTS, "sync_every": 4})
    state = {"diloco": ShardedState(more, folder)}
    with pytest.raises(Exception, match="expected sync_every 4, got 2"):
        dcp.load(state, checkpoint_id=folder)
    learn(net, 0, 0)
    assert more.steps == 0
    # What is wrong on one rank alone, as it may have the only shard that shows it, is an error on all.
    wrong = dist.get_rank() == 3
    if wrong:
        copy = next(iter(diloco._common.copies.values()))
        diloco._common.outer.state[copy]["rows"] = torch.zeros(3)
    with pytest.raises(ValueError if wrong else hvdc.ExchangeError, match="rows of shape"):
        ShardedState(diloco).state_dict()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


@on_ranks(4, launcher="torchrun")
def test_weights_that_are_loaded_into_one_shard_arrive_after_a_checkpoint() -> None:
    """A frozen layer gets other rows on the second rank of each worker; they travel bit by bit."""
    mesh, folder = mesh_of(2), _folder()
    worker = mesh.get_local_rank("replicate")
    for loads in (0, 1):

        def begin(number: int = loads) -> tuple[Any, DiLoCo]:
            net = shard(Net(SHAPES), mesh)
            compressor = hvdc.Compressor(OneBit(), exchange="allgather", threshold=0)
            return net, DiLoCo(net, compressor, mesh=mesh, sync_every=1)

        net, diloco = begin()
        train(diloco, net, worker, range(2))
        net.second.requires_grad_(False)
        train(diloco, net, worker, range(2, 4))  # What it has learnt is sent.
        generator = torch.Generator(DEVICE).manual_seed(loads)
        for one in net.second.parameters():
            if mesh.get_local_rank("shard") == loads:
                part = one.data.to_local()
                part.copy_(torch.randn(part.shape, generator=generator))
        train(diloco, net, worker, range(4, 5))
        _save(net, diloco, mesh, folder)
        again, other = begin()
        again.second.requires_grad_(False)
        _load(again, other, mesh, folder)
        assert other.state_dict()["to_send"] == diloco.state_dict()["to_send"]
        for one, its_net in ((diloco, net), (other, again)):
            train(one, its_net, worker, range(5, 12))
        assert_same_bits(parts(other.common_parameters), parts(diloco.common_parameters))
        assert other.compressor.residual_norm() == diloco.compressor.residual_norm()
    other._members.steps += mesh.get_local_rank("shard") == 1
    with pytest.raises(hvdc.ExchangeError, match="steps: 12 on rank 0, 13 on rank 1"):
        ShardedState(other).state_dict()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
