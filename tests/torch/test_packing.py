"""Payloads of varying length: exchanges of all ranks in one process, and of real ranks."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hvd_compress.torch as hvdc
from hvd_compress.codecs import ECQ, ErrorFeedback, Ternary
from hvd_compress.codecs.lengths import bits_of
from hvd_compress.codecs.payload import payload_length
from hvd_compress.exchanges import buckets
from hvd_compress.exchanges.reference import Simulation
from hvd_compress.exchanges.routing import Route
from hvd_compress.kernels.batch import Entry
from hvd_compress.kernels.cpu_batch import CpuBatch
from hvd_compress.planner.cost import seconds
from hvd_compress.planner.machines import Cluster, CodecSpeed, Link
from tests.ranks import on_ranks
from tests.torch.lockstep import Lockstep
from tests.torch.probes import distributed, exchange, watch
from tests.torch_models import Probe, elsewhere

SHAPES = {"a": (30, 70), "b": (1300,), "tiny": (3,), "scalar": ()}
CODEC, WEAK = ECQ(coding="entropy", bucket=256), ErrorFeedback(0.01, 1.0)
RANKS = {"allgather": (3, 1), "two_shot": (3, 1), "hierarchical": (4, 2)}


def _gradients(rank: int, step: int, density: float) -> dict[str, torch.Tensor]:
    """Returns gradients with a share of nonzero elements; the larger the share, the longer the payloads."""
    generator = np.random.default_rng([rank, step])
    return {
        name: torch.from_numpy(
            np.asarray(
                generator.uniform(-1, 1, shape) * (generator.random(shape) < density), np.float32
            )
        )
        for name, shape in SHAPES.items()
    }


def _ranks(exchange: str, **options: Any) -> tuple[Lockstep, Simulation]:
    size, local = RANKS[exchange]
    chosen: tuple[Any, ...] = (exchange, CODEC, WEAK, SHAPES, size)
    return Lockstep(*chosen, local=local, **options), Simulation(*chosen, local=local, **options)


def _assert_alike(got: list[Any], expected: dict[str, np.ndarray]) -> None:
    for one in got:
        for name, tensor in one.items():
            assert np.array_equal(tensor.numpy(), expected[name], equal_nan=True), name


@pytest.mark.parametrize("exchange", RANKS)
@settings(deadline=None, max_examples=8)
@given(st.data())
def test_any_sizes_give_the_reference_s_bits(exchange: str, data: st.DataObject) -> None:
    """Ranks whose payloads become longer or shorter, some with Inf, some that fail, never wait in vain."""
    ranks, simulation = _ranks(exchange)
    size = RANKS[exchange][0]
    densities = st.sampled_from([0.0, 0.01, 0.2, 1.0])
    steps = st.tuples(
        st.tuples(*[densities] * size), st.sampled_from(["", "", "", "inf", "broken"])
    )
    for step, (chosen, event) in enumerate(data.draw(st.lists(steps, min_size=2, max_size=6))):
        everybodys = [_gradients(rank, step, density) for rank, density in enumerate(chosen)]
        if event == "inf":
            everybodys[step % size]["b"][7] = np.inf
        if event == "broken":
            ranks.step(everybodys, broken=[step % size])
            assert len(ranks.errors) == size
        else:
            expected = simulation.average(
                [{n: t.numpy() for n, t in g.items()} for g in everybodys]
            )
            _assert_alike(ranks.step(everybodys), expected)
            assert not ranks.errors
        lengths = {batches.lengths() for batches in ranks.batches}
        assert len(lengths) == 1


@pytest.mark.parametrize("exchange", RANKS)
def test_only_a_step_of_longer_payloads_than_before_takes_more_collectives(exchange: str) -> None:
    """Rank 1's gradients become dense, in a hierarchy within a part that rank 0 does not own."""
    ranks, simulation = _ranks(exchange)
    size = RANKS[exchange][0]
    again, lengths = [], []
    for step, density in enumerate((0.05, 0.05, 0.05, 1.0, 1.0, 0.05)):
        everybodys = [_gradients(rank, step, 0.05) for rank in range(size)]
        everybodys[1]["b"][:1024] = _gradients(1, step, density)["b"][:1024]
        expected = simulation.average([{n: t.numpy() for n, t in g.items()} for g in everybodys])
        _assert_alike(ranks.step(everybodys), expected)
        again.append([any("remainder" in label for label, _ in one) for one in ranks.started])
        lengths.append(
            sum(n for label, n in ranks.started[1] if exchange == "allgather" or "1" in label)
        )
    with_rest = [False, True] * 2 if exchange == "hierarchical" else [True] * size
    assert again == [[False] * size] * 3 + [with_rest] + [[False] * size] * 2, again
    assert max(lengths[1:3]) < 0.6 * lengths[0] and min(lengths[4:]) > max(lengths[1:3])


@pytest.mark.parametrize("exchange", RANKS)
@pytest.mark.parametrize("kind", ("standard_normal", "laplace"))
def test_the_model_predicts_what_ranks_send(exchange: str, kind: str) -> None:
    """The model predicts normal numbers from nothing, and others from the bits of a payload."""
    shapes, (size, local) = {"a": (300, 211)}, RANKS[exchange]
    ranks = Lockstep(exchange, CODEC, WEAK, shapes, size, local)
    random, counted = np.random.default_rng(3), []
    for _ in range(3):
        numbers = [getattr(random, kind)(size=shapes["a"]).astype(np.float32) for _ in range(size)]
        ranks.step([{"a": torch.from_numpy(one)} for one in numbers])
        counted.append(sum(counters.wire_bytes for counters in ranks.counters) / size)
    bits = None
    if kind == "laplace":
        payload = np.zeros(CODEC.payload_bytes(shapes["a"]), np.uint8)
        batch = CpuBatch([Entry(CODEC, shapes["a"])])
        batch.encode([numbers[0].ravel()], [None], [None], [0], payload)
        bits = bits_of(CODEC, shapes["a"], payload_length(payload, payload.size))
    cluster = Cluster(size // local, local, Link(1e9))
    route = Route(CODEC, WEAK, exchange)
    sent = seconds(shapes["a"], route, CodecSpeed(), cluster, bits=bits).sent
    assert sent == pytest.approx(counted[2] - counted[1], rel=0.1)
    assert sent < counted[0]


def test_an_owner_that_waits_for_parts_and_then_fails() -> None:
    """The owner's error and the others' come in one step, whose parts are longer than ever before."""
    failing = False

    def step_of_owner(average: torch.Tensor, state: dict[str, Any]) -> None:
        if failing and average.numel() == 52:
            raise RuntimeError("an owner's step has failed")

    ranks = Lockstep("two_shot", CODEC, WEAK, SHAPES, 3, owner_step=step_of_owner)
    for step, density in enumerate((0.01, 0.01, 1.0, 1.0)):
        failing = step == 2
        ranks.step([_gradients(rank, step, density) for rank in range(3)])
        if failing:
            assert ["remainder" in label for label, _ in ranks.started[0]] == [False] * 2 + [
                True
            ] * 2
            assert sorted({type(error).__name__ for error in ranks.errors}) == [
                "ExchangeError",
                "RuntimeError",
            ]
        else:
            assert not ranks.errors


def test_a_bucket_with_codecs_of_both_kinds() -> None:
    """Payloads of one length go through packed messages as they are."""
    ranks = Lockstep("allgather", CODEC, WEAK, SHAPES, 2)
    plain = Lockstep("allgather", ECQ(bucket=256), WEAK, SHAPES, 2)
    for slots in ranks.slots:
        slots[1].route = plain.slots[0][1].route
        slots[2].route = Lockstep("allgather", Ternary(), WEAK, SHAPES, 1).slots[0][2].route
    for slots in plain.slots:
        slots[2].route = ranks.slots[0][2].route
    for step in range(3):
        everybodys = [_gradients(rank, step, 0.1) for rank in range(2)]
        for one, other in zip(ranks.step(everybodys), plain.step(everybodys), strict=True):
            assert all(torch.equal(one[name], other[name]) for name in SHAPES)
    assert ranks.counters[0].wire_bytes < plain.counters[0].wire_bytes


def test_lengths_outlive_plans_and_are_forgotten_by_all_ranks() -> None:
    """One rank alone may make its plans anew, as set_codec() does with the codec that there is."""
    ranks = Lockstep("allgather", CODEC, WEAK, SHAPES, 2)
    everybodys = [_gradients(rank, 0, 0.05) for rank in range(2)]
    ranks.step(everybodys)
    ranks.batches[0].forget_plans()
    ranks.step(everybodys)
    short = ranks.started[0][0][1]
    ranks.step(everybodys)
    assert ranks.started[0][0][1] == short


@on_ranks(1)
def test_a_parameter_on_a_gpu_is_refused_before_any_exchange() -> None:
    given = [("a", elsewhere((5000,)))]
    with pytest.raises(
        ValueError, match=r"a: .* the CPU for ECQ\(.*got one on cuda.*write coding='plain'"
    ):
        hvdc.Compressor(given, Route(CODEC, WEAK))
    hvdc.Compressor(given, Route(ECQ(), WEAK))


@on_ranks(3)
def test_buckets_that_need_more_beside_others_that_do_not() -> None:
    """Each of Horovod's buckets has one gradient, whose hooks fire in another order on each rank."""
    limit, buckets.LIMIT = buckets.LIMIT, 0
    names = list(SHAPES)
    for name in RANKS:
        model = Probe(SHAPES)
        compressor = hvdc.Compressor(
            model.named_parameters(), Route(CODEC, WEAK), exchange=name, threshold=0
        )
        optimizer = distributed(model, compressor)
        simulation = Simulation(name, CODEC, WEAK, SHAPES, 3, local=3)
        started: list[str] = []
        watch(compressor, started=started.append)
        for step in range(5):
            everybodys = [_gradients(rank, step, 0.02) for rank in range(3)]
            everybodys[1]["ab"[step % 2]] = _gradients(1, step, 1.0 if step > 1 else 0.02)[
                "ab"[step % 2]
            ]
            turn = (step + hvd.rank()) % len(names)
            got = exchange(model, optimizer, everybodys[hvd.rank()], names[turn:] + names[:turn])
            expected = simulation.average(
                [{n: t.numpy() for n, t in g.items()} for g in everybodys]
            )
            _assert_alike([got], expected)
        assert any("remainder" in one for one in started) == (name != "hierarchical"), started
    buckets.LIMIT = limit
