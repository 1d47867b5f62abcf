"""Two shots through a stock DistributedDataParallel, against all ranks simulated by the oracle."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hvd_compress.ddp as hvdc
from hvd_compress.codecs import (
    BF16,
    ECQ,
    Codec,
    ErrorFeedback,
    Int8,
    NoCompression,
    OneBit,
    Ternary,
)
from hvd_compress.ddp.lane import Lane
from hvd_compress.exchange.shards import Shards
from tests.ddp.probes import Probe, assert_equal_on_all_ranks, distributed, exchange
from tests.ranks import on_ranks
from tests.torch.probes import TwoShotSimulation, assert_same_bits, targets

SHAPES = {"a": (40, 170), "b": (3000,), "c": (8, 3, 5, 5), "tiny": (3,), "scalar": ()}
"""7, 3 and 1 grains: uneven shards, ranks without a part, and tensors smaller than the number of ranks."""

NONE = ErrorFeedback(alpha=0.0)
ROWS: list[tuple[Codec, ErrorFeedback]] = [
    (OneBit(), ErrorFeedback()),
    (OneBit(), NONE),
    (Int8("linear"), ErrorFeedback(0.5, 0.75)),
    (Ternary(), NONE),
    (ECQ(), ErrorFeedback(0.01, 1.0)),
    (BF16(), NONE),
]


def _start(
    codec: Codec = OneBit(),  # noqa: B008
    feedback: ErrorFeedback = ErrorFeedback(),  # noqa: B008
    **options: Any,
) -> tuple[Any, hvdc.Compressor]:
    return distributed(Probe(SHAPES), codec, feedback, **{"exchange": "two_shot", **options})


def _simulation(
    codec: Codec = OneBit(),  # noqa: B008
    feedback: ErrorFeedback = ErrorFeedback(),  # noqa: B008
    seed: int = 0,
) -> TwoShotSimulation:
    return TwoShotSimulation(codec, feedback, SHAPES, dist.get_world_size(), seed=seed)


def _gradients(step: int) -> list[dict[str, torch.Tensor]]:
    return [targets(SHAPES, r, step) for r in range(dist.get_world_size())]


def _residuals(compressor: hvdc.Compressor) -> dict[str, torch.Tensor]:
    """Of both shots."""
    kept = {}
    for name, tensor in compressor.state_dict()["tensors"].items():
        kept[name] = tensor["residual"].clone()
        kept[f"{name}, owned"] = tensor["owned"]["residual"].clone()
    return kept


def _every_codec_matches_the_simulation() -> None:
    rank = dist.get_rank()
    for codec, feedback in ROWS:
        ddp, compressor = _start(codec, feedback, seed=7)
        simulation = _simulation(codec, feedback, seed=7)
        for step in range(3):
            gradients = _gradients(step)
            got = exchange(ddp, gradients[rank])
            assert_same_bits(got, simulation.average(gradients))
            assert_equal_on_all_ranks(got)
        if feedback.enabled:
            expected = {}
            for name in SHAPES:
                expected[name] = torch.from_numpy(simulation.residuals[rank][name])
                part = simulation.owned[name][simulation.shard(name, rank)]
                expected[f"{name}, owned"] = torch.from_numpy(part)
            assert_same_bits(_residuals(compressor), expected)


@on_ranks(2, launcher="torchrun")
def test_every_codec_on_two_ranks() -> None:
    _every_codec_matches_the_simulation()


@on_ranks(3, launcher="torchrun")
def test_every_codec_on_three_ranks() -> None:
    _every_codec_matches_the_simulation()


@on_ranks(2, launcher="torchrun")
def test_forms_of_ddp() -> None:
    forms: tuple[dict[str, Any], ...] = (
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"bucket_cap_mb": 25},
        {"bucket_cap_mb": 1e-6},
    )
    for form in forms:
        ddp, _ = _start(**form)
        simulation = _simulation()
        for step in range(4):
            gradients = _gradients(step)
            got = exchange(ddp, gradients[dist.get_rank()])
            assert_same_bits(got, simulation.average(gradients))


@on_ranks(3, launcher="torchrun")
def test_a_process_group_of_some_ranks() -> None:
    group = dist.new_group([0, 2])
    if dist.get_rank() != 1:
        ddp, _ = _start(process_group=group)
        simulation = TwoShotSimulation(OneBit(), ErrorFeedback(), SHAPES, 2)
        for step in range(3):
            gradients = [targets(SHAPES, r, step) for r in (0, 2)]
            got = exchange(ddp, gradients[dist.get_rank(group)])
            assert_same_bits(got, simulation.average(gradients))


@on_ranks(2, launcher="torchrun")
def test_parameters_that_are_not_used() -> None:
    """By one rank: it sends its residual. By none: both residuals stay what they were."""
    for view in (False, True):
        ddp, compressor = _start(find_unused_parameters=True, gradient_as_bucket_view=view)
        simulation = _simulation()
        rank = dist.get_rank()
        for step in range(3):
            gradients = _gradients(step)
            absent = [{"a"}, {"b", "c"}]
            for r in range(2):
                for name in absent[(r + step) % 2]:
                    gradients[r][name].zero_()
            used = [name for name in SHAPES if name not in absent[(rank + step) % 2]]
            got = exchange(ddp, gradients[rank], used)
            assert_same_bits(got, simulation.average(gradients))
        before = _residuals(compressor)
        exchange(ddp, targets(SHAPES, rank, 3), [name for name in SHAPES if name != "b"])
        after = _residuals(compressor)
        for name in ("b", "b, owned"):
            assert torch.equal(after[name], before[name]), name
        assert not torch.equal(after["a"], before["a"])


@on_ranks(2, launcher="torchrun")
def test_a_nonfinite_gradient_on_one_rank() -> None:
    for view in (False, True):
        for bad in (math.inf, math.nan):
            ddp, compressor = _start(gradient_as_bucket_view=view)
            rank = dist.get_rank()
            for step in range(2):
                exchange(ddp, targets(SHAPES, rank, step))
            before = _residuals(compressor)
            gradients = targets(SHAPES, rank, 2)
            if rank == 1:
                gradients["a"][17, 3] = bad
            got = exchange(ddp, gradients)
            assert not torch.isfinite(got["a"][17, 3])
            for name, kept in _residuals(compressor).items():
                largest = before[name].abs().max() if before[name].numel() else torch.zeros(())
                assert torch.isfinite(kept).all()
                error = (kept - before[name]).abs()
                assert (error <= 1e-5 * (largest + 5)).all(), (view, bad, name)
            got = exchange(ddp, targets(SHAPES, rank, 3))
            assert all(torch.isfinite(g).all() for g in got.values())


@on_ranks(2, launcher="torchrun")
def test_a_change_of_codec_and_a_checkpoint_lose_no_mass() -> None:
    ddp, compressor = _start()
    total = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    sent = copy.deepcopy(total)
    changes: dict[int, Codec] = {2: ECQ(), 4: OneBit(512), 6: NoCompression()}
    for step in range(8):
        if step in changes:
            compressor.set_codec(changes[step])
        if step == 3:
            state = copy.deepcopy(compressor.state_dict())
            ddp, compressor = _start(ECQ(), ErrorFeedback(0.01, 1.0))
            compressor.load_state_dict(state)
        gradients = _gradients(step)
        got = exchange(ddp, gradients[dist.get_rank()])
        for name in SHAPES:
            total[name] += sum(g[name] for g in gradients) / 2
            sent[name] += got[name]
    assert compressor.residual_norm() == 0
    for name in SHAPES:
        assert torch.allclose(sent[name], total[name], atol=1e-4), name


@on_ranks(3, launcher="torchrun")
def test_counters_follow_the_formulas() -> None:
    ddp, compressor = _start(bucket_cap_mb=25)
    for step in range(2):
        exchange(ddp, targets(SHAPES, dist.get_rank(), step))
    size, rank = dist.get_world_size(), dist.get_rank()
    sizes = [
        sum(parts)
        for parts in zip(
            *(
                Shards(math.prod(shape), size, index).payload_bytes(OneBit())
                for index, shape in enumerate(SHAPES.values())
            ),
            strict=True,
        )
    ]
    second = max(sizes) + 16  # One bucket: five bytes of flags, padded.
    counters = compressor.counters
    assert counters.message_bytes == 2 * (sum(sizes) + second)
    assert counters.wire_bytes == 2 * (sum(sizes) - sizes[rank] + (size - 1) * second)
    assert counters.encoded_elements == 2 * sum(map(math.prod, SHAPES.values()))


@on_ranks(2, launcher="torchrun")
def test_uneven_inputs() -> None:
    """A rank that has joined goes on as an owner."""
    ddp, compressor = _start()
    simulation = _simulation()
    rank = dist.get_rank()
    steps = 2 if rank == 0 else 4
    with ddp.join():
        for step in range(steps):
            gradients = _gradients(step)
            if step >= 2:
                for name in SHAPES:
                    gradients[0][name].zero_()
            ddp.zero_grad()
            ddp(gradients[rank]).backward()
            if rank == 1:
                got = {n: p.grad.clone() for n, p in ddp.module.named_parameters()}
                assert_same_bits(got, simulation.average(gradients))
    assert compressor.counters.steps == 4


@on_ranks(2, launcher="torchrun", alone=True)
def test_an_owner_that_fails() -> None:
    ddp, compressor = _start()
    exchange(ddp, targets(SHAPES, dist.get_rank(), 0))
    error: tuple[type[Exception], str] = (
        hvdc.ExchangeError,
        "a: expected an average from every rank, got none from rank 1",
    )
    if dist.get_rank() == 1:
        error = (ArithmeticError, "on purpose")
        decode = compressor._kernels.decode_sum

        def failing(
            codec: Codec, shape: tuple[int, ...], payloads: Any, *rest: Any, **named: Any
        ) -> None:
            owned = (Shards(40 * 170, 2, 0).length(1),)
            if shape == owned and len(payloads) == dist.get_world_size():  # As an owner.
                raise ArithmeticError("on purpose")
            decode(codec, shape, payloads, *rest, **named)

        compressor._kernels.decode_sum = failing  # type: ignore[method-assign]
    with pytest.raises(error[0], match=error[1]):
        exchange(ddp, targets(SHAPES, dist.get_rank(), 1))


@on_ranks(2, launcher="torchrun", alone=True)
def test_another_exchange_on_one_rank() -> None:
    ddp, _ = _start(exchange=("two_shot", "allgather")[dist.get_rank()])
    message = r"(?s)of a: .* through two_shot.* on rank 0, .* through allgather.* on rank 1"
    with pytest.raises(hvdc.ExchangeError, match=message):
        exchange(ddp, targets(SHAPES, dist.get_rank(), 0))


@on_ranks(2, launcher="torchrun")
def test_wrong_arguments_fail_at_construction() -> None:
    parameters = list(Probe(SHAPES).named_parameters())
    with pytest.raises(ValueError, match=r"exchange: expected one of 'allgather', 'two_shot', 'hi"):
        hvdc.OneBit(parameters, exchange="mail")
    with pytest.raises(ValueError, match="expected a codec of contiguous groups"):
        hvdc.OneBit(parameters, group="column", exchange="two_shot")


def test_turns_are_kept_whoever_comes_first() -> None:
    lane = Lane("the group")  # type: ignore[arg-type]
    turns = [lane.take_a_turn() for _ in range(4)]
    begun: list[tuple[int, object]] = []

    def begin(turn: int) -> Any:
        def call(group: object) -> None:
            begun.append((turn, group))
            if turn == 1:
                lane.start(3, begin(3))  # As where a collective is over at once.

        return call

    lane.start(turns[2], begin(2))
    lane.start(turns[1], begin(1))
    assert not begun
    lane.start(turns[0], begin(0))
    assert begun == [(turn, "the group") for turn in range(4)]
