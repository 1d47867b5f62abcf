"""The contract that every codec must keep, tried with one table of configurations."""

from __future__ import annotations

import json
import math
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_compress import QSGD
from hvd_compress.codecs import (
    CODECS,
    ECQ,
    Codec,
    ErrorFeedback,
    Int8,
    NoCompression,
    NoiseKey,
    Ternary,
    TopK,
    codec_from_config,
    read_header,
)
from hvd_compress.codecs.int8 import Kind
from hvd_compress.codecs.payload import FLAG_NONFINITE
from hvd_compress.codecs.rotation import rotate
from hvd_compress.kernels.reference import quantize
from hvd_compress.testing import check_codec
from tests.codecs.cases import (
    OFF,
    decode,
    encode,
    floats,
    group_of_each,
    normal,
    same_bits,
    shapes,
    special_values,
    tensors,
    through,
)
from tests.codecs.rows import FEW, ROWS, Row

EPS = 2.0**-24
"""Half a unit in the last place of 1: the relative error of one float32 operation."""

MODES = (OFF, ErrorFeedback(1.0, 1.0), ErrorFeedback(0.37, 0.83))

every_row = pytest.mark.parametrize("row", ROWS, ids=str)


def test_the_table_holds_every_codec() -> None:
    assert QSGD().to_config() == ECQ().to_config()  # The same bytes, with other feedback.
    assert {type(row.codec) for row in ROWS} == set(CODECS.values()) - {QSGD}
    assert len({row.name for row in ROWS}) == len(ROWS)


@every_row
def test_the_contract_that_other_packages_can_check(row: Row) -> None:
    clips = getattr(row.codec, "clip", None) is not None

    def clipped(x: np.ndarray) -> np.ndarray:
        return levels_around(row, x, quantize(row.codec, x.shape, x, NoiseKey())[0])[0]

    check_codec(row.codec, floor=row.floor, clipped=clipped if clips else None, draws=400)


# Sizes and headers


# Configurations


@every_row
def test_a_configuration_survives_json(row: Row) -> None:
    config = json.loads(json.dumps(row.codec.to_config()))
    assert codec_from_config(config) == row.codec
    assert codec_from_config(config).config_hash() == row.codec.config_hash()


@every_row
def test_the_configuration_hash_is_frozen(row: Row) -> None:
    assert row.codec.config_hash() == row.config_hash


def test_configurations_and_codec_ids_are_distinct() -> None:
    assert len({row.config_hash for row in ROWS}) == len(ROWS)
    assert {codec.name: codec.codec_id for codec in CODECS.values()} == {
        "onebit": 1,
        "int8": 2,
        "ternary": 3,
        "ecq": 4,
        "fp16": 5,
        "bf16": 6,
        "none": 7,
        "topk": 8,
    }


def test_papers_feedback_is_within_its_bounds() -> None:
    for codec in CODECS.values():
        codec().check_feedback(codec.feedback, (1 << 20,))


# Error feedback


@every_row
def test_feedback_loses_nothing_over_many_steps(row: Row) -> None:
    shape = (7, 67)
    feedback = ErrorFeedback(row.feedback.alpha, 1.0)
    if not row.codec.saturates:
        row.codec.check_feedback(feedback, shape)
    residual = np.zeros(math.prod(shape), np.float32)
    given_, sent = np.zeros(residual.size), np.zeros(residual.size)
    largest = 0.0
    steps = 200
    for step in range(steps):
        gradient = normal(shape, seed=step, scale=0.1)
        noise = NoiseKey(step=step)
        payload = encode(
            row.codec, shape, gradient, feedback=feedback, residual=residual, noise=noise
        )
        decoded = decode(row.codec, shape, payload, step)
        given_ += gradient
        sent += decoded
        largest = max(largest, *(float(np.abs(part).max()) for part in (decoded, residual)))
    # A step rounds twice, each time by at most half a unit of the sum of a residual and a gradient.
    assert np.all(np.abs(sent + residual - given_) <= steps * 2 * EPS * (2 * largest + 1))


# Numbers that are not finite


@every_row
@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf), ids=str)
@pytest.mark.parametrize("shape", ((1,), (151, 17), (6, 700)), ids=str)
def test_non_finite_numbers_stay_in_their_group(
    row: Row, shape: tuple[int, ...], bad: float
) -> None:
    count = math.prod(shape)
    feedback = ErrorFeedback(0.37, 0.83)
    for position in {0, count // 2, count - 1}:
        gradient = normal(shape)
        gradient[position] = bad
        clean = gradient.copy()
        clean[position] = 0.0
        before = normal(shape, seed=2)
        residual = before.copy()
        groups = group_of_each(row, count)
        hit = groups == groups[position]

        payload = encode(row.codec, shape, gradient, feedback=feedback, residual=residual)

        assert read_header(payload).flags & FLAG_NONFINITE
        decoded = decode(row.codec, shape, payload)
        assert not np.isfinite(decoded[hit]).any()
        if row.group is not None:
            assert np.isnan(decoded[hit]).all()
        assert same_bits(residual[hit], before[hit])
        rest = before.copy()
        undisturbed = encode(row.codec, shape, clean, feedback=feedback, residual=rest)
        assert same_bits(decoded[~hit], decode(row.codec, shape, undisturbed)[~hit])
        assert same_bits(residual[~hit], rest[~hit])


# Finite numbers of all kinds


def check_finite(row: Row, shape: tuple[int, ...], x: np.ndarray) -> None:
    """The promises about Q(x) alone, for finite x."""
    payload = encode(row.codec, shape, x)
    decoded = decode(row.codec, shape, payload)
    finite = np.isfinite(decoded)
    assert bool(read_header(payload).flags & FLAG_NONFINITE) == (not finite.all())
    if np.abs(x).max(initial=0.0) <= 6e4:
        assert finite.all(), "only what is too large for a scale or for float16 may overflow"
    groups = group_of_each(row, x.size)
    assert set(groups[finite]).isdisjoint(groups[~finite]), "a group is finite or it is not"
    wide, sent = x[finite].astype(np.float64), decoded[finite].astype(np.float64)
    size = np.abs(wide).max(initial=0.0)
    if row.unbiased:
        # Levels reach from minus to plus a scale, which is at most the l2 norm of the tensor; without
        # a scale, to the next bfloat16.
        step, least = (4 * EPS, 0.0) if row.group else (2.0**-7, 2.0**-133)
        if getattr(row.codec, "rotate", False):  # A group's levels may all add up in one element.
            step = math.sqrt(row.codec.bucket)  # type: ignore[attr-defined]
        assert np.abs(sent).max(initial=0.0) <= np.sqrt(np.sum(wide**2)) * (1 + step) + least
    else:
        which = groups[finite]
        error = np.sqrt(np.bincount(which, (wide - sent) ** 2))
        norm = np.sqrt(np.bincount(which, wide**2))
        lengths = np.bincount(which)
        slack = np.sqrt(lengths) * (row.floor + 2.0**-149)
        assert np.all(error <= norm * (1 + 4 * EPS) + slack)
    if not row.floor:
        assert size > 0 or not sent.any(), "zeros are sent as zeros"


@pytest.mark.parametrize("row", FEW, ids=str)
@pytest.mark.parametrize("name", special_values(0))
def test_special_values(row: Row, name: str) -> None:
    for shape in ((), (1,), (64,), (65,), (5, 77), (2561,)):
        x = special_values(math.prod(shape))[name]
        check_finite(row, shape, x)
        for feedback in MODES[1:]:
            residual = np.zeros_like(x)
            payload = encode(row.codec, shape, x, feedback=feedback, residual=residual)
            decoded = decode(row.codec, shape, payload)
            with np.errstate(all="ignore"):
                expected = np.where(np.isfinite(decoded), x - decoded, np.float32(0))
            assert np.array_equal(residual, expected)


LARGEST = np.finfo(np.float32).max


@pytest.mark.parametrize(
    "codec",
    (
        *(Int8(kind) for kind in get_args(Kind)),
        Ternary(clip=None),
        *(ECQ(levels, norm) for norm in ("l2", "linf") for levels in range(1, 128)),
        *(TopK(64, 3, bits) for bits in (1, 2, 8, 32)),
        NoCompression(),
    ),
    ids=str,
)
def test_the_largest_floats_stay_finite(codec: Codec) -> None:
    """Checks the case in which the rounded scale times the largest code would be Inf, too."""
    for sign in (1, -1):
        x = np.zeros(70, np.float32)
        x[3] = sign * LARGEST
        payload = encode(codec, x.shape, x)
        decoded = decode(codec, x.shape, payload)
        assert not read_header(payload).flags & FLAG_NONFINITE and np.isfinite(decoded).all()
        if not codec.saturates:
            assert decoded[3] == pytest.approx(x[3], rel=1e-5)
            assert abs(decoded[3]) <= LARGEST


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_any_finite_tensor(data: st.DataObject) -> None:
    row = data.draw(st.sampled_from(ROWS))
    shape = data.draw(shapes())
    limit = data.draw(st.sampled_from((3e38, 6e4, 1.0, 1e-36)))
    x = data.draw(tensors(math.prod(shape), floats(limit)))
    check_finite(row, shape, x)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_tensor_with_feedback(data: st.DataObject) -> None:
    row = data.draw(st.sampled_from(ROWS))
    shape = data.draw(shapes())
    feedback = data.draw(st.sampled_from(MODES[1:]))
    anything = st.one_of(floats(), st.sampled_from((np.nan, np.inf, -np.inf)))
    gradient = data.draw(tensors(math.prod(shape), anything))
    residual = data.draw(tensors(math.prod(shape), floats()))
    before = residual.copy()

    payload = encode(row.codec, shape, gradient, feedback=feedback, residual=residual)

    decoded = decode(row.codec, shape, payload)
    finite = np.isfinite(decoded)
    assert bool(read_header(payload).flags & FLAG_NONFINITE) == (not finite.all())
    assert not finite[~np.isfinite(gradient)].any()
    with np.errstate(all="ignore"):
        kept = (np.float32(feedback.beta) * before + gradient) - decoded
    assert same_bits(residual, np.where(finite, kept, before))


# Unbiased codecs


def turned(row: Row, x: np.ndarray) -> np.ndarray:
    """The numbers that are rounded to levels: where groups are rotated, others than the tensor's."""
    assert isinstance(row.group, int) or not getattr(row.codec, "rotate", False)
    return rotate(x, row.group) if getattr(row.codec, "rotate", False) else x


def levels_around(row: Row, x: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, ...]:
    """Returns the number that each element must average to, and the two levels around it."""
    if row.group is None:
        unit = np.spacing(np.abs(x)).astype(np.float64) * 2**16  # bfloat16 drops 16 bits
        lower = np.floor(x / unit) * unit
        return x.astype(np.float64), lower, lower + unit
    x = turned(row, x)
    size = row.group if isinstance(row.group, int) else x.size
    unit = np.repeat(scales.astype(np.float64), size)[: x.size]
    top = unit * getattr(row.codec, "levels", 1)
    target = np.clip(x.astype(np.float64), -top, top)
    lower = np.floor(np.divide(target, unit, out=np.zeros_like(unit), where=unit > 0)) * unit
    return target, lower, lower + unit


@pytest.mark.parametrize("row", [row for row in ROWS if row.unbiased], ids=str)
def test_the_expectation_is_the_clipped_input(row: Row) -> None:
    shape = (3, 67)
    x = normal(shape, seed=6)
    steps = 1000
    scales, _ = quantize(row.codec, shape, x, NoiseKey())
    target, lower, upper = levels_around(row, x, scales)
    total, squares = np.zeros(x.size), np.zeros(steps)
    for step in range(steps):
        decoded = turned(row, through(row.codec, x, shape, step=step))
        total += decoded
        squares[step] = np.sum((decoded - target) ** 2)

    # Bernstein's inequality for independent numbers of variance v within a range of width w:
    # P(|mean - expectation| >= t) <= 2 exp(-n t^2 / (2 v + 2 w t / 3)), here at 5 sigma (5.7e-7).
    variance = (target - lower) * (upper - target)
    width = upper - lower
    odds = math.log(2 / 5.7e-7)
    slope = width * odds / (3 * steps)
    tolerance = slope + np.sqrt(slope**2 + 2 * variance * odds / steps)
    # Probabilities are compared in 24 bits after two rounded operations.
    tolerance += 4 * EPS * np.maximum(np.abs(target), width)
    assert np.all(np.abs(total / steps - target) <= tolerance)

    # The whole error of a step is a sum of independent terms: its variance is known as well.
    error = squares.mean() - variance.sum()
    upper_error, lower_error = (upper - target) ** 2, (target - lower) ** 2
    chance = np.divide(target - lower, width, out=np.zeros_like(width), where=width > 0)
    spread = np.sum(chance * (1 - chance) * (upper_error - lower_error) ** 2)
    assert abs(error) <= 5 * math.sqrt(spread / steps) + 1e-5 * variance.sum()
    if getattr(row.codec, "clip", None) is None:
        assert variance.sum() <= row.codec.variance_factor(x.size) * np.sum(target**2)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_the_variance_factor_bounds_the_error_of_any_tensor(data: st.DataObject) -> None:
    row = data.draw(st.sampled_from([row for row in ROWS if row.unbiased]))
    count = data.draw(st.integers(1, 300))
    x = data.draw(tensors(count, floats(1e6)))
    x[np.abs(x) < 1e-20] = 0.0
    scales, _ = quantize(row.codec, (count,), x, NoiseKey())
    target, lower, upper = levels_around(row, x, scales)
    variance = np.sum((target - lower) * (upper - target))
    factor = row.codec.variance_factor(count)
    # A unit of float32 puts the norm itself beside its level.
    rounded = 4 * EPS * np.sum((upper - lower) * np.abs(target))
    assert variance <= factor * np.sum(target**2) * (1 + 1e-5) + rounded
    # What clipping takes away never points the wrong way, so it cannot make feedback unstable.
    x = turned(row, x)
    assert np.all(np.abs(target) <= np.abs(x) * (1 + 4 * EPS))
    assert np.all(target * x >= 0)
