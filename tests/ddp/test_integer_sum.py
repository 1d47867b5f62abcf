"""Integer sums through a stock DistributedDataParallel, against all ranks simulated by the oracle."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import hvd_compress.ddp as hvdc
from hvd_compress.codecs import (
    ECQ,
    Codec,
    ErrorFeedback,
    LevelCodec,
    NoCompression,
    OneBit,
    Ternary,
)
from tests.ddp import ways
from tests.ddp.probes import assert_equal_on_all_ranks, exchange
from tests.ddp.ways import NONE, SHAPES, Way
from tests.ranks import on_ranks
from tests.torch.probes import IntegerSumSimulation, assert_same_bits, targets

WEAK = ErrorFeedback(0.01, 1.0)
ROWS: list[tuple[Codec, ErrorFeedback]] = [
    (Ternary(), NONE),
    (Ternary(bucket="tensor", clip=None), NONE),
    (Ternary(64), ErrorFeedback(0.1, 0.9)),
    (ECQ(), WEAK),
    (ECQ(2, "linf", "tensor"), NONE),
    (ECQ(100, "l2", 128), ErrorFeedback()),
]


def _simulate(codec: Codec, feedback: ErrorFeedback, ranks: int, seed: int) -> IntegerSumSimulation:
    assert isinstance(codec, LevelCodec)
    return IntegerSumSimulation(codec, feedback, SHAPES, ranks, seed)


def _sent(simulation: IntegerSumSimulation) -> dict[str, np.ndarray]:
    return simulation.residuals[dist.get_rank()]


# The scales of some ranks are far above those of the others, in some steps.
WAY = Way("integer_sum", ECQ(), WEAK, _simulate, _sent, spread=lambda step: 10.0**step)


@on_ranks(2, launcher="torchrun")
def test_every_codec_on_two_ranks() -> None:
    ways.every_codec(WAY, ROWS)


@on_ranks(3, launcher="torchrun")
def test_every_codec_on_three_ranks() -> None:
    ways.every_codec(WAY, ROWS)


@on_ranks(2, launcher="torchrun")
def test_forms_of_ddp() -> None:
    ways.forms_of_ddp(WAY, {"find_unused_parameters": True})


@on_ranks(2, launcher="torchrun")
def test_memory_in_another_order_and_half_precision() -> None:
    ways.memory_in_another_order_and_half_precision(WAY)


@on_ranks(3, launcher="torchrun")
def test_a_process_group_of_some_ranks() -> None:
    ways.a_process_group_of_some_ranks(WAY)


@on_ranks(2, launcher="torchrun")
def test_encoded_and_dense_tensors_in_one_bucket() -> None:
    ddp, compressor = WAY.start(layers={"b": None, "c": Ternary()}, threshold=4, bucket_cap_mb=25)
    routes = compressor.routes()
    assert routes["b"].dense and routes["tiny"].dense and not routes["c"].dense
    simulation = WAY.simulation()
    ternary = IntegerSumSimulation(Ternary(), NONE, SHAPES, 2)
    for step in range(3):
        gradients = WAY.gradients(step)
        expected = simulation.average(gradients)
        expected["c"] = ternary.average(gradients)["c"]
        for name in ("b", "tiny", "scalar"):
            expected[name] = gradients[0][name] / 2 + gradients[1][name] / 2
        assert_same_bits(exchange(ddp, gradients[dist.get_rank()]), expected)


@on_ranks(2, launcher="torchrun")
def test_parameters_that_are_not_used() -> None:
    ways.parameters_that_are_not_used(WAY, [{"a"}, {"b", "c"}])


@on_ranks(2, launcher="torchrun")
def test_a_nonfinite_gradient_on_one_rank() -> None:
    """In the first bucket or in the last one: residuals of all of them are taken back."""
    for codec, feedback in ((Ternary(64), ErrorFeedback(0.1, 0.9)), (ECQ(), WEAK)):
        for view, bad, where in (
            (False, math.inf, "a"),
            (True, -math.inf, "a"),
            (False, math.nan, "c"),
            (True, math.nan, "a"),
        ):
            ddp, compressor = WAY.start(codec, feedback, gradient_as_bucket_view=view)
            rank = dist.get_rank()
            for step in range(2):
                exchange(ddp, targets(SHAPES, rank, step))
            before = WAY.residuals(compressor)
            gradients = targets(SHAPES, rank, 2)
            if rank == 1:
                gradients[where].view(-1)[17] = bad
            got = exchange(ddp, gradients)
            assert torch.isnan(got[where].view(-1)[17])
            assert torch.isfinite(got["b"]).all()
            for name, kept in WAY.residuals(compressor).items():
                largest = before[name].abs().max() + gradients[name].nan_to_num(0, 0, 0).abs().max()
                error = (kept - before[name]).abs().max()
                assert error <= 2e-6 * largest, (codec, view, bad, name)
            got = exchange(ddp, targets(SHAPES, rank, 3))
            assert all(torch.isfinite(g).all() for g in got.values())
            assert_equal_on_all_ranks(got)


@on_ranks(2, launcher="torchrun")
def test_a_change_of_codec_and_a_checkpoint_lose_no_mass() -> None:
    """From two shots, by way of the state, to integer sums, and from there to no compression."""
    ddp, compressor = WAY.start(exchange="two_shot")
    total = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    sent = copy.deepcopy(total)
    changes: dict[int, Codec] = {4: ECQ(8, "linf"), 6: ECQ(100, "l2", 128), 8: NoCompression()}
    for step in range(9):
        if step in changes:
            compressor.set_codec(changes[step])
        if step in (2, 5):
            state = copy.deepcopy(compressor.state_dict())
            ddp, compressor = WAY.start(ECQ(8, "linf") if step == 5 else ECQ())
            compressor.load_state_dict(state)
        gradients = [targets(SHAPES, r, step) for r in range(2)]
        got = exchange(ddp, gradients[dist.get_rank()])
        for name in SHAPES:
            total[name] += sum(g[name] for g in gradients) / 2
            sent[name] += got[name]
    assert compressor.residual_norm() == 0
    for name in SHAPES:
        assert torch.allclose(sent[name], total[name], atol=1e-3), name


@on_ranks(3, launcher="torchrun")
def test_counters_follow_the_formulas() -> None:
    ddp, compressor = WAY.start(Ternary(512), NONE, bucket_cap_mb=25)
    for step in range(2):
        exchange(ddp, targets(SHAPES, dist.get_rank(), step))
    message = 0
    for shape in SHAPES.values():
        count = math.prod(shape)
        blocks, rest = divmod(count, 512)
        # Sums of three ranks are from -3 to 3: three bits, ten lanes a word.
        words = blocks * math.ceil(512 / 10) + math.ceil(rest / 10)
        message += 4 * (math.ceil(count / 512) + 1) + 4 * (words + 1)
    counters = compressor.counters
    assert counters.message_bytes == 2 * message
    assert math.isclose(counters.wire_bytes, 2 * 2 * 2 / 3 * message)
    assert counters.encoded_elements == 2 * sum(map(math.prod, SHAPES.values()))
    assert counters.encode_seconds > 0 and counters.decode_seconds > 0


@on_ranks(3, launcher="torchrun")
def test_uneven_inputs() -> None:
    ways.uneven_inputs(WAY, [4, 0, 2])


def _a_rank_that_fails(method: str) -> None:
    """On one rank, for one tensor: an error on every rank, that names it."""
    ddp, compressor = WAY.start()
    exchange(ddp, targets(SHAPES, dist.get_rank(), 0))
    error: tuple[type[Exception], str] = (
        hvdc.ExchangeError,
        "b: expected the levels of all 3 ranks, got those of 2; the own errors",
    )
    if dist.get_rank() == 1:
        error = (ArithmeticError, "on purpose")
        kernels = compressor._way.kernels  # type: ignore[attr-defined]
        stock: Callable[..., None] = getattr(kernels, method)

        def failing(codec: Any, shape: tuple[int, ...], *arguments: Any, **named: Any) -> None:
            if shape == SHAPES["b"]:
                raise ArithmeticError("on purpose")
            stock(codec, shape, *arguments, **named)

        setattr(kernels, method, failing)
    with pytest.raises(error[0], match=error[1]):
        exchange(ddp, targets(SHAPES, dist.get_rank(), 1))
    dist.barrier()  # All of them are still there.


@on_ranks(3, launcher="torchrun")
def test_a_rank_that_fails_between_the_sums() -> None:
    _a_rank_that_fails("encode")


@on_ranks(3, launcher="torchrun")
def test_a_rank_that_fails_before_the_sums() -> None:
    _a_rank_that_fails("norms")


@on_ranks(2, launcher="torchrun")
def test_another_exchange_on_one_rank() -> None:
    ddp, _ = WAY.start(exchange=("integer_sum", "two_shot")[dist.get_rank()])
    message = r"(?s)of a: .* through integer_sum.* on rank 0, .* through two_shot.* on rank 1"
    with pytest.raises(hvdc.ExchangeError, match=message):
        exchange(ddp, targets(SHAPES, dist.get_rank(), 0))


@on_ranks(2, launcher="torchrun")
def test_wrong_codecs_fail_at_construction() -> None:
    with pytest.raises(ValueError, match="a: expected a codec of evenly spaced levels around 0"):
        WAY.start(OneBit(), ErrorFeedback())
    with pytest.raises(ValueError, match="b: expected a codec of evenly spaced levels around 0"):
        WAY.start(layers={"b": "int8"})
    _, compressor = WAY.start()
    with pytest.raises(ValueError, match="expected a codec of evenly spaced levels"):
        compressor.set_codec(OneBit())
