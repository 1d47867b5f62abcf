"""Plain casts, held to torch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_compress.codecs import BF16, FP16, NoCompression, NoiseKey
from hvd_compress.kernels.reference import quantize
from tests.codecs.cases import floats, normal, same_bits, special_values, tensors, through

VALUES = np.concatenate(
    [
        *special_values(300).values(),
        normal((5000,)) * np.float32(10.0) ** np.arange(-10, 10).repeat(250).astype(np.float32),
        np.array([65504, 65519.99, 65520, 1e5, np.inf, -np.inf, 3.4e38, 3.3961776e38], np.float32),
        # Halfway between two bfloat16 numbers, and between two float16 numbers.
        np.float32(1) + np.arange(64, dtype=np.float32) * np.float32(2.0**-8),
        np.float32(1) + np.arange(64, dtype=np.float32) * np.float32(2.0**-11),
    ]
)


def test_fp16_rounds_as_torch_does() -> None:
    expected = torch.from_numpy(VALUES).half().float().numpy()
    assert same_bits(through(FP16(), VALUES), expected)


def test_bf16_rounds_as_torch_does() -> None:
    expected = torch.from_numpy(VALUES).bfloat16().float().numpy()
    assert same_bits(through(BF16(), VALUES), expected)


@given(tensors(40, floats()), st.integers(0, 100))
def test_bf16_at_random_is_one_of_the_neighbours(x: np.ndarray, step: int) -> None:
    codes = quantize(BF16("stochastic"), x.shape, x, NoiseKey(step=step))[1].view("<u2")
    below = (x.view(np.uint32) >> 16).astype(np.uint16)
    exact = x.view(np.uint32) % 2**16 == 0
    assert np.all((codes == below) | (~exact & (codes == below + 1)))


@pytest.mark.parametrize("sign", (1, -1))
@pytest.mark.parametrize("low", (0x3F80, 0x0001, 0x7F7F))
def test_bf16_at_random_rounds_up_as_often_as_a_number_is_close(low: int, sign: int) -> None:
    """Checks ordinary and subnormal numbers, and the largest ones before infinity."""
    bits = np.full(40_000, low << 16 | 0x4000, np.uint32)
    x = bits.view(np.float32) * np.float32(sign)
    codes = quantize(BF16("stochastic"), x.shape, x, NoiseKey(seed=3))[1].view("<u2") & 0x7FFF
    assert set(codes.tolist()) == {low, low + 1}
    assert np.mean(codes - low) == pytest.approx(1 / 4, abs=5 * (3 / 16 / x.size) ** 0.5)


def test_none_keeps_every_bit() -> None:
    assert np.array_equal(through(NoCompression(), VALUES).view(np.uint32), VALUES.view(np.uint32))


def test_the_one_nan_of_each_type() -> None:
    bits = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF], np.uint32)
    nan = bits.view(np.float32)
    for codec, dtype, want in (
        (FP16(), "<u2", 0x7E00),
        (BF16(), "<u2", 0x7FC0),
        (BF16("stochastic"), "<u2", 0x7FC0),
        (NoCompression(), "<u4", 0x7FC00000),
    ):
        _, codes = quantize(codec, nan.shape, nan, NoiseKey())
        assert codes.view(dtype).tolist() == [want] * nan.size


def test_sizes() -> None:
    for codec, each in ((FP16(), 2), (BF16(), 2), (NoCompression(), 4)):
        assert codec.payload_bytes((1000,)) == 32 + -(-1000 * each // 16) * 16
        assert codec.payload_bytes((0,)) == 32
