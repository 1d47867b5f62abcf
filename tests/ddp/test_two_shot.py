"""Two shots through a stock DistributedDataParallel, against all ranks simulated by the oracle."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
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
from tests.ddp import ways
from tests.ddp.probes import Probe, exchange
from tests.ddp.ways import NONE, SHAPES, Way
from tests.ranks import on_ranks
from tests.torch.probes import TwoShotSimulation, targets

ROWS: list[tuple[Codec, ErrorFeedback]] = [
    (OneBit(), ErrorFeedback()),
    (OneBit(), NONE),
    (Int8("linear"), ErrorFeedback(0.5, 0.75)),
    (Ternary(), NONE),
    (ECQ(), ErrorFeedback(0.01, 1.0)),
    (BF16(), NONE),
]


def _simulate(codec: Codec, feedback: ErrorFeedback, ranks: int, seed: int) -> TwoShotSimulation:
    return TwoShotSimulation(codec, feedback, SHAPES, ranks, seed=seed)


def _of_both_shots(simulation: TwoShotSimulation) -> dict[str, np.ndarray]:
    rank = dist.get_rank()
    owned = {f"{n}, owned": simulation.owned[n][simulation.shard(n, rank)] for n in SHAPES}
    return simulation.residuals[rank] | owned


WAY = Way("two_shot", OneBit(), ErrorFeedback(), _simulate, _of_both_shots)


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
def test_parameters_that_are_not_used() -> None:
    ways.parameters_that_are_not_used(WAY, [{"a"}, {"b", "c"}])


@on_ranks(2, launcher="torchrun")
def test_a_nonfinite_gradient_on_one_rank() -> None:
    for view in (False, True):
        for bad in (math.inf, math.nan):
            ddp, compressor = WAY.start(gradient_as_bucket_view=view)
            rank = dist.get_rank()
            for step in range(2):
                exchange(ddp, targets(SHAPES, rank, step))
            before = WAY.residuals(compressor)
            gradients = targets(SHAPES, rank, 2)
            if rank == 1:
                gradients["a"][17, 3] = bad
            got = exchange(ddp, gradients)
            assert not torch.isfinite(got["a"][17, 3])
            for name, kept in WAY.residuals(compressor).items():
                largest = before[name].abs().max() if before[name].numel() else torch.zeros(())
                assert torch.isfinite(kept).all()
                error = (kept - before[name]).abs()
                assert (error <= 1e-5 * (largest + 5)).all(), (view, bad, name)
            got = exchange(ddp, targets(SHAPES, rank, 3))
            assert all(torch.isfinite(g).all() for g in got.values())


@on_ranks(2, launcher="torchrun")
def test_a_change_of_codec_and_a_checkpoint_lose_no_mass() -> None:
    ddp, compressor = WAY.start()
    total = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    sent = copy.deepcopy(total)
    changes: dict[int, Codec] = {2: ECQ(), 4: OneBit(512), 6: NoCompression()}
    for step in range(8):
        if step in changes:
            compressor.set_codec(changes[step])
        if step == 3:
            state = copy.deepcopy(compressor.state_dict())
            ddp, compressor = WAY.start(ECQ(), ErrorFeedback(0.01, 1.0))
            compressor.load_state_dict(state)
        gradients = WAY.gradients(step)
        got = exchange(ddp, gradients[dist.get_rank()])
        for name in SHAPES:
            total[name] += sum(g[name] for g in gradients) / 2
            sent[name] += got[name]
    assert compressor.residual_norm() == 0
    for name in SHAPES:
        assert torch.allclose(sent[name], total[name], atol=1e-4), name


@on_ranks(3, launcher="torchrun")
def test_counters_follow_the_formulas() -> None:
    ddp, compressor = WAY.start(bucket_cap_mb=25)
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
    ways.uneven_inputs(WAY, [2, 4])


@on_ranks(2, launcher="torchrun", alone=True)
def test_an_owner_that_fails() -> None:
    ddp, compressor = WAY.start()
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
    ddp, _ = WAY.start(exchange=("two_shot", "allgather")[dist.get_rank()])
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
