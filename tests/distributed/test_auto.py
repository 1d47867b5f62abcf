"""Auto of all_reduce: one plan for all keys, alike on every rank, and nothing lost by a change."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hvd_compress.distributed as hvdc
from hvd_compress.codecs import OneBit
from hvd_compress.planner.probing import Prober
from tests.ddp.probes import assert_equal_on_all_ranks
from tests.planner import process_groups
from tests.planner.process_groups import EXACT, Balance, Tensors, everywhere
from tests.ranks import on_ranks
from tests.torch_models import targets


class _Job(process_groups.Job):
    """A call for each group of keys."""

    def __init__(self, *calls: str, **options: Any) -> None:
        self.calls: Sequence[Sequence[str]] = [call.split() for call in calls or ["a b c small"]]
        self.compressor = hvdc.Auto(**{"threshold": 100, **options})

    def step(self, gradients: Mapping[str, torch.Tensor]) -> Tensors:
        tensors = {name: one.clone() for name, one in gradients.items()}
        works = [
            hvdc.all_reduce(
                [tensors[key] for key in keys], self.compressor, key=list(keys), async_op=True
            )
            for keys in self.calls
        ]
        for work in works[::-1]:
            assert work is not None
            work.wait()
        return {key: tensors[key] for keys in self.calls for key in keys}


SEVERAL = ("a", "b c", "small")


@on_ranks(2, launcher="torchrun")
def test_every_change_of_route_keeps_every_tensor() -> None:
    job = _Job(*SEVERAL, codecs=EXACT, exchanges=("allgather", "two_shot"))
    process_groups.every_change_of_route_keeps_every_gradient(job)


@on_ranks(2, launcher="torchrun")
def test_two_ranks_agree_on_every_plan() -> None:
    job = _Job(codecs=EXACT)
    process_groups.ranks_agree_on_every_plan(job)


@on_ranks(3, launcher="torchrun")
def test_three_ranks_with_several_calls_in_a_step_agree_on_every_plan() -> None:
    job = _Job(*SEVERAL, codecs=EXACT)
    process_groups.ranks_agree_on_every_plan(job)
    assert_equal_on_all_ranks(job.step(targets(job.shapes, dist.get_rank(), 1000)))


@on_ranks(2, launcher="torchrun")
def test_a_plan_is_saved() -> None:
    for calls in (("a b c small",), SEVERAL):
        process_groups.a_plan_is_saved(_Job(*calls, codecs=EXACT), _Job(*calls, codecs=EXACT))


@on_ranks(2, launcher="torchrun")
def test_a_step_ends_where_a_key_comes_again() -> None:
    """Whatever has been waited for by then; a new key has all keys planned anew, and loses nothing."""
    job = _Job("a", "b", codecs=EXACT, exchanges=("allgather",))
    assert not job.compressor.settled or "no tensors" in job.compressor.explain()
    balance, steps = Balance(job), []
    for number in range(6):
        balance.step(number)
        steps.append(job.compressor._planned.planner.step)
    assert steps == list(range(6))
    assert set(job.compressor._planned.own_choices) == {"a", "b"}
    job.calls = [*job.calls, ["c", "small"]]
    balance.step(6)
    assert (
        job.compressor._planned.planner.step == 0
        and job.compressor._planned.planner.measured is None
    )
    assert set(job.compressor._planned.own_choices) == {"a", "b", "c", "small"}
    for number in range(7, 12):
        balance.step(number)
    assert job.compressor._planned.planner.measured is not None
    process_groups.plans_nothing(job.compressor)
    balance.check(12)


@on_ranks(2, launcher="torchrun")
def test_calls_that_are_under_way_where_a_step_ends() -> None:
    """A key's next call may begin before the other keys' last ones have been waited for."""
    compressor, size = hvdc.Auto(codecs=EXACT, threshold=100), 300_000
    under_way: dict[str, tuple[hvdc.Work, torch.Tensor, torch.Tensor]] = {}
    due, sent = (dict.fromkeys("ab", torch.zeros(size)) for _ in range(2))
    measure, idle = Prober.measure, []

    def watched(self: Prober, *arguments: Any) -> list[float]:
        idle.append(all(work.is_completed() for work, *_ in under_way.values()))
        return measure(self, *arguments)

    def begin(key: str, number: int, scale: float) -> None:
        both = [targets({key: (size,)}, rank, number, scale)[key] for rank in range(2)]
        tensor = both[dist.get_rank()].clone()
        work = hvdc.all_reduce(tensor, compressor, key=key, async_op=True)
        assert work is not None
        under_way[key] = work, tensor, sum(both) / 2

    def end(key: str) -> None:
        work, tensor, mean = under_way.pop(key)
        work.wait()
        due[key], sent[key] = due[key] + mean, sent[key] + tensor

    with mock.patch.object(Prober, "measure", watched):
        for number in range(20):
            for key in "ab":
                if number:
                    end(key)
                begin(key, number, 1.0)
    for key in "ab":
        end(key)
    assert idle and all(idle)
    assert len(set(everywhere(compressor.explain()))) == 1
    process_groups.plans_nothing(compressor)
    compressor._planned.apply(tuple(tensor.choices[0] for tensor in compressor._planned.tensors))
    for key in "ab":
        begin(key, 20, 0.0)
        end(key)
        assert torch.allclose(sent[key], due[key], atol=1e-3), key


@on_ranks(2, launcher="torchrun")
def test_a_call_that_is_wrong_on_one_rank_while_the_others_measure() -> None:
    """An error on every rank, none of which waits for ever; and all go on."""
    rank, job = dist.get_rank(), _Job(codecs=EXACT)
    balance, keys = Balance(job), list(job.shapes)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"tensor": [torch.ones(3, dtype=torch.int32)] * 4, "key": keys}, "floating-point"),
        ({"tensor": [torch.ones(3)] * 4, "key": 3}, "expected a string, or one for each tensor"),
    ]
    for number in range(12):
        if number in (4, 8):
            assert job.compressor._planned.planner.due
            call, told = wrong.pop()
            if rank == 0:
                call = {"tensor": list(targets(job.shapes, rank, 0).values()), "key": keys}
            with pytest.raises((hvdc.ExchangeError, TypeError)[rank], match=told):
                hvdc.all_reduce(state=job.compressor, **call)
        balance.step(number)
    assert not wrong and len(set(everywhere(job.compressor.explain()))) == 1
    process_groups.plans_nothing(job.compressor)
    balance.check(12)


@on_ranks(2, launcher="torchrun")
def test_planners_that_are_at_different_steps() -> None:
    """As where one rank alone has loaded a state."""
    job = _Job(codecs=("fp16",), exchanges=("allgather",))
    for number in range(2):
        job.step(targets(job.shapes, dist.get_rank(), number))
    if dist.get_rank() == 1:
        job.compressor.load_state_dict(copy.deepcopy(job.compressor.state_dict()))
    with pytest.raises(
        hvdc.ExchangeError, match=r"planner: step 2, .* on rank 0, step 1, .*rank 1"
    ):
        job.step(targets(job.shapes, dist.get_rank(), 2))


@on_ranks(3, launcher="torchrun", alone=True)
def test_ranks_that_leave() -> None:
    """Those that stay plan anew, with what they had not sent."""
    rank, job = dist.get_rank(), _Job(codecs=EXACT)
    for number in range(3):
        job.step(targets(job.shapes, rank, number))
    group = dist.new_group([0, 1])
    if rank == 2:
        return
    kept = job.compressor.residual_norm()
    job.compressor.rebind(group)
    assert 0 < job.compressor.residual_norm() < kept
    assert not job.compressor.settled
    for number in range(3, 9):
        job.step(targets(job.shapes, rank, number))
    assert job.compressor._planned.planner._size == 2 and job.compressor._planned.planner.step == 5


@on_ranks(2, launcher="torchrun")
def test_copies() -> None:
    """They go on as the compressor itself would."""
    job = _Job(*SEVERAL, codecs=EXACT)
    for number in range(3):
        job.step(targets(job.shapes, dist.get_rank(), number))
    for copied in (copy.deepcopy(job.compressor), pickle.loads(pickle.dumps(job.compressor))):
        other = _Job(*SEVERAL)
        other.compressor = copied
        for number in range(3, 9):
            other.step(targets(job.shapes, dist.get_rank(), number))
        assert copied._planned.planner.measured is not None


@on_ranks(1, launcher="torchrun")
def test_what_auto_does_not_take() -> None:
    for option in ("exchange", "layers", "owner_step"):
        with pytest.raises(TypeError, match=rf"Auto: .*unexpected keyword '{option}'"):
            hvdc.Auto(**{option: None})
    with pytest.raises(TypeError, match=r"write all_reduce\(tensor, Auto\(\)\)"):
        hvdc.all_reduce(torch.zeros(3), hvdc.Auto)  # type: ignore[arg-type]
    compressor = hvdc.Auto()
    assert "nothing is planned yet" in compressor.explain() and not compressor.settled
    hvdc.all_reduce(torch.zeros(3000), compressor)
    with pytest.raises(ValueError, match="which chooses among"):
        compressor.set_codec(OneBit())
    assert compressor.settled and "one rank" in compressor.explain()
