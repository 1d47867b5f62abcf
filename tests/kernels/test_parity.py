"""The CPU kernels' bytes are the reference's, for every row of the table.

Payloads and residuals are compared bit for bit. In decoded sums all NaNs are alike: which of two NaNs a
sum keeps is the processor's choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvd_compress.codecs import NoiseKey
from hvd_compress.codecs.int8 import Kind
from hvd_compress.kernels.cpu import CpuKernels
from tests.codecs.rows import FEW, ROWS, Row
from tests.kernels import parity
from tests.kernels.arrays import DTYPES, THREADS, bits, widened
from tests.kernels.parity import (
    EVERY_MODE,
    LARGE,
    MODES,
    REFERENCE,
    ROUNDED,
    SHAPES,
    SPECIAL,
    special,
)

every_row = pytest.mark.parametrize("row", ROWS, ids=str)


few_rows = pytest.mark.parametrize("row", FEW, ids=str)


@every_row
@pytest.mark.parametrize("dtype", DTYPES)
def test_encode(row: Row, isa: str, dtype: str) -> None:
    for shape in SHAPES:
        for step, feedback in enumerate(EVERY_MODE):
            kernels = CpuKernels((1, 4)[step % 2])
            parity.check_gaussian(kernels, row, shape, dtype, feedback, step)


@every_row
def test_any_number_of_threads(row: Row, isa: str) -> None:
    for shape in LARGE:
        for threads in THREADS:
            for feedback in (MODES[2], ROUNDED[1]):
                parity.check_gaussian(CpuKernels(threads), row, shape, "float32", feedback)
            parity.check_sum(CpuKernels(threads), row, shape, "float32", 2)


@few_rows
def test_arrays_that_are_not_aligned(row: Row, isa: str) -> None:
    parity.check_unaligned(CpuKernels(), row)


@few_rows
def test_special_values(row: Row, isa: str) -> None:
    parity.check_special_values(CpuKernels(), row)


@pytest.mark.parametrize("kind", parity.TABLES)
def test_tables_of_int8(kind: Kind, isa: str) -> None:
    parity.check_tables(CpuKernels(), kind)


def test_the_largest_floats(isa: str) -> None:
    parity.check_largest_floats(CpuKernels())


@every_row
@pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf), ids=str)
def test_numbers_that_are_not_finite(row: Row, isa: str, bad: float) -> None:
    parity.check_not_finite(CpuKernels(), row, bad)


@every_row
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_sum(row: Row, isa: str, dtype: str) -> None:
    parity.check_sums(CpuKernels(), row, dtype, (1.0, -0.7))
    parity.check_sums(CpuKernels(4), row, dtype, (1 / 3,))


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_anything(isa: str, data: st.DataObject) -> None:
    parity.check_anything(CpuKernels(data.draw(st.sampled_from(THREADS))), data, ROWS)


@contextmanager
def subnormals_flushed() -> Iterator[None]:
    """The calling thread's processor in the mode in which TensorFlow leaves its threads."""
    assert torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def flushes() -> bool:
    """Whether the calling thread flushes subnormals now."""
    return float(torch.tensor([2.0**-149]) * torch.tensor([1.0])) == 0.0


@every_row
def test_the_callers_floating_point_mode_does_not_matter(row: Row, isa: str) -> None:
    shape = SPECIAL
    for name in ("subnormals", "smallest subnormals", "around the smallest normal"):
        want, gradient, residual = special(row, name)
        total = widened(gradient).copy()
        arguments = {"step": 0, "scale": 0.75}
        REFERENCE.decode_sum(row.codec, shape, want.payload[None], total, **arguments)
        g, h = gradient.clone(), torch.from_numpy(residual.copy())
        out, payload = gradient.clone(), torch.zeros(want.payload.size, dtype=torch.uint8)
        for threads in (1, 2):
            kernels = CpuKernels(threads)
            h.copy_(torch.from_numpy(residual))
            out.copy_(gradient)
            noise = NoiseKey()
            with subnormals_flushed():
                kernels.encode(
                    row.codec, shape, g, payload, feedback=MODES[1], residual=h, noise=noise
                )
                kernels.decode_sum(row.codec, shape, payload[None], out, **arguments)
                assert flushes(), "the caller's mode has to be put back"
            assert not flushes()
            assert np.array_equal(payload.numpy(), want.payload)
            assert want.residual is not None
            assert np.array_equal(bits(h), bits(want.residual))
            assert np.array_equal(bits(out), bits(total))


def test_calls_at_the_same_time_do_not_disturb_each_other() -> None:
    shape = LARGE[0]

    def one(row: Row) -> None:
        parity.check_gaussian(CpuKernels(2), row, shape, "float32", MODES[2])

    with ThreadPoolExecutor(4) as pool:
        for result in [pool.submit(one, row) for row in ROWS for _ in range(2)]:
            result.result()
