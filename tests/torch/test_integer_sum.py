"""The integer sum on real ranks, against all ranks simulated by the oracle."""

from __future__ import annotations

import copy
import math
from typing import Any

import horovod.torch as hvd
import pytest
import torch

import hvd_compress.torch as hvdc
from hvd_compress.codecs import (
    ECQ,
    Codec,
    ErrorFeedback,
    LevelCodec,
    NoCompression,
    OneBit,
    Ternary,
)
from tests.ranks import on_ranks
from tests.torch.probes import (
    IntegerSumSimulation,
    Probe,
    assert_identical_on_all_ranks,
    assert_same_bits,
    distributed,
    exchange,
    targets,
)

SHAPES = {"a": (40, 170), "b": (3000,), "c": (8, 3, 5, 5), "tiny": (3,), "scalar": ()}
NONE = ErrorFeedback(alpha=0.0)
WEAK = ErrorFeedback(0.01, 1.0)
ROWS: list[tuple[LevelCodec, ErrorFeedback]] = [
    (Ternary(), NONE),
    (Ternary(bucket="tensor", clip=None), NONE),
    (Ternary(64), ErrorFeedback(0.1, 0.9)),
    (ECQ(), WEAK),
    (ECQ(2, "linf", "tensor"), NONE),
    (ECQ(100, "l2", 128), ErrorFeedback()),
]


def _start(
    codec: Codec = ECQ(),  # noqa: B008
    feedback: ErrorFeedback = WEAK,
    **options: Any,
) -> tuple[Probe, hvdc.Compressor]:
    model = Probe(SHAPES)
    compressor = hvdc.Compressor(
        model.named_parameters(),
        codec,
        feedback,
        **{"exchange": "integer_sum", "threshold": 0, **options},
    )
    return model, compressor


def _gradients(step: int) -> list[dict[str, torch.Tensor]]:
    """Of all ranks; the scales of one rank are far above those of the others, in some steps."""
    return [targets(SHAPES, r, step, 10.0 ** (step * (r % 2))) for r in range(hvd.size())]


def _every_codec_matches_the_simulation() -> None:
    rank, size = hvd.rank(), hvd.size()
    for codec, feedback in ROWS:
        model, compressor = _start(codec, feedback, seed=7)
        optimizer = distributed(model, compressor)
        simulation = IntegerSumSimulation(codec, feedback, SHAPES, size, seed=7)
        for step in range(3):
            gradients = _gradients(step)
            got = exchange(model, optimizer, gradients[rank])
            assert_same_bits(got, simulation.average(gradients))
        if feedback.enabled:
            tensors = compressor.state_dict()["tensors"]
            assert_same_bits(
                {name: tensors[name]["residual"] for name in SHAPES},
                {n: torch.from_numpy(h) for n, h in simulation.residuals[rank].items()},
            )
        assert_identical_on_all_ranks(model)


@on_ranks(2)
def test_every_codec_on_two_ranks() -> None:
    _every_codec_matches_the_simulation()


@on_ranks(3)
def test_every_codec_on_three_ranks() -> None:
    _every_codec_matches_the_simulation()


@on_ranks(1, environment={"HOROVOD_ELASTIC": "1"})
def test_a_single_rank_that_exchanges_with_itself() -> None:
    _every_codec_matches_the_simulation()


def _same_as_simulated(factor: float = 1.0, **options: Any) -> None:
    model, compressor = _start()
    optimizer = distributed(model, compressor, **options)
    simulation = IntegerSumSimulation(ECQ(), WEAK, SHAPES, hvd.size())
    for step in range(2):
        gradients = _gradients(step)
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
    simulation = IntegerSumSimulation(ECQ(), WEAK, SHAPES, hvd.size())
    names = list(SHAPES)
    for step in range(5):
        gradients = _gradients(step % 2)
        turn = (step + hvd.rank()) % len(names)
        got = exchange(model, optimizer, gradients[hvd.rank()], names[turn:] + names[:turn])
        assert_same_bits(got, simulation.average(gradients))


@on_ranks(3)
def test_the_average_is_unbiased() -> None:
    """Over many steps of the same gradients, whose scales differ between the ranks."""
    model, compressor = _start(Ternary(clip=None), NONE)
    optimizer = distributed(model, compressor)
    gradients, steps = _gradients(1), 300
    mean = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for _ in range(steps):
        got = exchange(model, optimizer, gradients[hvd.rank()])
        for name in SHAPES:
            mean[name] += got[name] / steps
    for name in SHAPES:
        everybody = torch.stack([one[name] for one in gradients])
        # A rank's variance is |x| (unit - |x|), of levels that are 0 or one unit.
        unit = everybody.abs().max()
        variance = (everybody.abs() * (unit - everybody.abs())).sum(0) / hvd.size() ** 2 / steps
        error = (mean[name] - everybody.mean(0)).abs()
        assert (error <= 5.5 * variance.sqrt() + 1e-6 * unit).all(), name


@on_ranks(2)
def test_half_precision_models() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        model = Probe(SHAPES, dtype)
        compressor = hvdc.ECQ(model.named_parameters(), exchange="integer_sum", threshold=0)
        optimizer = distributed(model, compressor)
        simulation = IntegerSumSimulation(ECQ(), WEAK, SHAPES, hvd.size())
        for step in range(2):
            gradients = [
                {n: g.to(dtype).float() for n, g in targets(SHAPES, r, step).items()}
                for r in range(hvd.size())
            ]
            mine = {name: g.to(dtype) for name, g in gradients[hvd.rank()].items()}
            got = exchange(model, optimizer, mine)
            expected = simulation.average(gradients)
            assert_same_bits(got, {name: value.to(dtype) for name, value in expected.items()})


@on_ranks(3)
def test_counters_follow_the_formulas() -> None:
    model, compressor = _start(Ternary(512), NONE)
    optimizer = distributed(model, compressor)
    for step in range(2):
        exchange(model, optimizer, targets(SHAPES, hvd.rank(), step))
    message = 0
    for shape in SHAPES.values():
        count = math.prod(shape)
        blocks, rest = divmod(count, 512)
        # Sums of three ranks are from -3 to 3: three bits, ten lanes a word.
        words = blocks * math.ceil(512 / 10) + math.ceil(rest / 10)
        message += 4 * math.ceil(count / 512) + 4 * (words + 1) + 12
    counters = compressor.counters
    assert counters.message_bytes == 2 * message
    assert math.isclose(counters.wire_bytes, 2 * 2 * 2 / 3 * message)
    assert counters.encoded_elements == 2 * sum(map(math.prod, SHAPES.values()))
    assert counters.encode_seconds > 0 and counters.decode_seconds > 0


@on_ranks(2)
def test_zeros_and_gradients_missing_on_some_ranks() -> None:
    model, compressor = _start()
    optimizer = distributed(model, compressor)
    simulation = IntegerSumSimulation(ECQ(), WEAK, SHAPES, hvd.size())
    absent = [{"a", "tiny"}, {"b", "tiny"}]
    for step in range(3):
        gradients = [targets(SHAPES, r, step) for r in range(hvd.size())]
        for rank in range(hvd.size()):
            for name in absent[(rank + step) % 2]:
                gradients[rank][name].zero_()
        used = [n for n in SHAPES if n not in absent[(hvd.rank() + step) % 2] or n == "tiny"]
        got = exchange(model, optimizer, gradients[hvd.rank()], used)
        assert_same_bits(got, simulation.average(gradients))
        assert not got["tiny"].any()


@on_ranks(2)
def test_a_nonfinite_gradient_on_one_rank() -> None:
    for codec, feedback in ((Ternary(64), ErrorFeedback(0.1, 0.9)), (ECQ(), WEAK)):
        for bad in (math.inf, -math.inf, math.nan):
            model, compressor = _start(codec, feedback)
            optimizer = distributed(model, compressor)
            for step in range(2):
                exchange(model, optimizer, targets(SHAPES, hvd.rank(), step))
            tensors = compressor.state_dict()["tensors"]
            before = {name: tensors[name]["residual"].clone() for name in SHAPES}
            gradients = targets(SHAPES, hvd.rank(), 2)
            if hvd.rank() == 1:
                gradients["a"][17, 3] = bad
            optimizer.zero_grad()
            model(gradients).backward()
            optimizer.synchronize()
            assert torch.isnan(model.a.grad[17, 3])
            assert torch.isfinite(model.b.grad).all()
            for name in SHAPES:
                after = compressor.state_dict()["tensors"][name]["residual"]
                largest = before[name].abs().max() + gradients[name].nan_to_num(0, 0, 0).abs().max()
                assert (after - before[name]).abs().max() <= 2e-6 * largest, (codec, bad, name)
            with optimizer.skip_synchronize():
                optimizer.zero_grad()
            got = exchange(model, optimizer, targets(SHAPES, hvd.rank(), 3))
            assert all(torch.isfinite(g).all() for g in got.values())


@on_ranks(2)
def test_a_change_of_codec_and_a_checkpoint_lose_no_mass() -> None:
    model, compressor = _start()
    optimizer = distributed(model, compressor)
    total = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    sent = copy.deepcopy(total)
    changes: dict[int, Codec] = {2: ECQ(8, "linf"), 4: ECQ(100, "l2", 128), 6: NoCompression()}
    for step in range(8):
        if step in changes:
            compressor.set_codec(changes[step])
        if step == 1:
            state = copy.deepcopy(compressor.state_dict())
            model, compressor = _start()
            compressor.load_state_dict(state)
            optimizer = distributed(model, compressor)
        gradients = _gradients(0 if step % 2 else 1)
        got = exchange(model, optimizer, gradients[hvd.rank()])
        for name in SHAPES:
            total[name] += sum(g[name] for g in gradients) / hvd.size()
            sent[name] += got[name]
    assert compressor.residual_norm() == 0
    for name in SHAPES:
        assert torch.allclose(sent[name], total[name], atol=1e-3), name


@on_ranks(3)
def test_join_of_the_middle_rank() -> None:
    """Steps without the rank that has left go uncompressed, and what was not sent before waits."""
    model, compressor = _start()
    optimizer = distributed(model, compressor)
    for step in range(2 if hvd.rank() == 1 else 4):
        before = compressor.residual_norm()
        gradients = [targets(SHAPES, r, step) for r in range(hvd.size())]
        got = exchange(model, optimizer, gradients[hvd.rank()])
        if step >= 2:
            assert math.isclose(before, compressor.residual_norm(), rel_tol=1e-6)
            for name in SHAPES:
                mean = (gradients[0][name] + gradients[2][name]) / hvd.size()
                assert torch.allclose(got[name], mean, atol=1e-6), name
    hvd.join()


@on_ranks(2)
def test_other_exchanges_by_layer_cannot_be_chosen_but_dense_can() -> None:
    model, compressor = _start(layers={"b": None, "c": "qsgd"})
    optimizer = distributed(model, compressor)
    routes = compressor.routes()
    assert routes["b"].dense and routes["c"].exchange == "integer_sum"
    gradients = [targets(SHAPES, r, 0) for r in range(hvd.size())]
    got = exchange(model, optimizer, gradients[hvd.rank()])
    assert torch.allclose(got["b"], (gradients[0]["b"] + gradients[1]["b"]) / 2)


@on_ranks(3, alone=True)
def test_a_rank_that_fails_between_the_sums() -> None:
    model, compressor = _start()
    optimizer = distributed(model, compressor)
    exchange(model, optimizer, targets(SHAPES, hvd.rank(), 0))
    error: tuple[type[Exception], str] = (
        hvdc.ExchangeError,
        "a: expected the levels of all 3 ranks, got those of 2",
    )
    if hvd.rank() == 1:
        error = (ArithmeticError, "on purpose")
        kernels = compressor._exchanges["integer_sum"]._kernels
        encode = kernels.encode

        def failing(codec: Any, shape: tuple[int, ...], *arguments: Any, **named: Any) -> None:
            if shape == SHAPES["a"]:
                raise ArithmeticError("on purpose")
            encode(codec, shape, *arguments, **named)

        kernels.encode = failing
    with pytest.raises(error[0], match=error[1]):
        exchange(model, optimizer, targets(SHAPES, hvd.rank(), 1))


@on_ranks(1, environment={"HOROVOD_ELASTIC": "1"})
def test_wrong_codecs_fail_at_construction() -> None:
    with pytest.raises(ValueError, match="a: expected a codec of evenly spaced levels around 0"):
        _start(OneBit(), ErrorFeedback())
    with pytest.raises(ValueError, match="b: expected a codec of evenly spaced levels around 0"):
        _start(layers={"b": "int8"})
    _, compressor = _start()
    with pytest.raises(ValueError, match="expected a codec of evenly spaced levels"):
        compressor.set_codec(OneBit())
