"""The 8-bit types, beyond the contract (Dettmers, 2016, section 3, and OCP FP8)."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_compress.codecs import Int8, NoiseKey
from hvd_compress.codecs.int8 import Kind, magnitudes
from hvd_compress.kernels.reference import quantize
from tests.codecs.cases import normal, tensors, through

KINDS = ("dynamic", "linear", "mantissa", "static")

TABLE_1 = {
    ("U(0, 1)", 1): (1.39, 2.16, 7.22, 4.82),
    ("N(0, 1)", 1): (2.46, 6.47, 6.89, 6.3),
    ("N(0, 10^2)", 2): (2.49, 6.44, 7.19, 6.28),
    ("N(0, 0.2^2)", 1): (2.45, 6.15, 8.26, 6.58),
}
"""Mean relative errors in %, by distribution and exponent offset, in the order of KINDS."""


TREES = {
    ("U(0, 1)", 1): (0.94, 3.26),
    ("N(0, 1)", 1): (1.62, 4.42),
    ("N(0, 10^2)", 2): (1.62, 4.42),
    ("N(0, 0.2^2)", 1): (1.62, 4.56),
}
"""The errors of this package's trees; with equal parts of (0.1, 1), they are larger by at least 6%."""


@pytest.mark.parametrize(("distribution", "offset"), TABLE_1)
def test_relative_errors_beside_the_papers(distribution: str, offset: int) -> None:
    rng = np.random.default_rng(5)
    count = 1_000_000
    sample = {
        "U(0, 1)": lambda: rng.random(count),
        "N(0, 1)": lambda: rng.normal(0, 1, count),
        "N(0, 10^2)": lambda: rng.normal(0, 10, count),
        "N(0, 0.2^2)": lambda: rng.normal(0, 0.2, count),
    }[distribution]().astype(np.float32)
    sample = sample[sample != 0]
    wide = sample.astype(np.float64)
    errors = {}
    for kind in KINDS:
        decoded = through(Int8(kind, "tensor", offset), sample)  # type: ignore[arg-type]
        errors[kind] = 100 * np.mean(np.abs(wide - decoded) / np.abs(wide))
    for kind, most in zip(KINDS, TABLE_1[distribution, offset], strict=True):
        assert errors[kind] < most, kind
    trees = errors["dynamic"], errors["static"]
    assert trees == pytest.approx(TREES[distribution, offset], rel=0.03)
    assert errors["dynamic"] < errors["linear"]
    assert errors["dynamic"] < errors["static"] < errors["mantissa"]


def leaf(path: str) -> Fraction:
    """The middle of what is left of (0.1, 1) after cutting at 0.45 and then in half."""
    low, cut, high = Fraction(1, 10), Fraction(45, 100), Fraction(1)
    for bit in path:
        low, high = (cut, high) if bit == "1" else (low, cut)
        cut = (low + high) / 2
    return cut


def test_dynamic_tree_codes() -> None:
    """Zeros, a one, then the path through the tree; the codes that leave no path are 0 and 1."""
    table = magnitudes("dynamic")
    assert table[:2].tolist() == [0, 1]
    for code in range(2, 128):
        zeros, path = f"{code:07b}".split("1", 1)
        assert table[code] == np.float32(leaf(path) / 10 ** len(zeros)), bin(code)


def test_static_tree_codes() -> None:
    table = magnitudes("static")
    for code in range(128):
        assert table[code] == np.float32(leaf(f"{code % 16:04b}") / 10 ** (code // 16)), bin(code)


@pytest.mark.parametrize("sign", (1, -1))
@pytest.mark.parametrize("largest", (1.0, 3e-36, 0.7, 12345.678, np.finfo(np.float32).max))
def test_the_largest_of_a_group_is_exact(largest: float, sign: int) -> None:
    x = np.array([sign * largest, largest / 3, 0], np.float32)
    assert through(Int8("dynamic"), x)[0] == x[0]


def test_mantissa_codes() -> None:
    table = magnitudes("mantissa")
    assert table[0b000_0010] == np.float32(0.2)
    assert table[0b000_1111] == np.float32(1.5)
    assert table[0b011_0111] == np.float32(0.7e-3)
    assert table[0b111_0001] == np.float32(0.1e-7)
    assert (table[::16] == 0).all()


@pytest.mark.parametrize(
    ("kind", "value", "code", "decoded"),
    (
        # Section 3.1's numbers. Its 0.23125 for a static tree is the last cut of this path; the
        # middle of what that cut leaves is nearer.
        ("dynamic", 0.2345678, 0b0_1_001100, 0.23671875),
        ("dynamic", -0.2345678, 0b1_1_001100, -0.23671875),
        ("dynamic", 0.0000234, 0b0_0000_1_00, 0.00001875),
        ("static", 0.2345678, 0b0_000_0011, 0.253125),
        ("static", 0.0000234, 0b0_100_0011, 0.0000253125),
        ("mantissa", 0.2345678, 0b0_000_0010, 0.2),
        ("mantissa", -0.0000234, 0b1_100_0010, -0.00002),
        ("linear", 0.2345678, 30, 30 / 127),
        ("linear", -0.2345678, 256 - 30, -30 / 127),
    ),
)
def test_the_papers_examples(kind: str, value: float, code: int, decoded: float) -> None:
    codec = Int8(kind, "tensor", offset=0)  # type: ignore[arg-type]
    x = np.array([value, 1.0], np.float32)
    _, codes = quantize(codec, x.shape, x, NoiseKey())
    assert codes[0] == code
    assert through(codec, x)[0] == pytest.approx(decoded, rel=1e-6)


@pytest.mark.parametrize("kind", ("dynamic", "static", "mantissa"))
def test_every_element_goes_to_the_nearest_magnitude(kind: str) -> None:
    codec = Int8(kind, "tensor", offset=0)  # type: ignore[arg-type]
    table = magnitudes(codec.kind).astype(np.float64)
    x = np.concatenate([[1.0], 10.0 ** np.linspace(-8, 0, 4001), table, [0.0]]).astype(np.float32)
    error = np.abs(through(codec, x) - x.astype(np.float64))
    nearest = np.abs(table[None, :] - x[:, None].astype(np.float64)).min(axis=1)
    # Thresholds are middles rounded to float32.
    assert np.all(error <= nearest + 2.0**-23 * np.abs(x))


def test_a_tie_goes_to_the_upper_magnitude_and_linear_to_the_even_one() -> None:
    middle = np.float32((magnitudes("static")[3].astype(np.float64) + magnitudes("static")[4]) / 2)
    below = np.nextafter(middle, np.float32(0))
    _, codes = quantize(
        Int8("static", 64, 0), (2,), np.array([middle, below], np.float32), NoiseKey()
    )
    assert codes.tolist() == [4, 3]
    x = np.array([127, 0.5, 1.5, 2.5, -0.5, -1.5], np.float32)
    _, codes = quantize(Int8("linear"), x.shape, x, NoiseKey())
    assert codes.view(np.int8).tolist() == [127, 0, 2, 2, 0, -2]


def test_signs_of_zeros() -> None:
    x = np.array([0.0, -0.0, 1.0], np.float32)
    for kind in (*KINDS, *FP8):
        _, codes = quantize(Int8(kind), x.shape, x, NoiseKey())  # type: ignore[arg-type]
        if kind == "linear":
            assert codes[:2].tolist() == [0, 0]
        else:
            assert codes[1] == codes[0] | 0x80


@pytest.mark.parametrize("kind", ("static", "mantissa"))
def test_what_the_offset_cannot_reach_is_clipped(kind: str) -> None:
    x = np.array([1e20, -3e38, 5.0], np.float32)
    codec = Int8(kind, offset=1)  # type: ignore[arg-type]
    top = np.float32(magnitudes(codec.kind).max()) * np.float32(10)
    assert through(codec, x)[:2].tolist() == [top, -top]


def test_offsets_shift_by_decades() -> None:
    x = normal((500,), scale=0.1)
    for kind in ("static", "mantissa"):
        here = through(Int8(kind, offset=0), x)
        shifted = through(Int8(kind, offset=3), x * np.float32(1000))
        agree = np.isclose(shifted, here * 1000, rtol=1e-5)
        assert agree.mean() > 0.99, "all but ties, which rounding may push to either side"


FP8 = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}
"""PyTorch's types and their largest numbers."""
fp8 = pytest.mark.parametrize("kind", FP8)


def check_cast(kind: Kind, x: np.ndarray) -> None:
    """Compares codes and values with PyTorch's cast; the type's largest number makes the scale exact."""
    dtype, top = FP8[kind]
    x = np.append(x, np.float32(top)).astype(np.float32)
    cast = torch.from_numpy(x).to(dtype)
    scales, codes = quantize(Int8(kind, "tensor"), x.shape, x, NoiseKey())
    assert scales == np.float32(top / 1.75)
    assert np.array_equal(codes, cast.view(torch.uint8).numpy())
    decoded = through(Int8(kind, "tensor"), x)
    assert np.array_equal(decoded.view(np.uint32), cast.float().numpy().view(np.uint32))


@fp8
@given(data=st.data())
def test_fp8_is_pytorchs_cast(kind: Kind, data: st.DataObject) -> None:
    top = FP8[kind][1]
    check_cast(kind, data.draw(tensors(20, st.floats(-top, top, width=32))))


@fp8
def test_fp8_rounds_ties_to_even_as_pytorch_does(kind: Kind) -> None:
    """Every number of the type, every middle of two, and the floats next to these."""
    dtype, top = FP8[kind]
    values = torch.arange(128, dtype=torch.uint8).view(dtype).float().numpy()
    values = values[np.isfinite(values)]
    middles = (values[1:] + values[:-1]) / 2
    around = np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(top))
    x = np.concatenate([values, middles, *around])
    check_cast(kind, np.concatenate([x, -x]))


@fp8
def test_codes_that_no_encoder_writes_decode_as_in_pytorch(kind: Kind) -> None:
    codes = np.arange(256, dtype=np.uint8)
    dtype, top = FP8[kind]
    expected = torch.from_numpy(codes).view(dtype).float().numpy()
    decoded = Int8(kind, "tensor").dequantize(np.float32([top / 1.75]), codes, (256,))
    np.testing.assert_array_equal(decoded, expected)
