"""Workers whose parameters FSDP2 shards, beside workers that have them whole."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import hvd_compress.distributed as hvdc
from hvd_compress import ErrorFeedback, Int8, NoCompression, OneBit, Route
from tests.diloco.nesterov import DiLoCo
from tests.fsdp import probes
from tests.fsdp.probes import Net, mesh_of, shard
from tests.ranks import on_ranks
from tests.torch_models import assert_same_bits, targets

SHAPES = {**probes.SHAPES, "second.one": (1,)}
"""One rank has nothing of the last parameter."""
CODED: tuple[tuple[Any, str], ...] = (
    (Route(OneBit(), ErrorFeedback(1.0)), "allgather"),
    (Route(Int8(), ErrorFeedback(1.0)), "two_shot"),
)
FRAGMENTS: dict[str, Any] = {"sync_every": 2, "fragments": 2, "delay": 1}


def learn(net: Any, worker: int, step: int, shapes: Any = SHAPES) -> None:
    """One step of an inner optimizer."""
    net.zero_grad()
    net(targets(shapes, worker, step)).backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()


def train(diloco: DiLoCo, net: Any, worker: int, steps: range) -> None:
    for step in steps:
        learn(net, worker, step)
        diloco.step()


def parts(tensors: Any) -> dict[str, torch.Tensor]:
    """This rank's shards of tensors by name, or of a model's parameters."""
    named = tensors.named_parameters() if isinstance(tensors, torch.nn.Module) else tensors
    return {n: one.detach().to_local() for n, one in dict(named).items()}


def cut(whole: Any, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """This rank's shards of whole tensors."""
    named = whole.named_parameters() if isinstance(whole, torch.nn.Module) else whole
    number, shards = mesh.get_local_rank("shard"), mesh.size(1)
    rows = {name: one.detach().chunk(shards) for name, one in dict(named).items()}
    return {n: one[number] if number < len(one) else one[0][:0] for n, one in rows.items()}


@on_ranks(4, launcher="torchrun")
def test_two_sharded_workers_do_what_two_whole_ones_do() -> None:
    mesh = mesh_of(2)
    worker, group = mesh.get_local_rank("replicate"), mesh.get_group("replicate")
    for options in ({"sync_every": 3}, FRAGMENTS):
        nets = [shard(Net(SHAPES), mesh), Net(SHAPES)]
        for net in nets:  # All begin with what the first worker has.
            for one in net.parameters():
                one.data.add_(1 + worker)
        sharded = DiLoCo(nets[0], NoCompression(), mesh=mesh, **options)
        compressor = hvdc.Compressor(NoCompression(), process_group=group)
        whole = DiLoCo(nets[1], compressor, **options)
        for diloco, net in zip((sharded, whole), nets, strict=True):
            train(diloco, net, worker, range(8))
        assert sharded.rounds == whole.rounds > 1
        common = sharded.common_parameters
        assert all(isinstance(one, DTensor) for one in common.values())
        assert_same_bits(parts(common), cut(whole.common_parameters, mesh))
        assert_same_bits(parts(nets[0]), cut(nets[1], mesh))
        for diloco in (sharded, whole):
            diloco.synchronize()
        assert_same_bits(parts(nets[0]), cut(nets[1], mesh))


@on_ranks(4, launcher="torchrun")
def test_what_sharded_workers_freeze_later_stays() -> None:
    mesh = mesh_of(2)
    worker = mesh.get_local_rank("replicate")
    for dtype in (torch.float32, torch.bfloat16):
        net = shard(Net(SHAPES, dtype), mesh)
        diloco = DiLoCo(net, hvdc.Compressor(OneBit(), threshold=0), mesh=mesh, sync_every=2)
        train(diloco, net, worker, range(4))
        net.second.requires_grad_(False)
        kept = {name: one.clone() for name, one in parts(net.second).items()}
        before = parts(net.first)["a"].clone()
        train(diloco, net, worker, range(4, 8))
        assert_same_bits(parts(net.second), kept)
        assert before.numel() == 0 or not torch.equal(parts(net.first)["a"], before)
        net.second.requires_grad_(True)
        train(diloco, net, worker, range(8, 10))
        changed = [bool((parts(net.second)[name] != one).any()) for name, one in kept.items()]
        assert any(changed)


@on_ranks(4, launcher="torchrun")
def test_codecs_see_shards_and_states_go_on_bit_for_bit() -> None:
    mesh = mesh_of(2)
    worker, group = mesh.get_local_rank("replicate"), mesh.get_group("replicate")
    for codec, exchange in CODED:
        options: Any = {"exchange": exchange, "threshold": 0}

        def begin(codec: Any = codec, options: Any = options) -> tuple[Any, DiLoCo]:
            net = shard(Net(SHAPES), mesh)
            return net, DiLoCo(net, hvdc.Compressor(codec, **options), mesh=mesh, **FRAGMENTS)

        net, diloco = begin()
        # A model whose whole parameters are the same shards, and change alike.
        plain = Net({name: tuple(one.shape) for name, one in parts(net).items()})
        fragments = diloco.state_dict()["configuration"]["fragments"]
        compressor = hvdc.Compressor(codec, process_group=group, **options)
        beside = DiLoCo(plain, compressor, **{**FRAGMENTS, "fragments": fragments})
        state: list[Any] = []
        for step in range(7):
            learn(net, worker, step)
            with torch.no_grad():
                for name, one in plain.named_parameters():
                    one.copy_(parts(net)[name])
            diloco.step()
            beside.step()
            assert_same_bits(parts(net), dict(plain.named_parameters()))
            if step == 3:
                state = copy.deepcopy([net.state_dict(), diloco.state_dict()])
                assert state[1]["due"]
        assert diloco.compressor.residual_norm() == compressor.residual_norm() > 0
        again, other = begin()
        again.load_state_dict(state[0])
        other.load_state_dict(state[1])
        train(other, again, worker, range(4, 7))
        assert_same_bits(parts(again), parts(net))
        assert other.compressor.residual_norm() == compressor.residual_norm()
        _, third = begin()
        # What is wrong on one rank alone holds no other one up: no rank waits for its worker.
        state[1]["configuration"]["shard"][0] ^= dist.get_rank() == 3
        if dist.get_rank() == 3:
            with pytest.raises(ValueError, match=r"expected shard \[1, 2\], got"):
                third.load_state_dict(state[1])
        else:
            third.load_state_dict(state[1])


@on_ranks(4, launcher="torchrun")
def test_a_round_that_is_dropped_later_leaves_the_common_parameters_of_all_shards() -> None:
    mesh = mesh_of(2)
    worker, number = mesh.get_local_rank("replicate"), mesh.get_local_rank("shard")
    for delay, bad in ((0, torch.nan), (1, torch.inf)):
        net = shard(Net(SHAPES), mesh)
        options: dict[str, Any] = {"sync_every": 2, "delay": delay, "mixing": 0.5, "mesh": mesh}
        diloco = DiLoCo(net, hvdc.Compressor(OneBit(), threshold=0), **options)
        train(diloco, net, worker, range(4 + delay))
        common = {n: one.clone() for n, one in parts(diloco.common_parameters).items()}
        norm = diloco.compressor.residual_norm()
        learn(net, worker, 5)
        if (worker, number) == (1, 0):
            next(iter(parts(net).values()))[3] = bad
        diloco.step()
        train(diloco, net, worker, range(6, 7))
        assert (diloco.rounds, diloco.dropped_rounds) == (2, 1)
        assert_same_bits(parts(net), common)
        assert_same_bits(parts(diloco.common_parameters), common)
        assert diloco.compressor.residual_norm() == norm > 0


@on_ranks(4, launcher="torchrun")
def test_a_shard_that_nothing_changed_moves_on_with_the_rest_of_its_parameter() -> None:
    """As a whole parameter would, by the outer optimizer's momentum."""
    mesh = mesh_of(2)
    group = mesh.get_group("replicate")
    nets = [shard(Net(SHAPES), mesh), Net(SHAPES)]
    sharded = DiLoCo(nets[0], NoCompression(), sync_every=1, mesh=mesh)
    compressor = hvdc.Compressor(NoCompression(), process_group=group)
    whole = DiLoCo(nets[1], compressor, sync_every=1)
    for step in range(3):
        for net, diloco in zip(nets, (sharded, whole), strict=True):
            change = targets(SHAPES, 0, step)
            if step:
                change["first.a"][20:] = 0
            net.zero_grad()
            net(change).backward()
            torch.optim.SGD(net.parameters(), lr=0.1).step()
            diloco.step()
        assert_same_bits(parts(nets[0]), cut(nets[1], mesh))


@on_ranks(4, launcher="torchrun", alone=True)
def test_a_failure_during_another_exchange_mixes_no_fragments() -> None:
    """Rank 1 cannot send the second fragment, while the first one is on its way.

    Rank 0 then closes its connections: after its own exchange of the second fragment, or before it (late).
    In the latter case, one rank of the other worker has lost its peer, and the other one was refused.
    """
    rank, fragments = dist.get_rank(), [["first.a"], ["first.b", "second.*"]]
    options: dict[str, Any] = {"sync_every": 4, "fragments": fragments, "delay": 3}
    for late in (False, True):
        mesh = mesh_of(2)  # With groups of its own: failures close their connections.
        worker, net = mesh.get_local_rank("replicate"), shard(Net(SHAPES), mesh)
        diloco = DiLoCo(net, NoCompression(), mesh=mesh, **options)
        train(diloco, net, worker, range(5))
        if rank == 1:
            net.first.more = torch.nn.Parameter(torch.zeros(3))
            with pytest.raises(ValueError, match="more"):
                diloco.step()
            del net.first.more
        if late and rank == 2:
            dist.recv(torch.empty(1), 0)
        with pytest.raises(RuntimeError, match=r"call rebind\(\)" if rank < 2 else ""):
            for _ in range(6):  # The fragments are due in steps 7, 9, and so on.
                with contextlib.suppress(hvdc.ExchangeError):  # The refused one.
                    diloco.step()
        if late and rank == 0:
            dist.send(torch.empty(1), 2)
        group = [mesh.get_local_rank("shard"), mesh.get_local_rank("shard") + 2]
        diloco.rebind(dist.new_group(group, use_local_synchronization=True))
        rounds = diloco.rounds
        train(diloco, net, worker, range(diloco.steps, 20))
        diloco.synchronize()
        assert diloco.rounds > rounds + 2
        told: list[Any] = [None] * 4
        dist.all_gather_object(told, (diloco.steps, diloco.rounds))
        assert told == told[:1] * 4


@on_ranks(4, launcher="torchrun", alone=True)
def test_a_worker_is_lost_and_the_other_one_goes_on() -> None:
    mesh = mesh_of(2)
    worker = mesh.get_local_rank("replicate")
    net = shard(Net(SHAPES), mesh)
    compressor = hvdc.Compressor(OneBit(), threshold=0)
    diloco = DiLoCo(net, compressor, sync_every=2, fragments=2, delay=1, mesh=mesh)
    train(diloco, net, worker, range(4))
    if worker == 1:
        compressor.close()  # As the end of its process does.
        return
    with pytest.raises(RuntimeError):
        train(diloco, net, worker, range(4, 8))
    before = compressor.state_dict()["tensors"]
    kept = {name: one["residual"] for name, one in before.items()}
    own = {n: one.cpu().clone() for n, one in kept.items() if one is not None and one.any()}
    with pytest.raises(TypeError, match="ranks with the same shards, got none"):
        diloco.rebind()
    diloco.rebind(dist.new_group([dist.get_rank()], use_local_synchronization=True))
    after = compressor.state_dict()["tensors"]
    assert own
    assert_same_bits({n: after[n]["residual"] for n in own}, {n: x / 2 for n, x in own.items()})
    rounds = diloco.rounds
    train(diloco, net, worker, range(diloco.steps, diloco.steps + 6))
    assert diloco.rounds > rounds


@on_ranks(4, launcher="torchrun", alone=True)
def test_what_cannot_be_carried_is_said_before_the_first_exchange() -> None:
    mesh, whole = mesh_of(2), Net(SHAPES)
    net = shard(Net(SHAPES), mesh)
    both = fully_shard(Net(SHAPES), mesh=mesh)
    half = Net(SHAPES)
    fully_shard(half.first, mesh=mesh["shard"])
    other = hvdc.Compressor(Int8(), process_group=mesh.get_group("shard"))
    cases: list[tuple[Any, Any, dict[str, Any], str]] = [
        (net, Int8(), {}, r"write DiLoCo\(model, ..., mesh=mesh\)"),
        (whole, Int8(), {"mesh": mesh}, "got a plain one for first.a: call fully_shard"),
        (half, Int8(), {"mesh": mesh}, r"on one mesh, or on none, got .* and none for second.c"),
        (both, Int8(), {"mesh": mesh}, "a mesh of one dimension, got"),
        (net, Int8(), {"mesh": mesh["shard"]}, "expected two dimensions, replicas first"),
        (net, Int8(), {"mesh": mesh_of(1)}, r"the ranks \[., .\] that the model is sharded over"),
        (net, Int8(), {"mesh": 3}, "expected a DeviceMesh, got int"),
        (net, other, {"mesh": mesh}, "with that of the mesh's first dimension, ranks"),
        (net, hvdc.Compressor(Int8(), exchange="hierarchical"), {"mesh": mesh}, "exchange"),
        (net, Int8(), {"mesh": mesh, "manager": 3}, "expected none with a manager"),
    ]
    for model, codec, given, match in cases:
        with pytest.raises((TypeError, ValueError), match=match):
            DiLoCo(model, codec, sync_every=2, **given)
    # What is wrong on one rank alone is an error on all four.
    wrong = dist.get_rank() == 3
    with pytest.raises(ValueError if wrong else hvdc.ExchangeError, match="sync_every"):
        DiLoCo(net, Int8(), sync_every=0 if wrong else 2, mesh=mesh)
    with pytest.raises(hvdc.ExchangeError, match="delay"):  # Workers agree, their shards do not.
        DiLoCo(net, Int8(), sync_every=4, delay=mesh.get_local_rank("shard"), mesh=mesh)
    diloco = DiLoCo(net, NoCompression(), sync_every=1, mesh=mesh)
    if dist.get_rank() == 1:
        net.first.more = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError if dist.get_rank() == 1 else hvdc.ExchangeError):
        diloco.step()
