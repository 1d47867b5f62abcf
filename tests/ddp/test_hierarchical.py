"""The hierarchical exchange through a stock DistributedDataParallel, against the oracle's simulation."""

from __future__ import annotations

import copy
import math
import os
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
from hvd_compress.ddp.collectives import Collectives
from hvd_compress.exchange.shards import Shards
from tests.ddp.probes import Probe, assert_equal_on_all_ranks, distributed, exchange
from tests.ranks import on_ranks
from tests.torch.probes import HierarchicalSimulation, assert_same_bits, targets

SHAPES = {"a": (40, 170), "b": (3000,), "c": (8, 3, 5, 5), "tiny": (3,), "scalar": ()}
NONE = ErrorFeedback(alpha=0.0)
ROWS: list[tuple[Codec, ErrorFeedback]] = [
    (OneBit(), ErrorFeedback()),
    (OneBit("tensor"), ErrorFeedback(0.5, 0.75)),
    (Int8("linear"), ErrorFeedback()),
    (Ternary(), NONE),
    (ECQ(), ErrorFeedback(0.01, 1.0)),
    (BF16(), NONE),
]


def _start(
    codec: Codec = OneBit(),  # noqa: B008
    feedback: ErrorFeedback = ErrorFeedback(),  # noqa: B008
    **options: Any,
) -> tuple[Any, hvdc.Compressor]:
    return distributed(Probe(SHAPES), codec, feedback, **{"exchange": "hierarchical", **options})


def _gradients(step: int) -> list[dict[str, torch.Tensor]]:
    return [targets(SHAPES, r, step) for r in range(dist.get_world_size())]


def _local() -> int:
    return int(os.environ["LOCAL_WORLD_SIZE"])


def _simulation(
    codec: Codec = OneBit(),  # noqa: B008
    feedback: ErrorFeedback = ErrorFeedback(),  # noqa: B008
    seed: int = 0,
) -> HierarchicalSimulation:
    return HierarchicalSimulation(codec, feedback, SHAPES, dist.get_world_size(), _local(), seed)


def _residuals(compressor: hvdc.Compressor) -> dict[str, torch.Tensor]:
    tensors = compressor.state_dict()["tensors"]
    assert all(tensor["residual"] is None for tensor in tensors.values())
    return {name: tensor["owned"]["residual"].clone() for name, tensor in tensors.items()}


def _assert_residuals(compressor: hvdc.Compressor, simulation: HierarchicalSimulation) -> None:
    host, place = divmod(dist.get_rank(), _local())
    parts = {name: simulation.part(name, place) for name in SHAPES}
    expected = {
        name: torch.from_numpy(simulation.residuals[host][name][part])
        for name, part in parts.items()
    }
    assert_same_bits(_residuals(compressor), expected)


def _every_codec_matches_the_simulation() -> None:
    for codec, feedback in ROWS:
        ddp, compressor = _start(codec, feedback, seed=7)
        simulation = _simulation(codec, feedback, seed=7)
        for step in range(3):
            gradients = _gradients(step)
            got = exchange(ddp, gradients[dist.get_rank()])
            assert_same_bits(got, simulation.average(gradients))
            assert_equal_on_all_ranks(got)
        if feedback.enabled:
            _assert_residuals(compressor, simulation)


@on_ranks(4, launcher="two nodes")
def test_every_codec_on_two_hosts_of_two_ranks() -> None:
    assert (_local(), dist.get_world_size()) == (2, 4)
    _every_codec_matches_the_simulation()


@on_ranks(2, launcher="two nodes")
def test_every_codec_on_two_hosts_of_one_rank() -> None:
    assert (_local(), dist.get_world_size()) == (1, 2)
    _every_codec_matches_the_simulation()


@on_ranks(2, launcher="two nodes")
def test_every_codec_on_one_host() -> None:
    two = {name: os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")}
    os.environ.update(LOCAL_RANK=os.environ["RANK"], LOCAL_WORLD_SIZE="2", GROUP_RANK="0")
    _every_codec_matches_the_simulation()
    os.environ.update(two)


@on_ranks(1, launcher="two nodes")
def test_a_single_rank_exchanges_with_itself() -> None:
    _every_codec_matches_the_simulation()


@on_ranks(4, launcher="two nodes")
def test_forms_of_ddp() -> None:
    forms: tuple[dict[str, Any], ...] = (
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"bucket_cap_mb": 25},
        {"bucket_cap_mb": 1e-6},
    )
    for form in forms:
        ddp, compressor = _start(**form)
        simulation = _simulation()
        for step in range(3):
            gradients = _gradients(step)
            got = exchange(ddp, gradients[dist.get_rank()])
            assert_same_bits(got, simulation.average(gradients))
        _assert_residuals(compressor, simulation)


@on_ranks(4, launcher="two nodes")
def test_memory_in_another_order_and_half_precision() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        model = Probe(SHAPES, dtype).to(memory_format=torch.channels_last)
        ddp, _ = distributed(model, OneBit(), ErrorFeedback(), exchange="hierarchical")
        simulation = _simulation()
        for step in range(2):
            gradients = [{name: g.to(dtype) for name, g in one.items()} for one in _gradients(step)]
            got = exchange(ddp, gradients[dist.get_rank()])
            wide = [{name: g.float() for name, g in one.items()} for one in gradients]
            expected = simulation.average(wide)
            assert_same_bits(got, {name: value.to(dtype) for name, value in expected.items()})
        assert not model.c.grad.is_contiguous()


@on_ranks(4, launcher="two nodes")
def test_parameters_that_are_not_used() -> None:
    """By one rank: the average of its host has zeros from it. By none: residuals stay what they were."""
    for view in (False, True):
        ddp, compressor = _start(find_unused_parameters=True, gradient_as_bucket_view=view)
        simulation = _simulation()
        rank = dist.get_rank()
        for step in range(3):
            gradients = _gradients(step)
            absent = [{"a"}, {"b", "c"}, {"c"}, set()]
            for r in range(4):
                for name in absent[(r + step) % 4]:
                    gradients[r][name].zero_()
            used = [name for name in SHAPES if name not in absent[(rank + step) % 4]]
            got = exchange(ddp, gradients[rank], used)
            assert_same_bits(got, simulation.average(gradients))
        _assert_residuals(compressor, simulation)
        before = _residuals(compressor)
        got = exchange(ddp, targets(SHAPES, rank, 3), [name for name in SHAPES if name != "b"])
        assert "b" not in got
        after = _residuals(compressor)
        assert torch.equal(after["b"], before["b"])
        assert not torch.equal(after["a"], before["a"])


@on_ranks(4, launcher="two nodes")
def test_a_nonfinite_gradient_on_one_rank() -> None:
    for view, bad in ((False, math.inf), (True, math.nan)):
        ddp, compressor = _start(gradient_as_bucket_view=view)
        rank = dist.get_rank()
        for step in range(2):
            exchange(ddp, targets(SHAPES, rank, step))
        before = _residuals(compressor)
        gradients = targets(SHAPES, rank, 2)
        if rank == 2:
            gradients["a"][30, 3] = bad
        got = exchange(ddp, gradients)
        assert not torch.isfinite(got["a"][30, 3])
        for name, kept in _residuals(compressor).items():
            assert torch.isfinite(kept).all()
            assert torch.allclose(kept, before[name], atol=1e-5), (view, bad, name)
        got = exchange(ddp, targets(SHAPES, rank, 3))
        assert all(torch.isfinite(g).all() for g in got.values())
        assert_equal_on_all_ranks(got)


@on_ranks(4, launcher="two nodes")
def test_a_change_of_exchange_loses_no_mass() -> None:
    """From two shots, by way of the state, to hosts, back and forth, and from there to no compression."""
    total = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    sent = copy.deepcopy(total)
    state = None
    for number, chosen in enumerate(("two_shot", "hierarchical", "allgather", "hierarchical")):
        ddp, compressor = _start(exchange=chosen)
        if state is not None:
            compressor.load_state_dict(state)
        for step in range(2 * number, 2 * number + 2):
            gradients = _gradients(step)
            got = exchange(ddp, gradients[dist.get_rank()])
            for name in SHAPES:
                total[name] += sum(g[name] for g in gradients) / 4
                sent[name] += got[name]
        state = copy.deepcopy(compressor.state_dict())
    compressor.set_codec(NoCompression())
    got = exchange(ddp, {name: torch.zeros(shape) for name, shape in SHAPES.items()})
    assert compressor.residual_norm() == 0
    for name in SHAPES:
        assert torch.allclose(sent[name] + got[name], total[name], atol=1e-4), name


@on_ranks(4, launcher="two nodes")
def test_counters_tell_what_leaves_the_host() -> None:
    ddp, compressor = _start(bucket_cap_mb=25)
    exchange(ddp, targets(SHAPES, dist.get_rank(), 0))
    place = dist.get_rank() % 2
    parts = [Shards(math.prod(shape), 2, index) for index, shape in enumerate(SHAPES.values())]
    own, other = (sum(one.payload_bytes(OneBit())[p] for one in parts) for p in (place, 1 - place))
    flags = 16  # One bucket: five bytes, padded.
    dense = 4 * sum(one.length(1 - place) for one in parts)
    counters = compressor.counters
    assert counters.local_bytes == dense + 2 * (max(own, other) + flags)
    assert counters.wire_bytes - counters.local_bytes == own + flags
    assert counters.encoded_elements == sum(one.length(place) for one in parts)


@on_ranks(4, launcher="two nodes")
def test_uneven_inputs() -> None:
    """A rank that has joined goes on as an owner."""
    ddp, compressor = _start()
    simulation = _simulation()
    rank, steps = dist.get_rank(), [3, 1, 4, 0]
    for_all = []
    for step in range(4):
        gradients = _gradients(step)
        for r in range(4):
            if step >= steps[r]:
                gradients[r] = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        for_all.append(simulation.average(gradients))
    with ddp.join():
        for step in range(steps[rank]):
            assert_same_bits(exchange(ddp, targets(SHAPES, rank, step)), for_all[step])
    _assert_residuals(compressor, simulation)


@on_ranks(4, launcher="two nodes")
def test_an_owner_that_fails() -> None:
    ddp, compressor = _start()
    exchange(ddp, targets(SHAPES, dist.get_rank(), 0))
    error: tuple[type[Exception], str] = (
        hvdc.ExchangeError,
        "a: expected a payload from every rank, got none from rank 2, whose own error says why",
    )
    if dist.get_rank() == 2:
        error = (ArithmeticError, "on purpose")
        encode = compressor._kernels.encode

        def failing(codec: Codec, shape: tuple[int, ...], *rest: Any, **named: Any) -> None:
            if shape == (Shards(40 * 170, 2, 0).length(0),):
                raise ArithmeticError("on purpose")
            encode(codec, shape, *rest, **named)

        compressor._kernels.encode = failing  # type: ignore[method-assign]
    with pytest.raises(error[0], match=error[1]):
        exchange(ddp, targets(SHAPES, dist.get_rank(), 1))
    dist.barrier()  # All of them are still there.


@on_ranks(4, launcher="two nodes")
def test_an_altered_payload() -> None:
    ddp, _ = _start(bucket_cap_mb=25)
    exchange(ddp, targets(SHAPES, dist.get_rank(), 0))
    gather = Collectives.gather

    def flip_a_bit(self: Collectives, message: torch.Tensor) -> tuple[torch.Tensor, dist.Work]:
        rows, work = gather(self, message)
        if dist.get_rank() == 3 and message.numel() > 16:
            work.get_future().add_done_callback(lambda _: rows[0, 16 + 40].bitwise_xor_(16))
        return rows, work

    Collectives.gather = flip_a_bit  # type: ignore[method-assign]
    try:
        # Rank 2 gets what rank 3 has passed on; the other host has the bytes as they were.
        if dist.get_rank() < 2:
            exchange(ddp, targets(SHAPES, dist.get_rank(), 1))
        else:
            message = r"\w+: in place \d, host 0's payload: expected"
            with pytest.raises(hvdc.PayloadError, match=message):
                exchange(ddp, targets(SHAPES, dist.get_rank(), 1))
    finally:
        Collectives.gather = gather  # type: ignore[method-assign]
    dist.barrier()


@on_ranks(3, launcher="two nodes")
def test_hosts_of_unequal_size() -> None:
    ddp, _ = _start()
    message = r"hosts: .*place 0 of 2 on host 0 on rank 0, .* place 0 of 1 on host 1 on rank 2"
    with pytest.raises(hvdc.ExchangeError, match=message):
        exchange(ddp, targets(SHAPES, dist.get_rank(), 0))


@on_ranks(2, launcher="two nodes")
def test_wrong_arguments_fail_at_construction() -> None:
    with pytest.raises(ValueError, match="contiguous groups for exchange='hierarchical'"):
        _start(OneBit("column"))
    groups = [dist.new_group([rank]) for rank in range(2)]
    with pytest.raises(ValueError, match="expected process_group=None for exchange='hierarchical'"):
        _start(process_group=groups[dist.get_rank()])
    local = os.environ.pop("LOCAL_WORLD_SIZE")
    with pytest.raises(ValueError, match=r"expected LOCAL_RANK, .*, got .*LOCAL_WORLD_SIZE=''"):
        _start()
    os.environ["LOCAL_WORLD_SIZE"] = local
