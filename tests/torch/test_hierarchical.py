"""The hierarchical exchange on two hosts, against all ranks simulated by the oracle."""

from __future__ import annotations

import copy
import io
import math
import re
import sys
import time
from typing import Any

import horovod.torch as hvd
import pytest
import torch

import hvd_compress.torch as hvdc
from hvd_compress.codecs import BF16, ECQ, Codec, ErrorFeedback, Int8, OneBit, Ternary
from hvd_compress.exchange.routing import Route
from hvd_compress.exchange.shards import Shards
from hvd_compress.perfmodel.cost import wire_bytes
from hvd_compress.perfmodel.machines import Cluster, Link
from tests import jobs
from tests.ranks import on_ranks
from tests.torch.probes import (
    HierarchicalSimulation,
    Probe,
    assert_identical_on_all_ranks,
    assert_same_bits,
    distributed,
    exchange,
    targets,
)

SHAPES = {"a": (40, 170), "b": (3000,), "c": (8, 3, 5, 5), "tiny": (3,), "scalar": ()}
DYNAMIC = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
NONE = ErrorFeedback(alpha=0.0)
ROWS: list[tuple[Codec, ErrorFeedback]] = [
    (OneBit(), ErrorFeedback()),
    (OneBit("tensor"), ErrorFeedback(0.5, 0.75)),
    (Int8(), NONE),
    (Int8("linear"), ErrorFeedback()),
    (Ternary(), NONE),
    (ECQ(), ErrorFeedback(0.01, 1.0)),
    (BF16(), NONE),
]


def _start(
    codec: Codec = OneBit(),  # noqa: B008
    feedback: ErrorFeedback = ErrorFeedback(),  # noqa: B008
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[Probe, hvdc.Compressor]:
    model = Probe(SHAPES, dtype)
    options = {"exchange": "hierarchical", "threshold": 0, **options}
    return model, hvdc.Compressor(model.named_parameters(), codec, feedback, **options)


def _every_codec_matches_the_simulation() -> None:
    rank, size, local = hvd.rank(), hvd.size(), hvd.local_size()
    for codec, feedback in ROWS:
        model, compressor = _start(codec, feedback, seed=7)
        optimizer = distributed(model, compressor)
        simulation = HierarchicalSimulation(codec, feedback, SHAPES, size, local, seed=7)
        for step in range(3):
            gradients = [targets(SHAPES, r, step) for r in range(size)]
            got = exchange(model, optimizer, gradients[rank])
            assert_same_bits(got, simulation.average(gradients))
        tensors = compressor.state_dict()["tensors"]
        for name in SHAPES:
            assert tensors[name]["residual"] is None
            if feedback.enabled:
                part = simulation.part(name, hvd.local_rank())
                expected = simulation.residuals[rank // local][name][part]
                got_residual = tensors[name]["owned"]["residual"]
                assert torch.equal(got_residual, torch.from_numpy(expected))
        assert_identical_on_all_ranks(model)


@on_ranks(4, launcher="two hosts", environment=DYNAMIC)
def test_every_codec_on_two_hosts_of_two_ranks() -> None:
    assert (hvd.local_size(), hvd.cross_size()) == (2, 2)
    _every_codec_matches_the_simulation()


@on_ranks(2, launcher="two hosts")
def test_two_hosts_of_one_rank_need_no_process_sets() -> None:
    assert (hvd.local_size(), hvd.cross_size()) == (1, 2)
    _every_codec_matches_the_simulation()


@on_ranks(3)
def test_one_host_needs_no_process_sets() -> None:
    assert (hvd.local_size(), hvd.cross_size()) == (3, 1)
    _every_codec_matches_the_simulation()


@on_ranks(1, environment={"HOROVOD_ELASTIC": "1"})
def test_a_single_rank_that_exchanges_with_itself() -> None:
    _every_codec_matches_the_simulation()


@on_ranks(4, launcher="two hosts", environment=DYNAMIC)
def test_hooks_in_another_order_and_sums() -> None:
    model, compressor = _start()
    optimizer = distributed(model, compressor, op=hvd.Sum)
    simulation = HierarchicalSimulation(OneBit(), ErrorFeedback(), SHAPES, 4, 2)
    names = list(SHAPES)
    for step in range(5):
        gradients = [targets(SHAPES, r, step) for r in range(4)]
        turn = (step + hvd.rank()) % len(names)
        got = exchange(model, optimizer, gradients[hvd.rank()], names[turn:] + names[:turn])
        expected = simulation.average(gradients)
        assert_same_bits(got, {name: 4 * value for name, value in expected.items()})


@on_ranks(4, launcher="two hosts", environment=DYNAMIC)
def test_half_precision_models() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        model, compressor = _start(dtype=dtype)
        optimizer = distributed(model, compressor)
        simulation = HierarchicalSimulation(OneBit(), ErrorFeedback(), SHAPES, 4, 2)
        for step in range(2):
            gradients = [targets(SHAPES, r, step) for r in range(4)]
            gradients = [{n: g.to(dtype).float() for n, g in one.items()} for one in gradients]
            mine = {name: g.to(dtype) for name, g in gradients[hvd.rank()].items()}
            got = exchange(model, optimizer, mine)
            expected = simulation.average(gradients)
            assert_same_bits(got, {name: value.to(dtype) for name, value in expected.items()})


@on_ranks(4, launcher="two hosts", environment=DYNAMIC)
def test_counters_tell_what_leaves_the_host() -> None:
    model, compressor = _start()
    optimizer = distributed(model, compressor)
    exchange(model, optimizer, targets(SHAPES, hvd.rank(), 0))
    between, tokens = 0, 2 * 3 / 4 * 12 * len(SHAPES)
    within = 0
    for index, shape in enumerate(SHAPES.values()):
        shards = Shards(math.prod(shape), 2, index)
        own = shards.payload_bytes(OneBit())[hvd.local_rank()]
        between += own
        within += 4 * (shards.count - shards.length(hvd.local_rank())) + 2 * own
    counters = compressor.counters
    assert counters.local_bytes == within
    assert math.isclose(counters.wire_bytes, between + within + tokens)
    route, cluster = Route(OneBit(), ErrorFeedback(), "hierarchical"), Cluster(2, 2, Link(1e8))
    predicted = sum(wire_bytes(shape, route, cluster) for shape in SHAPES.values())
    counted = hvd.allgather_object(counters.wire_bytes, name="counted")
    assert math.isclose(sum(counted) / 4, predicted + tokens)


@on_ranks(4, launcher="two hosts", environment=DYNAMIC)
def test_a_resumed_run_continues_bit_for_bit() -> None:
    def train(model: Probe, optimizer: Any, steps: range) -> dict[str, torch.Tensor]:
        for step in steps:
            exchange(model, optimizer, targets(SHAPES, hvd.rank(), step))
        return model.state_dict()

    model, compressor = _start()
    through = train(model, distributed(model, compressor), range(6))
    model, compressor = _start()
    train(model, distributed(model, compressor), range(3))
    saved = io.BytesIO()
    torch.save((model.state_dict(), compressor.state_dict()), saved)
    saved.seek(0)
    model, compressor = _start()
    parameters, state = torch.load(saved)
    model.load_state_dict(parameters)
    compressor.load_state_dict(state)
    assert_same_bits(train(model, distributed(model, compressor), range(3, 6)), through)


@on_ranks(4, launcher="two hosts", environment=DYNAMIC)
def test_a_nonfinite_gradient_on_one_rank() -> None:
    for codec, feedback in ((OneBit(), ErrorFeedback()), (ECQ(), ErrorFeedback(0.01, 1.0))):
        model, compressor = _start(codec, feedback)
        optimizer = distributed(model, compressor)
        for step in range(2):
            exchange(model, optimizer, targets(SHAPES, hvd.rank(), step))
        before = copy.deepcopy(compressor.state_dict()["tensors"])
        gradients = targets(SHAPES, hvd.rank(), 2)
        if hvd.rank() == 1:
            gradients["a"][30, 3] = math.inf
        optimizer.zero_grad()
        model(gradients).backward()
        optimizer.synchronize()
        assert not torch.isfinite(model.a.grad[30, 3])
        after = compressor.state_dict()["tensors"]
        for name in SHAPES:
            old, new = (state[name]["owned"]["residual"] for state in (before, after))
            assert torch.allclose(old, new, atol=1e-5), name
        with optimizer.skip_synchronize():
            optimizer.zero_grad()


@on_ranks(4, launcher="two hosts", environment=DYNAMIC)
def test_a_change_of_exchange_loses_no_mass() -> None:
    """From two shots, by way of the state, to hosts, and from there to no compression."""
    total = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    sent = copy.deepcopy(total)
    state = None
    for number, chosen in enumerate(("two_shot", "hierarchical", "allgather", "hierarchical")):
        model, compressor = _start(exchange=chosen, name=f"number {number}")
        optimizer = distributed(model, compressor)
        if state is not None:
            compressor.load_state_dict(state)
        for step in range(2 * number, 2 * number + 2):
            gradients = [targets(SHAPES, r, step) for r in range(4)]
            got = exchange(model, optimizer, gradients[hvd.rank()])
            for name in SHAPES:
                total[name] += sum(g[name] for g in gradients) / 4
                sent[name] += got[name]
        state = compressor.state_dict()
    compressor.set_codec(hvdc.NoCompression(model.named_parameters()).routes()["a"].codec)
    nothing = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    got = exchange(model, optimizer, nothing)
    assert compressor.residual_norm() == 0
    for name in SHAPES:
        assert torch.allclose(sent[name] + got[name], total[name], atol=1e-4), name


@on_ranks(4, launcher="two hosts", environment=DYNAMIC)
def test_join() -> None:
    model, compressor = _start()
    optimizer = distributed(model, compressor)
    for step in range(2 if hvd.rank() == 2 else 4):
        before = compressor.residual_norm()
        gradients = [targets(SHAPES, r, step) for r in range(4)]
        got = exchange(model, optimizer, gradients[hvd.rank()])
        if step >= 2:
            assert compressor.residual_norm() == before
            for name in SHAPES:
                mean = sum(gradients[r][name] for r in (0, 1, 3)) / 4
                assert torch.allclose(got[name], mean, atol=1e-5), name
    hvd.join()


def _raises_in_first_step(message: str, **options: Any) -> None:
    model, compressor = _start(**options)
    optimizer = distributed(model, compressor)
    with pytest.raises(hvdc.ExchangeError, match=message):
        exchange(model, optimizer, targets(SHAPES, hvd.rank(), 0))


@on_ranks(3, launcher="two hosts", environment=DYNAMIC, alone=True)
def test_hosts_of_unequal_size() -> None:
    _raises_in_first_step(
        r"hosts: .*place 0 of 2 on host 0 on rank 0, .* place 0 of 1 on host 1 on rank 2"
    )


@on_ranks(4, launcher="two hosts", alone=True)
def test_process_sets_that_horovod_does_not_take() -> None:
    _raises_in_first_step("expected a Horovod that takes process sets, got: Set HOROVOD_DYNAMIC")


@on_ranks(4, launcher="two hosts", environment=DYNAMIC, alone=True)
def test_another_exchange_on_one_rank() -> None:
    chosen = "two_shot" if hvd.rank() == 3 else "hierarchical"
    _raises_in_first_step(r"(?s)through hierarchical, .* through two_shot", exchange=chosen)


@on_ranks(4, launcher="two hosts", environment=DYNAMIC, alone=True)
def test_an_altered_payload() -> None:
    model, compressor = _start()
    optimizer = distributed(model, compressor)
    exchange(model, optimizer, targets(SHAPES, hvd.rank(), 0))
    collectives = compressor._collectives
    wait = collectives.wait

    def flip_a_bit(handle: int) -> torch.Tensor:
        result = wait(handle)
        if result.numel() == 2 * sum(Shards(6800, 2, 0).payload_bytes(OneBit())):
            result[result.numel() - 20] ^= 16
        return result

    collectives.wait = flip_a_bit
    with pytest.raises(hvdc.PayloadError, match="a: in place 1, host 1's payload: expected check"):
        exchange(model, optimizer, targets(SHAPES, hvd.rank(), 1))
    hvd.barrier()  # A rank that leaves early would take Horovod with it.


@on_ranks(2, environment=DYNAMIC)
def test_wrong_arguments_fail_at_construction() -> None:
    with pytest.raises(ValueError, match="contiguous groups for exchange='hierarchical'"):
        _start(OneBit("column"))
    first = hvd.add_process_set([0])
    with pytest.raises(ValueError, match="expected process_set=None for exchange='hierarchical'"):
        _start(process_set=first)


def test_a_rank_that_dies_before_the_host_hears_from_the_others() -> None:
    """Horovod with dynamic process sets ends the other processes itself, before we can."""
    job = ["-m", "tests.torch.dying_rank", "hierarchical", "a back within host"]
    start = time.monotonic()
    printed = jobs.run("two hosts", 4, [sys.executable, *job], DYNAMIC)
    assert time.monotonic() - start < 60, printed
    assert re.search(
        r"rank \d stopped after .* s by HorovodInternalError|background loop uncaught exception: .*"
        r"Connection (closed|reset) by peer",
        printed,
    ), printed


def _unsent(states: list[dict[str, Any]], name: str) -> torch.Tensor:
    """What all ranks together would still add to their average."""
    total = torch.zeros(math.prod(SHAPES[name]), dtype=torch.float64)
    for state in states:
        saved = state["tensors"][name]
        if saved["residual"] is not None:
            total += saved["residual"].double() / len(states)
        if saved["owned"] is not None:
            owned = saved["owned"]
            part = owned["residual"].double() * owned["weight"] / len(states)
            total[owned["begin"] : owned["end"]] += part
    return total


@on_ranks(4, launcher="two hosts", environment=DYNAMIC)
def test_another_number_of_ranks_takes_over_everything_unsent() -> None:
    two = hvd.add_process_set([0, 3])  # Hosts and places have sets of their own.
    pair: dict[str, Any] = {"exchange": "two_shot", "process_set": two}
    for old, new in ((pair, {}), ({}, {**pair, "name": "resized"})):
        states: list[dict[str, Any]] = []
        for options, steps in ((old, range(3)), (new, range(3, 5))):
            members = two.ranks if options else range(4)
            model, compressor = _start(**options)
            if states and hvd.rank() in members:
                compressor.load_resized(states)
                unsent = {name: _unsent(states, name) for name in SHAPES}
            loaded = hvd.allgather_object(compressor.state_dict(), name="loaded states")
            if states and hvd.rank() in members:
                for name in SHAPES:
                    got = _unsent([loaded[rank] for rank in members], name)
                    assert torch.allclose(got, unsent[name], atol=1e-6), name
            where = {"process_set": two} if options else {}
            optimizer = distributed(model, compressor, **where)
            for step in steps:
                exchange(model, optimizer, targets(SHAPES, hvd.rank(), step))
            everywhere = hvd.allgather_object(compressor.state_dict(), name="old states")
            states = [everywhere[rank] for rank in members]
