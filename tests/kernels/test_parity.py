"""The CPU kernels' bytes are the reference's, for every row of the table.

Payloads and residuals are compared bit for bit. In decoded sums all NaNs are alike: which of two NaNs a
sum keeps is the processor's choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvd_compress.codecs.int8 import Kind
from hvd_compress.kernels.batch import Entry
from hvd_compress.kernels.cpu_batch import CpuBatch
from tests.codecs.cases import normal
from tests.codecs.rows import ROWS, Row
from tests.kernels.arrays import DTYPES, THREADS, as_dtype, bits
from tests.kernels.parity import (
    EVERY_MODE,
    LARGE,
    MODES,
    ROUNDED,
    SHAPES,
    SPECIAL,
    TABLES,
    Parity,
    decoded,
    expected,
    special,
)

CPU = Parity([partial(CpuBatch, threads=threads) for threads in THREADS])

every_row = pytest.mark.parametrize("row", ROWS, ids=str)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_place = pytest.mark.parametrize(
    ("dtype", "offset"), (("float32", 4), ("float32", 12), ("float16", 2), ("bfloat16", 6))
)


@every_row
@every_dtype
def test_encode(row: Row, isa: str, dtype: str) -> None:
    for shape in SHAPES:
        for step, feedback in enumerate(EVERY_MODE):
            CPU.encode_expected(row, shape, dtype, feedback, step)


@every_row
def test_encode_large_tensors(row: Row, isa: str) -> None:
    for shape in LARGE:
        for feedback in (MODES[2], ROUNDED[1]):
            CPU.encode_expected(row, shape, "float32", feedback)


@every_row
@every_place
def test_encode_where_arrays_are_not_aligned(row: Row, isa: str, dtype: str, offset: int) -> None:
    """Gradients start wherever their elements may, payloads at any multiple of 4."""
    CPU.encode_expected(row, (3, 1377), dtype, MODES[2], offset=offset)


@every_row
def test_special_values(row: Row, isa: str) -> None:
    CPU.special_values(row)


@pytest.mark.parametrize("kind", TABLES)
def test_tables_of_int8(kind: Kind, isa: str) -> None:
    CPU.tables(kind)


def test_the_largest_floats(isa: str) -> None:
    CPU.largest_floats()


@every_row
@pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf), ids=str)
def test_numbers_that_are_not_finite(row: Row, isa: str, bad: float) -> None:
    CPU.nonfinite(row, bad)


@every_row
@every_dtype
def test_decode_sum(row: Row, isa: str, dtype: str) -> None:
    CPU.sums(row, dtype)


@every_row
def test_decode_large_tensors(row: Row, isa: str) -> None:
    for shape in LARGE:
        payload = expected(row, shape, "float32", MODES[2], 1)[2].payload
        before = torch.from_numpy(normal(shape, seed=7))
        CPU.decode(row, shape, [payload] * 2, before, step=1, scale=0.5)


@every_row
@every_place
def test_decode_where_arrays_are_not_aligned(row: Row, isa: str, dtype: str, offset: int) -> None:
    shape = (3, 1377)
    payload = expected(row, shape, "float32", MODES[2], 1)[2].payload
    before = as_dtype(normal(shape, seed=7), dtype)
    CPU.decode(row, shape, [payload] * 3, before, step=1, scale=1 / 3, offset=offset)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_anything(isa: str, data: st.DataObject) -> None:
    CPU.anything(ROWS, data)


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
        total = decoded(row, shape, want.payload[None], gradient, 0, 0.75)
        g, h = gradient.clone(), torch.from_numpy(residual.copy())
        out, payload = gradient.clone(), torch.zeros(want.payload.size, dtype=torch.uint8)
        for threads in (1, 2):
            batch = CpuBatch([Entry(row.codec, shape, MODES[1])], threads)
            h.copy_(torch.from_numpy(residual))
            out.copy_(gradient)
            with subnormals_flushed():
                batch.encode([g], [h], [h], [0], payload)
                batch.decode_sum([out], [0], payload[None], 0.75)
                assert flushes(), "the caller's mode has to be put back"
            assert not flushes()
            assert np.array_equal(payload.numpy(), want.payload)
            assert want.residual is not None
            assert np.array_equal(bits(h), bits(want.residual))
            assert np.array_equal(bits(out), total)


def test_calls_at_the_same_time_do_not_disturb_each_other() -> None:
    shape = LARGE[0]

    def one(row: Row) -> None:
        CPU.encode_expected(row, shape, "float32", MODES[2])

    with ThreadPoolExecutor(4) as pool:
        for result in [pool.submit(one, row) for row in ROWS for _ in range(2)]:
            result.result()
