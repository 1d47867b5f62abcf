"""The two-shot exchange on real ranks, against all ranks simulated by the oracle."""

from __future__ import annotations

import copy
import math
import threading
import time
from typing import Any

import horovod.torch as hvd
import torch

import hvd_compress.torch as hvdc
from hvd_compress.codecs import (
    BF16,
    ECQ,
    FP16,
    Codec,
    ErrorFeedback,
    Int8,
    NoCompression,
    OneBit,
    Ternary,
)
from hvd_compress.exchange import bundling
from hvd_compress.exchange.routing import Route
from hvd_compress.exchange.shards import Shards
from hvd_compress.perfmodel.cost import wire_bytes
from hvd_compress.perfmodel.machines import Cluster, Link
from tests.ranks import on_ranks
from tests.torch.probes import (
    Probe,
    TwoShotSimulation,
    assert_identical_on_all_ranks,
    assert_same_bits,
    distributed,
    exchange,
    process_set,
    targets,
    two_valued,
)

SHAPES = {"a": (40, 170), "b": (3000,), "c": (8, 3, 5, 5), "tiny": (3,), "scalar": ()}
"""7, 3 and 1 grains: uneven shards, ranks without a part, and tensors smaller than the number of ranks."""

NONE = ErrorFeedback(alpha=0.0)
DEFAULT_LIMIT = bundling.LIMIT
ROWS: list[tuple[Codec, ErrorFeedback]] = [
    (OneBit(), ErrorFeedback()),
    (OneBit(), NONE),
    (OneBit("tensor"), ErrorFeedback(0.5, 0.75)),
    (Int8(), NONE),
    (Int8("linear"), ErrorFeedback()),
    (Ternary(), NONE),
    (Ternary(bucket="tensor"), NONE),
    (ECQ(), ErrorFeedback(0.01, 1.0)),
    (BF16(), NONE),
    (FP16(), ErrorFeedback()),
]


def _start(
    codec: Codec = OneBit(),  # noqa: B008
    feedback: ErrorFeedback = ErrorFeedback(),  # noqa: B008
    **options: Any,
) -> tuple[Probe, hvdc.Compressor]:
    model = Probe(SHAPES)
    compressor = hvdc.Compressor(
        model.named_parameters(), codec, feedback, exchange="two_shot", threshold=0, **options
    )
    return model, compressor


def _bundles_of(elements: int) -> None:
    """Of so many elements, in compressors whose first step is still to come."""
    bundling.LIMIT = elements


def _assert_residuals(compressor: hvdc.Compressor, simulation: TwoShotSimulation) -> None:
    rank, tensors = hvd.rank(), compressor.state_dict()["tensors"]
    for name in SHAPES:
        part = simulation.shard(name, rank)
        expected = {
            "first": torch.from_numpy(simulation.residuals[rank][name]),
            "second": torch.from_numpy(simulation.owned[name][part]),
        }
        owned = tensors[name]["owned"]
        assert (owned["begin"], owned["end"]) == (part.start, part.stop)
        assert_same_bits(
            {"first": tensors[name]["residual"], "second": owned["residual"]}, expected
        )


def _every_codec_matches_the_simulation() -> None:
    rank, size = hvd.rank(), hvd.size()
    for codec, feedback in ROWS:
        model, compressor = _start(codec, feedback, seed=7)
        optimizer = distributed(model, compressor)
        simulation = TwoShotSimulation(codec, feedback, SHAPES, size, seed=7)
        for step in range(3):
            gradients = [targets(SHAPES, r, step) for r in range(size)]
            got = exchange(model, optimizer, gradients[rank])
            assert_same_bits(got, simulation.average(gradients))
        if feedback.enabled:
            _assert_residuals(compressor, simulation)
        assert_identical_on_all_ranks(model)


@on_ranks(2)
def test_every_codec_on_two_ranks() -> None:
    _every_codec_matches_the_simulation()


@on_ranks(2)
def test_long_messages_between_two_ranks() -> None:
    """Averages of one length are gathered as a sum, others are not; neither may show."""
    for count in (2**20, 2**20 + 1024):
        shapes = {"long": (count,)}
        model = Probe(shapes)
        compressor = hvdc.Int8(model.named_parameters(), threshold=0, exchange="two_shot")
        optimizer = distributed(model, compressor)
        simulation = TwoShotSimulation(Int8(), NONE, shapes, 2)
        gradients = [targets(shapes, rank, 0) for rank in range(2)]
        got = exchange(model, optimizer, gradients[hvd.rank()])
        assert_same_bits(got, simulation.average(gradients))


@on_ranks(3)
def test_every_codec_on_three_ranks() -> None:
    _every_codec_matches_the_simulation()


@on_ranks(4)
def test_every_codec_on_four_ranks() -> None:
    _every_codec_matches_the_simulation()


@on_ranks(1, environment={"HOROVOD_ELASTIC": "1"})
def test_a_single_rank_that_exchanges_with_itself() -> None:
    _every_codec_matches_the_simulation()


def _same_as_simulated(factor: float = 1.0, **options: Any) -> None:
    """Whatever Horovod is asked for, the result is the simulated average times a factor."""
    model, compressor = _start()
    optimizer = distributed(model, compressor, **options)
    simulation = TwoShotSimulation(OneBit(), ErrorFeedback(), SHAPES, hvd.size())
    for step in range(3):
        gradients = [targets(SHAPES, r, step) for r in range(hvd.size())]
        got = exchange(model, optimizer, gradients[hvd.rank()])
        expected = simulation.average(gradients)
        assert_same_bits(got, {name: factor * value for name, value in expected.items()})


@on_ranks(2)
def test_operations_groups_and_predivide_factors() -> None:
    _same_as_simulated(op=hvd.Average)
    _same_as_simulated(factor=2.0, op=hvd.Sum)
    _same_as_simulated(gradient_predivide_factor=3.0)
    _same_as_simulated(groups=2)
    _same_as_simulated(factor=2.0, groups=2, op=hvd.Sum)


@on_ranks(3)
def test_hooks_in_another_order_on_each_rank() -> None:
    model, compressor = _start()
    optimizer = distributed(model, compressor)
    simulation = TwoShotSimulation(OneBit(), ErrorFeedback(), SHAPES, hvd.size())
    names = list(SHAPES)
    for step in range(6):
        gradients = [targets(SHAPES, r, step) for r in range(hvd.size())]
        turn = (step + hvd.rank()) % len(names)
        order = names[turn:] + names[:turn]
        got = exchange(model, optimizer, gradients[hvd.rank()], order)
        assert_same_bits(got, simulation.average(gradients))


@on_ranks(3)
def test_bundles_of_any_size_give_the_same_bits() -> None:
    for elements, messages in ((0, 5), (1000, 3), (5000, 2), (DEFAULT_LIMIT, 1)):
        _bundles_of(elements)
        model, compressor = _start()
        optimizer = distributed(model, compressor)
        simulation = TwoShotSimulation(OneBit(), ErrorFeedback(), SHAPES, hvd.size())
        collectives, sent = compressor._collectives, []
        distribute = collectives.distribute

        def noting(
            message: torch.Tensor, sizes: Any, name: str, call: Any = distribute, seen: Any = sent
        ) -> int:
            seen.append(name)
            return call(message, sizes, name)

        collectives.distribute = noting
        names = list(SHAPES)
        for step in range(3):
            gradients = [targets(SHAPES, r, step) for r in range(hvd.size())]
            turn = (step + hvd.rank()) % len(names)
            order = names[turn:] + names[:turn]
            got = exchange(model, optimizer, gradients[hvd.rank()], order)
            assert_same_bits(got, simulation.average(gradients))
        assert len(sent) == 3 * messages and len(set(sent)) == messages, (elements, sent)
    _bundles_of(DEFAULT_LIMIT)


@on_ranks(2)
def test_a_bundle_some_of_whose_tensors_are_frozen() -> None:
    model, compressor = _start()
    model.b.requires_grad_(False)
    optimizer = distributed(model, compressor)
    trained = {name: shape for name, shape in SHAPES.items() if name != "b"}
    simulation = TwoShotSimulation(OneBit(), ErrorFeedback(), SHAPES, hvd.size())
    for step in range(3):
        gradients = [targets(SHAPES, r, step) for r in range(hvd.size())]
        got = exchange(model, optimizer, gradients[hvd.rank()])
        expected = simulation.average(gradients)
        assert_same_bits(got, {name: expected[name] for name in trained})


@on_ranks(2)
def test_gradients_missing_on_some_ranks() -> None:
    model, compressor = _start()
    optimizer = distributed(model, compressor)
    simulation = TwoShotSimulation(OneBit(), ErrorFeedback(), SHAPES, hvd.size())
    absent = [{"a"}, {"b", "c"}]
    for step in range(3):
        gradients = [targets(SHAPES, r, step) for r in range(hvd.size())]
        for rank in range(hvd.size()):
            for name in absent[(rank + step) % 2]:
                gradients[rank][name].zero_()
        used = [n for n in SHAPES if n not in absent[(hvd.rank() + step) % 2]]
        got = exchange(model, optimizer, gradients[hvd.rank()], used)
        assert_same_bits(got, simulation.average(gradients))


@on_ranks(3, environment={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
def test_process_set() -> None:
    members = process_set(0, 2)
    model, compressor = _start(process_set=members)
    optimizer = distributed(model, compressor, process_set=members)
    simulation = TwoShotSimulation(OneBit(), ErrorFeedback(), SHAPES, 2)
    for step in range(3):
        gradients = [targets(SHAPES, r, step) for r in (0, 2)]
        mine = targets(SHAPES, hvd.rank(), step)
        got = exchange(model, optimizer, mine)
        assert_same_bits(got, simulation.average(gradients) if hvd.rank() != 1 else mine)


@on_ranks(2)
def test_half_precision_models() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        model = Probe(SHAPES, dtype)
        compressor = hvdc.OneBit(model.named_parameters(), exchange="two_shot", threshold=0)
        optimizer = distributed(model, compressor)
        simulation = TwoShotSimulation(OneBit(), ErrorFeedback(), SHAPES, hvd.size())
        for step in range(3):
            gradients = [targets(SHAPES, r, step) for r in range(hvd.size())]
            gradients = [{n: g.to(dtype).float() for n, g in one.items()} for one in gradients]
            mine = {name: g.to(dtype) for name, g in gradients[hvd.rank()].items()}
            got = exchange(model, optimizer, mine)
            expected = simulation.average(gradients)
            assert_same_bits(got, {name: value.to(dtype) for name, value in expected.items()})


@on_ranks(2)
def test_every_scheme_by_name() -> None:
    for name in hvdc.Compression.names:
        model = Probe(SHAPES)
        parameters = model.named_parameters()
        compressor = hvdc.Compression.by_name(name, parameters, exchange="two_shot", threshold=0)
        optimizer = distributed(model, compressor)
        for step in range(2):
            exchange(model, optimizer, targets(SHAPES, hvd.rank(), step))
        assert_identical_on_all_ranks(model)


@on_ranks(2)
def test_a_change_of_codec_loses_no_mass() -> None:
    model, compressor = _start()
    optimizer = distributed(model, compressor)
    total = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    sent = copy.deepcopy(total)
    # The last one is dense: both residuals are in its gradients, and none is left.
    changes: dict[int, Codec] = {2: ECQ(), 4: OneBit(512), 6: NoCompression()}
    for step in range(8):
        if step in changes:
            compressor.set_codec(changes[step])
        gradients = [targets(SHAPES, r, step) for r in range(hvd.size())]
        got = exchange(model, optimizer, gradients[hvd.rank()])
        for name in SHAPES:
            total[name] += sum(g[name] for g in gradients) / hvd.size()
            sent[name] += got[name]
    assert compressor.residual_norm() == 0
    for name in SHAPES:
        assert torch.allclose(sent[name], total[name], atol=1e-4), name


@on_ranks(3)
def test_counters_follow_the_formulas() -> None:
    model, compressor = _start()
    optimizer = distributed(model, compressor)
    for step in range(2):
        exchange(model, optimizer, targets(SHAPES, hvd.rank(), step))
    size, message, wire = hvd.size(), 0.0, 0.0
    for index, shape in enumerate(SHAPES.values()):
        sizes = Shards(math.prod(shape), size, index).payload_bytes(OneBit())
        own = sizes[hvd.rank()]
        message += sum(sizes) + own + 12
        wire += sum(sizes) - own + (size - 1) * own + 2 * (size - 1) / size * 12
    counters = compressor.counters
    assert counters.message_bytes == 2 * message
    assert math.isclose(counters.wire_bytes, 2 * wire)
    route, cluster = Route(OneBit(), ErrorFeedback(), "two_shot"), Cluster(size, 1, Link(1e8))
    predicted = sum(wire_bytes(shape, route, cluster) for shape in SHAPES.values())
    counted = hvd.allgather_object(counters.wire_bytes, name="counted")
    tokens = 2 * (size - 1) / size * 12 * len(SHAPES)
    assert math.isclose(sum(counted) / size, 2 * (predicted + tokens))
    assert counters.encoded_elements == 2 * sum(map(math.prod, SHAPES.values()))
    assert counters.encode_seconds > 0 and counters.decode_seconds > 0


class _Sleep(torch.autograd.Function):
    """Nothing forward; backward, a rest."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


@on_ranks(2)
def test_the_second_shot_starts_while_the_backward_pass_still_runs() -> None:
    _bundles_of(0)
    model, compressor = _start()
    optimizer = distributed(model, compressor)
    exchange(model, optimizer, targets(SHAPES, hvd.rank(), 0))  # The ranks agree.
    _bundles_of(DEFAULT_LIMIT)
    collectives, started = compressor._collectives, {}
    gather = collectives.gather

    def noting(message: torch.Tensor, name: str) -> int:
        started[name] = (time.monotonic(), threading.current_thread().name)
        return gather(message, name)

    collectives.gather = noting
    gradients = targets(SHAPES, hvd.rank(), 1)
    loss = (model.c * gradients["c"]).sum()
    for name, rest in (("b", 2.0), ("a", 0.5)):  # Backwards: a, then b, then c.
        loss = _Sleep.apply(loss, rest) + (getattr(model, name) * gradients[name]).sum()
    optimizer.zero_grad()
    loss.backward()
    over = time.monotonic()
    optimizer.step()
    for name in ("a", "b"):
        bundle = len(SHAPES) - 1 - list(SHAPES).index(name)
        when, thread = started[f"bundle {bundle} from owners"]
        assert when < over - 1.0, f"{name}: {over - when} s before the end"
        assert thread == "hvd_compress courier"
    assert_identical_on_all_ranks(model)


@on_ranks(2)
def test_the_helper_sleeps() -> None:
    model, compressor = _start()
    optimizer = distributed(model, compressor)
    exchange(model, optimizer, targets(SHAPES, hvd.rank(), 0))
    helpers = [t for t in threading.enumerate() if t.name == "hvd_compress courier"]
    clock = time.pthread_getcpuclockid(helpers[-1].ident)

    def used() -> float:
        return time.clock_gettime(clock)

    time.sleep(0.2)  # It may still be on its way to bed.
    before = used()
    time.sleep(0.5)
    assert used() - before < 1e-3, "nothing is on its way"
    hvd.barrier()
    if hvd.rank() == 1:
        time.sleep(1.0)
    before, start = used(), time.perf_counter()
    model(targets(SHAPES, hvd.rank(), 1)).backward()
    compressor._step._courier.wait()
    if hvd.rank() == 0:
        assert time.perf_counter() - start > 0.8
        assert used() - before < 0.2
    optimizer.step()


@on_ranks(2)
def test_the_helper_goes_with_its_compressor() -> None:
    import gc

    model, compressor = _start()
    optimizer = distributed(model, compressor)
    exchange(model, optimizer, targets(SHAPES, hvd.rank(), 0))
    desk = compressor._step._courier._desk
    assert any(t is desk._thread for t in threading.enumerate())
    del model, compressor, optimizer
    gc.collect()
    desk._thread.join(5.0)
    assert not desk._thread.is_alive()


@on_ranks(2)
def test_one_bit_carries_two_valued_gradients_as_stock_horovod_does() -> None:
    """One rank has them, the other has zeros: the average is two-valued, too, and both shots are exact."""
    model, plain = Probe(SHAPES), Probe(SHAPES)
    ours = distributed(
        model, hvdc.OneBit(model.named_parameters(), exchange="two_shot", threshold=0)
    )
    stock = distributed(plain, hvd.Compression.none)
    for step in range(3):
        gradients = two_valued(SHAPES, 0, step)
        if hvd.rank() == step % 2:
            gradients = {name: torch.zeros_like(g) for name, g in gradients.items()}
        assert_same_bits(exchange(model, ours, gradients), exchange(plain, stock, gradients))
