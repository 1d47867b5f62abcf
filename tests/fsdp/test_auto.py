"""Auto under FSDP2: all ranks of the mesh plan together, and no gradient is lost by a change of plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

import hvd_compress.fsdp as hvdc
from hvd_compress.codecs import OneBit
from tests.fsdp.probes import (
    Layers,
    Net,
    Stumbling,
    assert_replicas_are_alike,
    backward,
    mesh_of,
    of_today,
    shard,
)
from tests.planner import process_groups
from tests.planner.process_groups import EXACT, Tensors, everywhere
from tests.ranks import on_ranks
from tests.torch_models import Shapes, targets


class _Job(process_groups.Job):
    shapes: ClassVar[Shapes] = {
        "first.a": (40, 170),
        "first.uneven": (3001,),
        "second.c": (8, 3, 5, 5),
        "second.border": (201,),  # 101 elements of one shard of two, and 100 of the other one.
        "second.tiny": (3,),
    }

    def __init__(self, replicas: int = 2, **options: Any) -> None:
        self.mesh = mesh_of(replicas)
        self.net = shard(Net(self.shapes), self.mesh)
        self.compressor = hvdc.Auto(self.net, mesh=self.mesh, **{"threshold": 101, **options})

    def step(self, gradients: Mapping[str, torch.Tensor]) -> Tensors:
        return backward(self.net, gradients)

    def own(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        parts = torch.chunk(whole, self.mesh.size(1))
        number = self.mesh.get_local_rank("shard")
        return parts[number] if number < len(parts) else whole[:0]


@on_ranks(4, launcher="torchrun")
def test_every_change_of_route_keeps_every_gradient() -> None:
    job = _Job(codecs=EXACT, exchanges=("allgather", "two_shot"))
    process_groups.every_change_of_route_keeps_every_gradient(job)
    assert_replicas_are_alike(job.mesh, job.net)


@on_ranks(4, launcher="torchrun")
def test_all_ranks_of_the_mesh_agree_on_every_plan() -> None:
    job = _Job(codecs=EXACT)
    process_groups.ranks_agree_on_every_plan(job)
    # Replicas of a shard take the same route, and the smaller shard may take none.
    everybodys = everywhere({n: str(route) for n, route in job.compressor.routes().items()})
    assert everybodys[0] == everybodys[2] and everybodys[1] == everybodys[3]
    assert everybodys[1]["second.border"].startswith("NoCompression")


@on_ranks(2, launcher="torchrun")
def test_replicas_without_shards_agree_on_every_plan() -> None:
    process_groups.ranks_agree_on_every_plan(_Job(codecs=EXACT))


@on_ranks(4, launcher="torchrun")
def test_the_slowest_rank_counts_whatever_its_shards_are() -> None:
    """Ranks share tables with their replicas, and the largest numbers with other shards."""
    compressor = _Job().compressor
    rank = dist.get_rank()
    for number in range(2):
        found = compressor._planned.planner._share([float(rank), -float(rank)], "test")
        assert found == [[1.0, 0.0], [3.0, -2.0]], number


@on_ranks(4, launcher="torchrun")
def test_a_plan_is_saved() -> None:
    process_groups.a_plan_is_saved(_Job(codecs=EXACT), _Job(codecs=EXACT))


@on_ranks(4, launcher="torchrun")
def test_states_of_another_number_of_replicas() -> None:
    job = _Job(codecs=EXACT)
    job.step(targets(job.shapes, dist.get_rank(), 0))
    later = _Job(codecs=EXACT)
    later.compressor.load_resized(everywhere(job.compressor.state_dict()))
    assert not later.compressor.settled and later.compressor.residual_norm() > 0


@on_ranks(4, launcher="torchrun")
def test_passes_that_accumulate_are_no_steps_of_their_own() -> None:
    job = _Job(codecs=EXACT)
    for number in range(3):
        for syncs in (False, True):
            job.net.set_requires_gradient_sync(syncs)
            job.step(targets(job.shapes, dist.get_rank(), number))
    assert job.compressor._planned.planner.step == 2, "the last one ends where the next one begins"


@of_today
@on_ranks(4, launcher="torchrun")
def test_planning_goes_on_where_a_backward_pass_breaks_off() -> None:
    mesh = mesh_of(2)
    net = shard(Layers(), mesh)
    compressor = hvdc.Auto(net, mesh=mesh, threshold=16)
    for step in range(12):
        Stumbling.stumbles = step in (2, 6)
        if Stumbling.stumbles:
            with pytest.raises(ArithmeticError, match="on purpose"):
                net(torch.ones(3, 40)).sum().backward()
            net.reset_iter_state()
        else:
            net.zero_grad()
            net(torch.ones(3, 40)).sum().backward()
    assert compressor.counters.steps == 10
    assert len(set(everywhere(compressor.explain()))) == 1


@on_ranks(4, launcher="torchrun")
def test_ranks_that_may_not_choose_the_same() -> None:
    """Every rank of the mesh hears of it, whether it has other shards or is another replica."""
    net = Net(_Job.shapes)
    for odd in ([1], [2], [1, 3]):
        codecs = ("int8",) if dist.get_rank() in odd else ("onebit",)
        mesh = mesh_of(2)
        with pytest.raises(hvdc.ExchangeError, match=r"(?s)Int8.*rank"):
            hvdc.Auto(shard(Net(_Job.shapes), mesh), mesh=mesh, codecs=codecs)
    mesh = mesh_of(2)
    shard(net, mesh)
    with pytest.raises(ValueError, match=r"Auto\.exchanges: expected one of .*got 'hierarchical'"):
        hvdc.Auto(net, mesh=mesh, exchanges=("hierarchical",))
    with pytest.raises(TypeError, match=r"Auto: .*unexpected keyword 'layers'"):
        hvdc.Auto(net, mesh=mesh, layers={})
    compressor = hvdc.Auto(net, mesh=mesh)
    with pytest.raises(ValueError, match="which chooses among"):
        compressor.set_codec(OneBit())


@on_ranks(2, launcher="torchrun")
def test_one_replica_has_nothing_to_choose() -> None:
    assert "one rank" in _Job(replicas=1).compressor.explain()
