"""Residuals in bfloat16: how they are rounded, and what that does to what is sent."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_compress import Route
from hvd_compress.codecs import ECQ, ErrorFeedback, NoiseKey, OneBit, PowerSGD
from hvd_compress.codecs.noise import philox, rounding, uniform
from hvd_compress.kernels.reference import dequantize, quantize
from tests.codecs.cases import encode, floats, normal, tensors

ROUNDED = ErrorFeedback(1.0, 1.0, "bfloat16")


def test_the_numbers_of_the_documented_words() -> None:
    """docs/codecs/error_feedback.md, element by element."""
    key = NoiseKey(seed=3, rank=1, tensor=9, step=2**33 + 5)
    got = rounding(2500, key)
    for i in (0, 15, 16, 127, 128, 1000, 1023, 1024, 2499):
        row, word, half, lane = i % 1024 // 128, i % 128 // 32, i % 32 // 16, i % 16
        counter = np.array([16 * (i // 1024) + lane, 9, 5, 2 + 2**31], np.uint32)[:, None]
        number = int(philox(counter, (3, 1))[word, 0])
        assert got[i] == (number >> 16 * half) % 2**16 ^ row << 13, i


def test_the_numbers_are_uniform_and_not_the_codecs() -> None:
    numbers = rounding(1 << 20, NoiseKey(1, 2, 3, 4))
    found = np.bincount(numbers >> 8, minlength=256)
    assert numbers.max() < 2**16 and np.abs(found - 4096).max() < 6 * math.sqrt(4096)
    for place in range(8):  # The rows that share words, each alone.
        row = numbers.reshape(-1, 8, 128)[:, place].reshape(-1)
        assert abs(row.mean() - 32767.5) < 6 * 18919 / math.sqrt(row.size)
    others = uniform(1 << 20, NoiseKey(1, 2, 3, 4))
    assert abs(np.corrcoef(numbers, others)[0, 1]) < 6 / 1024


@settings(deadline=None)
@given(st.data())
def test_residuals_are_neighbours_in_bfloat16(data: st.DataObject) -> None:
    """Numbers that bfloat16 has stay as they are."""
    kept = data.draw(tensors(200, floats(1e38)))
    zeros, key = np.zeros(200, np.float32), NoiseKey(step=data.draw(st.integers(0, 2**64 - 1)))
    got = ROUNDED.carry(kept, zeros, zeros, key)
    bits, rounded = (x.view(np.uint32).astype(np.int64) for x in (kept + zeros, got))
    assert not (rounded & 0xFFFF).any()
    low = bits >> 16 << 16
    assert np.all((rounded == low) | ((rounded == low + 2**16) & (bits != low)))
    assert np.array_equal(ROUNDED.carry(got, zeros, zeros, key), got)


def test_rounding_has_no_bias() -> None:
    kept = np.repeat(normal((64,), seed=4), 1024)
    zeros = np.zeros_like(kept)
    got = ROUNDED.carry(kept, zeros, zeros, NoiseKey()).reshape(64, 1024)
    step = 2.0 ** (np.floor(np.log2(np.abs(kept[::1024]))) - 7)
    assert np.all(np.abs(got.mean(1) - kept[::1024]) <= 6 * step / 2 / math.sqrt(1024))


def test_small_parts_add_up() -> None:
    """Rounding to nearest would lose them: each is less than half a step of what is there already."""
    residual, part = np.full(4096, 64, np.float32), np.full(4096, 0.125, np.float32)
    nothing = np.zeros_like(part)
    for step in range(256):
        residual = ROUNDED.carry(part, residual, nothing, NoiseKey(step=step))
    assert abs(residual.mean() - 96) < 0.1


@pytest.mark.parametrize(
    "codec, alpha", ((OneBit(), 1.0), (ECQ(), 0.01)), ids=("onebit", "ecq with weak feedback")
)
def test_what_is_sent_is_as_near_as_with_residuals_in_float32(codec: OneBit, alpha: float) -> None:
    """The sums of 200 steps differ by what the residuals differ by, and no residual is larger."""
    shape, sums, norms = (4096,), {}, {}
    for dtype in ("float32", "bfloat16"):
        feedback = ErrorFeedback(alpha, 1.0, dtype)  # type: ignore[arg-type]
        residual = np.zeros(4096, np.float32)
        total = np.zeros(4096)
        for step in range(200):
            g, noise = normal(shape, seed=step % 7) + np.float32(0.2), NoiseKey(step=step)
            x = feedback.compensate(g, residual)
            sent = dequantize(codec, shape, *quantize(codec, shape, x, noise))
            residual = feedback.carry(g, residual, sent, noise)
            total += g - sent
        # All that was not sent is in the residual, but for 200 roundings.
        error = np.linalg.norm(total - residual)
        rounding_error = 0 if dtype == "float32" else 2.0**-8 * np.linalg.norm(residual)
        assert error <= 1e-3 + math.sqrt(200) * rounding_error
        sums[dtype], norms[dtype] = total, float(np.linalg.norm(residual))
    assert norms["bfloat16"] < 1.02 * norms["float32"]
    assert np.linalg.norm(sums["bfloat16"] - sums["float32"]) < 0.3 * norms["float32"]


def test_the_reference_rounds_with_the_noise_of_its_call() -> None:
    shape, gradient = (3000,), normal((3000,))
    made = []
    for noise in (NoiseKey(step=1), NoiseKey(step=1), NoiseKey(step=2), NoiseKey(1, step=1)):
        residual = np.zeros(3000, np.float32)
        encode(OneBit(), shape, gradient, feedback=ROUNDED, residual=residual, noise=noise)
        made.append(residual)
    assert np.array_equal(made[0], made[1])
    assert not np.array_equal(made[0], made[2]) and not np.array_equal(made[0], made[3])


def test_what_cannot_be_kept_in_bfloat16() -> None:
    with pytest.raises(ValueError, match=r"residual_dtype: expected one of .*, got 'float16'"):
        ErrorFeedback(residual_dtype="float16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"expected residual_dtype='float32' for PowerSGD"):
        PowerSGD().check_feedback(ROUNDED, (40, 40))
    with pytest.raises(ValueError, match=r"expected residual_dtype='float32' for PowerSGD"):
        Route(PowerSGD(), ROUNDED)
