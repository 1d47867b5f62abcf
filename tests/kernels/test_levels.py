"""The CPU's integer sums are the reference's, bit for bit, with any instruction set and threads."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from benchmarks.papers.cpu_levels import CpuLevels
from hvd_compress.codecs import ECQ, Int8, LevelCodec, NoiseKey
from hvd_compress.codecs.packing import lane_bits
from hvd_compress.kernels.native import KernelError
from tests.codecs.cases import normal, special_values
from tests.codecs.rows import Row
from tests.codecs.test_levels import codec_of, every_row
from tests.kernels.arrays import DTYPES, Guarded, as_dtype, assert_same, bits, widened
from tests.kernels.parity import MODES, OFF
from tests.kernels.reference_levels import ReferenceLevels

REFERENCE = ReferenceLevels()
SHAPES = ((), (0,), (3, 0), (1,), (63,), (65,), (151, 17), (2561,), (3, 1377))
NOISE = NoiseKey(seed=3, rank=2, tensor=9, step=2**33 + 1)


def _shared(norms: np.ndarray) -> np.ndarray:
    """Returns norms that are larger, or infinite, in some buckets, as if they came from another rank."""
    with np.errstate(over="ignore"):
        shared = norms * np.float32(1.75)
    shared[1::7] = np.inf
    shared[2::5] = norms[2::5]
    return shared


def _check(
    codec: LevelCodec,
    shape: tuple[int, ...],
    gradient: torch.Tensor,
    mode: int,
    *,
    ranks: int,
    threads: int = 1,
    offset: int = 0,
) -> None:
    """Makes all four calls between guards, and compares the reference."""
    case = f"{codec}, {shape}, {gradient.dtype}, {MODES[mode]}, {ranks} ranks, {threads} threads"
    kernels, feedback = CpuLevels(threads), MODES[mode]
    width = lane_bits(codec.top_level * ranks)
    residual = normal(shape, seed=50, scale=0.3)
    own = np.empty(codec.layout(shape).scales, np.float32)
    words = np.empty(codec.level_words(shape, width), np.int32)
    h = residual.copy() if feedback.enabled else None
    g = widened(gradient)
    REFERENCE.norms(codec, shape, g, own, feedback=feedback, residual=h)
    shared = _shared(own)
    REFERENCE.encode(
        codec, shape, g, shared, words, bits=width, feedback=feedback, residual=h, noise=NOISE
    )

    got = Guarded(gradient, offset)
    norms = Guarded(torch.zeros(own.size), 4)
    packed = Guarded(torch.zeros(words.size, dtype=torch.int32), 4)
    rest = Guarded(torch.from_numpy(residual), 4)
    argument = rest.array if feedback.enabled else None
    kernels.norms(codec, shape, got.array, norms.array, feedback=feedback, residual=argument)
    assert_same(bits(norms.array), bits(own), f"norms: {case}")
    norms.array.copy_(torch.from_numpy(shared))
    kernels.encode(
        codec,
        shape,
        got.array,
        norms.array,
        packed.array,
        bits=width,
        feedback=feedback,
        residual=argument,
        noise=NOISE,
    )
    assert_same(packed.array.numpy(), words, f"words: {case}")

    total = words * ranks  # As if all ranks had the same levels: lanes at their limits.
    out = Guarded(torch.zeros(g.size, dtype=gradient.dtype), offset)
    want = np.empty(g.size, np.float32)
    REFERENCE.decode(codec, shape, shared, total, want, bits=width, scale=1 / 3)
    kernels.decode(
        codec, shape, norms.array, torch.from_numpy(total), out.array, bits=width, scale=1 / 3
    )
    assert_same(bits(out.array), bits(torch.from_numpy(want).to(gradient.dtype)), f"out: {case}")

    if h is not None:
        assert_same(bits(rest.array), bits(h), f"residual: {case}")
    assert_same(bits(got.array), bits(gradient), f"the gradient was changed: {case}")
    guarded = (got, norms, packed, rest, out)
    assert all(one.intact() for one in guarded), f"out of bounds: {case}"


@every_row
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_call(row: Row, isa: str, dtype: str) -> None:
    for place, shape in enumerate(SHAPES):
        mode = place % len(MODES)
        gradient = as_dtype(normal(shape, seed=place), dtype)
        ranks = (1, 2, 3, 511 // codec_of(row).top_level)[place % 4]
        offset = 0 if place % 2 else gradient.element_size()
        _check(codec_of(row), shape, gradient, mode, ranks=ranks, offset=offset)


@every_row
def test_any_number_of_threads(row: Row) -> None:
    shape = (70_001,)
    for threads in (1, 4):
        gradient = torch.from_numpy(normal(shape, seed=1))
        _check(codec_of(row), shape, gradient, 2, ranks=4, threads=threads)


@every_row
def test_special_numbers(row: Row, isa: str) -> None:
    shape = (5, 77)
    for values in special_values(math.prod(shape)).values():
        _check(codec_of(row), shape, torch.from_numpy(values), 0, ranks=2)
    for bad in (math.inf, -math.inf, math.nan):
        values = normal(shape)
        values[200] = bad
        _check(codec_of(row), shape, torch.from_numpy(values), 1, ranks=2)


def test_wrong_arguments() -> None:
    kernels, shape = CpuLevels(), (70,)
    codec = ECQ(4, "l2", 64)
    gradient, norms = torch.ones(70), torch.ones(2)

    def encode(codec: LevelCodec, words: int, width: int) -> None:
        message = torch.zeros(words, dtype=torch.int32)
        arguments = (codec, shape, gradient, norms, message)
        kernels.encode(*arguments, bits=width, feedback=OFF, residual=None, noise=NoiseKey())

    with pytest.raises(ValueError, match="message: expected at least 9 elements, got 8"):
        encode(codec, 8, 4)
    with pytest.raises(KernelError, match="no lanes of 3 bits"):
        encode(codec, 8, 3)  # Lanes that do not hold four levels.
    with pytest.raises(TypeError, match=r"message: expected dtype int32, got torch\.float32"):
        kernels.decode(codec, shape, norms, torch.ones(9), gradient, bits=4)
    with pytest.raises(ValueError, match="norms: expected at least 2 elements, got 1"):
        kernels.decode(codec, shape, norms[:1], torch.ones(9), gradient, bits=4)
    with pytest.raises(ValueError, match="expected a residual exactly where"):
        kernels.norms(codec, shape, gradient, norms, feedback=MODES[1], residual=None)
    with pytest.raises(TypeError, match=r"CpuLevels\.threads"):
        CpuLevels("many")  # type: ignore[arg-type]
    assert not isinstance(Int8(), LevelCodec)
