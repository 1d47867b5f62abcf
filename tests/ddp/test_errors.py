"""Ranks that differ, models that cannot work: an error that says so, and no hang."""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hvd_compress.ddp as hvdc
import hvd_compress.distributed as of_all_reduce
from hvd_compress.codecs import ErrorFeedback, Int8, OneBit, Ternary
from hvd_compress.engine.run import Run
from hvd_compress.exchanges.routing import Route
from hvd_compress.process_group.agreement import Agreement
from hvd_compress.process_group.collectives import Collectives
from tests import jobs
from tests.ddp.probes import Probe, assert_equal_on_all_ranks, distributed, exchange
from tests.ranks import on_ranks
from tests.torch_models import elsewhere, targets

SHAPES = {"a": (40, 70), "b": (3000,), "small": (10,)}


def _raises_in_first_step(
    make: Callable[[DistributedDataParallel], hvdc.Compressor], message: str
) -> None:
    ddp = DistributedDataParallel(Probe(SHAPES))
    ddp.register_comm_hook(make(ddp), hvdc.hook)
    with pytest.raises(hvdc.ExchangeError, match=message):
        exchange(ddp, targets(SHAPES, dist.get_rank(), 0))
    # After a difference between the ranks, all of them are still there and in step.
    dist.barrier()


@on_ranks(2, launcher="torchrun")
def test_a_rank_that_forgot_its_state_or_its_warmup() -> None:
    for warmup, message in (
        (0, r"step 3 on rank 0, .*step 0 on rank 1"),
        (4, r"3 of 4 warm-up steps.* on rank 0, .*0 of 4 warm-up .* on rank 1"),
    ):
        options = {"threshold": 0, "warmup_steps": warmup}
        ddp, compressor = distributed(Probe(SHAPES), OneBit(), ErrorFeedback(), **options)
        for step in range(3):
            exchange(ddp, targets(SHAPES, dist.get_rank(), step))

        def resumed(
            ddp: DistributedDataParallel,
            state: dict[str, Any] = compressor.state_dict(),  # noqa: B008
            options: dict[str, Any] = options,
        ) -> hvdc.Compressor:
            made = hvdc.Compressor(ddp, OneBit(), **options)
            if dist.get_rank() == 0:
                made.load_state_dict(state)
            return made

        _raises_in_first_step(resumed, message)


def _without_a_state(average: torch.Tensor, state: dict[str, object]) -> None:
    average.mul_(2)


@on_ranks(2, launcher="torchrun")
def test_an_exchange_without_the_owner_step_for_some_gradients() -> None:
    options = {"exchange": "two_shot", "owner_step": hvdc.AdaGrad(), "threshold": 0}
    gathered = Route(Int8(), exchange="allgather")
    message = "a.owner_step: expected exchange='two_shot', whose ranks own parts, got 'allgather'"
    with pytest.raises(ValueError, match=message):
        distributed(Probe(SHAPES), Int8(), ErrorFeedback(), layers={"a": gathered}, **options)
    with pytest.raises(TypeError, match="owner_step: expected a callable, got 3"):
        distributed(Probe(SHAPES), Int8(), ErrorFeedback(), **{**options, "owner_step": 3})
    for bad in ({"epsilon": 0.0}, {"initial": -1.0}):
        with pytest.raises(ValueError, match="AdaGrad"):
            hvdc.AdaGrad(**bad)
    ddp, compressor = distributed(Probe(SHAPES), Int8(), ErrorFeedback(), **options)
    exchange(ddp, targets(SHAPES, dist.get_rank(), 0))
    with pytest.raises(ValueError, match=message):
        compressor.set_codec(gathered, layers="a")
    with pytest.warns(UserWarning, match="b: owner_step no longer steps it"):
        compressor.set_codec(None, layers="b")
    exchange(ddp, targets(SHAPES, dist.get_rank(), 1))


@on_ranks(2, launcher="torchrun")
def test_a_codec_that_is_changed_in_the_cold_start_of_an_owner_step() -> None:
    """Also to one that divides gradients in another way among their owners."""
    for layers, other in ((None, OneBit("column")), ({"b": None}, OneBit())):
        ddp, compressor = distributed(
            Probe(SHAPES),
            Int8(),
            ErrorFeedback(),
            exchange="two_shot",
            owner_step=_without_a_state,
            warmup_steps=3,
            layers=layers,
        )
        mine = [targets(SHAPES, dist.get_rank(), step) for step in range(5)]
        compressor.set_codec(OneBit("row"), layers="a")
        compressor.set_codec(Int8(), layers="a")
        for step, codec in enumerate((None, other, Int8("linear"), other)):
            if codec is not None:
                compressor.set_codec(codec)
            got = exchange(ddp, mine[step])
            if step < 3:
                both = [targets(SHAPES, rank, step) for rank in range(2)]
                assert torch.equal(got["a"], both[0]["a"] + both[1]["a"])
        assert_equal_on_all_ranks(exchange(ddp, mine[4]))


@on_ranks(2, launcher="torchrun")
def test_parameters_of_another_model() -> None:
    ddp = DistributedDataParallel(Probe(SHAPES))
    ddp.register_comm_hook(hvdc.Compressor(Probe(SHAPES), OneBit()), hvdc.hook)
    with pytest.raises(hvdc.ExchangeError, match="expected the parameters that this compressor"):
        exchange(ddp, targets(SHAPES, dist.get_rank(), 0))


class _Broken(torch.autograd.Function):
    @staticmethod
    def forward(context: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: object, gradient: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("broken")


@on_ranks(2, launcher="torchrun")
def test_a_backward_pass_that_breaks_off() -> None:
    """The payloads of its first buckets are lost, and the next pass must say so."""
    ddp, compressor = distributed(
        torch.nn.Sequential(torch.nn.Linear(50, 50), torch.nn.Linear(50, 50)),
        OneBit(),
        ErrorFeedback(),
        bucket_cap_mb=0.001,
    )
    for _ in range(2):
        ddp(torch.ones(3, 50)).sum().backward()
    saved = copy.deepcopy(compressor.state_dict())
    first, second = ddp.module
    ddp.module.forward = lambda x: second(_Broken.apply(first(x)))
    with pytest.raises(ArithmeticError, match="broken"):
        ddp(torch.ones(3, 50)).sum().backward()
    for call in (
        lambda: compressor.set_codec(Int8()),
        compressor.state_dict,
        compressor.reset,
        lambda: compressor.load_state_dict(saved),
        lambda: compressor.load_resized([saved, {**saved, "rank": 1}]),
    ):
        with pytest.raises(hvdc.ExchangeError, match="expected no exchange in progress"):
            call()
    model = ddp.module
    del model.forward, ddp
    gc.collect()  # The old DDP's hooks go with it.
    again = DistributedDataParallel(model)
    again.register_comm_hook(compressor, hvdc.hook)
    with pytest.raises(hvdc.ExchangeError, match="expected the last backward pass to have come"):
        again(torch.ones(3, 50)).sum().backward()


@on_ranks(2, launcher="torchrun", alone=True)
def test_an_altered_payload() -> None:
    ddp, _ = distributed(Probe(SHAPES), OneBit(), ErrorFeedback(), threshold=100)
    exchange(ddp, targets(SHAPES, dist.get_rank(), 0))
    resume = Run.resume

    def flip_a_bit(run: Run, result: torch.Tensor) -> None:
        assert run.request is not None
        if run.request.kind == "all_gather":
            result[1, 100].bitwise_xor_(16)
        resume(run, result)

    Run.resume = flip_a_bit
    with pytest.raises(hvdc.PayloadError, match=r"\w: rank 1's payload: expected checksum"):
        exchange(ddp, targets(SHAPES, dist.get_rank(), 1))


@on_ranks(2, launcher="torchrun", alone=True)
def test_a_rank_that_is_gone() -> None:
    ddp, _ = distributed(Probe(SHAPES), OneBit(), ErrorFeedback())
    exchange(ddp, targets(SHAPES, dist.get_rank(), 0))
    dist.barrier()
    if dist.get_rank() == 1:
        raise jobs.Leave
    with pytest.raises(RuntimeError, match=r"(?i)connection|closed|reset|broken pipe"):
        for step in range(1, 100):
            exchange(ddp, targets(SHAPES, 0, step))


@on_ranks(1, launcher="torchrun")
def test_wrong_arguments_fail_at_construction() -> None:
    ddp = DistributedDataParallel(Probe(SHAPES))
    skipping = DistributedDataParallel(
        Probe(SHAPES), find_unused_parameters=True, skip_all_reduce_unused_params=True
    )
    apart = [("a", torch.nn.Parameter(torch.zeros(5000))), ("b", elsewhere((5000,)))]
    wrong: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (TypeError, "expected pairs", lambda: hvdc.Compressor(ddp.module.a, OneBit())),
        (ValueError, "got none", lambda: hvdc.Compressor(iter(()), OneBit())),
        # Names are those of the module in it.
        (
            ValueError,
            "matches a parameter",
            lambda: hvdc.Compressor(ddp, OneBit(), exclude=["module.a"]),
        ),
        (
            ValueError,
            "expected skip_all_reduce_unused_params=False",
            lambda: hvdc.Compressor(skipping, OneBit()),
        ),
        (TypeError, "GradScaler", lambda: hvdc.Compressor(ddp, OneBit(), grad_scaler=2.0)),
        (ValueError, "expected one of", lambda: hvdc.Compressor(ddp, "zip")),
        (
            TypeError,
            r"load_state_dict: expected what state_dict\(\) returned, got None",
            lambda: hvdc.Compressor(ddp, OneBit()).load_state_dict(None),
        ),
        (
            TypeError,
            r"another package, hvd_compress.distributed.*write .*\(hvd_compress.ddp.Compressor\(",
            lambda: hvdc.hook(of_all_reduce.Compressor(Int8()), None),
        ),
        (
            ValueError,
            "a: expected a parameter in the memory of cuda:0, as another's, got one on cpu",
            lambda: hvdc.Compressor(apart, OneBit()),
        ),
        (
            ValueError,
            r"b: .* the CPU for Ternary\(.*, got one on cuda:0: .*write coding='plain'",
            lambda: hvdc.Compressor(apart[1:], Ternary(coding="entropy")),
        ),
        (
            ValueError,
            r"weight: expected a parameter with memory, .* call model\.to_empty\(\)",
            lambda: hvdc.Compressor(torch.nn.Linear(9, 9, device="meta"), OneBit()),
        ),
    ]
    for error, message, call in wrong:
        with pytest.raises(error, match=message):
            call()
    hvdc.Compressor(apart, OneBit(), exclude=["a"])
    hvdc.Compressor(ddp, OneBit(), exclude=["a"], layers={"b": "int8"})


def test_the_use_of_a_compressor_needs_a_process_group() -> None:
    for compressor in (hvdc.Compressor(Probe(SHAPES), OneBit()), hvdc.Auto(Probe(SHAPES))):
        for use in (compressor.routes, compressor.state_dict):
            with pytest.raises(hvdc.ExchangeError, match=re.escape("init_process_group() before")):
                use()


@on_ranks(2, launcher="torchrun")
def test_a_length_of_settings_that_cannot_be_true() -> None:
    """No rank takes memory for it."""
    ranks = Collectives(None)
    if dist.get_rank() == 0:
        compared = Agreement(ranks, {"seed": 1})
        with pytest.raises(hvdc.ExchangeError, match="expected messages of at most"):
            compared.settle()
    else:
        claimed = (1 << 62).to_bytes(8, "little") + bytes(40)
        ranks.all_gather(torch.tensor(list(claimed), dtype=torch.uint8))[1].wait()
