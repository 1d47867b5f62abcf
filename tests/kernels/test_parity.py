"""The CPU kernels' bytes are the reference's, for every row of the table.

Payloads and residuals are compared bit for bit. In decoded sums all NaNs are alike: which of two NaNs a
sum keeps is the processor's choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvd_compress.codecs import ErrorFeedback, NoiseKey
from hvd_compress.codecs.int8 import Kind
from hvd_compress.kernels.cpu import CpuKernels
from tests.codecs.cases import floats, normal, shapes, special_values, tensors
from tests.codecs.rows import ROWS, Row
from tests.kernels import parity
from tests.kernels.arrays import DTYPES, THREADS, as_dtype, bits, widened
from tests.kernels.parity import (
    EVERY_MODE,
    LARGE,
    MODES,
    OFF,
    REFERENCE,
    ROUNDED,
    SHAPES,
    SPECIAL,
    expected,
    reference_encode,
    special,
)

every_row = pytest.mark.parametrize("row", ROWS, ids=str)


def check_encode(
    row: Row,
    shape: tuple[int, ...],
    gradient: torch.Tensor,
    feedback: ErrorFeedback,
    residual: np.ndarray,
    noise: NoiseKey,
    want: parity.Encoded,
    *,
    threads: int = 1,
    offset: int = 0,
) -> None:
    """Encodes with the library and takes it back; payloads start at any multiple of 4."""
    parity.check_encode(
        CpuKernels(threads),
        row,
        shape,
        gradient,
        feedback,
        residual,
        noise,
        want,
        offset=offset,
        payload_offset=offset - offset % 4,
    )


def check_decode(
    row: Row,
    shape: tuple[int, ...],
    payloads: np.ndarray,
    before: torch.Tensor,
    *,
    threads: int = 1,
    offset: int = 0,
    **arguments: Any,
) -> None:
    """Decodes with the library."""
    parity.check_decode(
        CpuKernels(threads),
        row,
        shape,
        payloads,
        before,
        offset=offset,
        payload_offset=offset - offset % 4,
        **arguments,
    )


@every_row
@pytest.mark.parametrize("dtype", DTYPES)
def test_encode(row: Row, isa: str, dtype: str) -> None:
    for shape in SHAPES:
        for step, feedback in enumerate(EVERY_MODE):
            gradient, residual, want = expected(row, shape, dtype, feedback, step)
            noise = NoiseKey(seed=3, rank=step, tensor=9, step=step)
            threads = (1, 4)[step % 2]
            check_encode(row, shape, gradient, feedback, residual, noise, want, threads=threads)


@every_row
def test_encode_with_any_number_of_threads(row: Row, isa: str) -> None:
    for shape in LARGE:
        for feedback in (MODES[2], ROUNDED[1]):
            gradient, residual, want = expected(row, shape, "float32", feedback, 1)
            noise = NoiseKey(seed=3, rank=1, tensor=9, step=1)
            for threads in THREADS:
                check_encode(row, shape, gradient, feedback, residual, noise, want, threads=threads)


@every_row
def test_encode_where_arrays_are_not_aligned(row: Row, isa: str) -> None:
    """Gradients start wherever their elements may, payloads at any multiple of 4."""
    shape = (3, 1377)
    for dtype, offset in (("float32", 4), ("float32", 12), ("float16", 2), ("bfloat16", 6)):
        gradient, residual, want = expected(row, shape, dtype, MODES[2], 2)
        noise = NoiseKey(seed=3, rank=2, tensor=9, step=2)
        check_encode(row, shape, gradient, MODES[2], residual, noise, want, offset=offset)


@every_row
def test_encode_special_values(row: Row, isa: str) -> None:
    for name in special_values(0):
        want, gradient, residual = special(row, name)
        check_encode(row, SPECIAL, gradient, MODES[1], residual, NoiseKey(), want)


@pytest.mark.parametrize("kind", parity.TABLES)
def test_tables_of_int8(kind: Kind, isa: str) -> None:
    parity.check_tables(CpuKernels(), kind)


def test_the_largest_floats(isa: str) -> None:
    parity.check_largest_floats(CpuKernels())


@every_row
@pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf), ids=str)
def test_encode_numbers_that_are_not_finite(row: Row, isa: str, bad: float) -> None:
    for shape in ((1,), (151, 17), (6, 700)):
        for dtype in DTYPES:
            count = math.prod(shape)
            values = normal(shape)
            values[[0, count // 2, count - 1]] = bad
            gradient, residual = as_dtype(values, dtype), normal(shape, seed=2)
            for feedback in (OFF, MODES[2], ROUNDED[0]):
                want = reference_encode(row, shape, gradient, feedback, residual, NoiseKey())
                check_encode(row, shape, gradient, feedback, residual, NoiseKey(), want)
                check_decode(
                    row,
                    shape,
                    want.payload[None],
                    torch.zeros(count),
                    step=0,
                    scale=1.0,
                )


@every_row
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_sum(row: Row, isa: str, dtype: str) -> None:
    for shape in SHAPES:
        sent = [expected(row, shape, "float32", MODES[0], 0)[2].payload]
        for seed in (1, 2):
            gradient = torch.from_numpy(normal(shape, seed=seed, scale=2.0))
            residual = np.zeros(0, np.float32)
            noise = NoiseKey(rank=seed)
            sent.append(reference_encode(row, shape, gradient, OFF, residual, noise).payload)
        before = as_dtype(normal(shape, seed=7), dtype)
        for payloads in (sent[:0], sent[:1], sent):
            stacked = np.array(payloads, np.uint8).reshape(len(payloads), sent[0].size)
            for scale, threads in ((1.0, 1), (1 / 3, 4), (-0.7, 1)):
                check_decode(
                    row,
                    shape,
                    stacked,
                    before,
                    step=0,
                    scale=scale,
                    threads=threads,
                )


@every_row
def test_decode_with_any_number_of_threads(row: Row, isa: str) -> None:
    for shape in LARGE:
        payload = expected(row, shape, "float32", MODES[2], 1)[2].payload
        before = torch.from_numpy(normal(shape, seed=7))
        for threads in THREADS:
            check_decode(
                row,
                shape,
                np.stack([payload] * 2),
                before,
                step=1,
                scale=0.5,
                threads=threads,
            )


@every_row
def test_decode_where_arrays_are_not_aligned(row: Row, isa: str) -> None:
    shape = (3, 1377)
    payload = expected(row, shape, "float32", MODES[2], 1)[2].payload
    for dtype, offset in (("float32", 4), ("float32", 12), ("float16", 2), ("bfloat16", 6)):
        before = as_dtype(normal(shape, seed=7), dtype)
        check_decode(
            row,
            shape,
            np.stack([payload] * 3),
            before,
            step=1,
            scale=1 / 3,
            offset=offset,
        )


@every_row
def test_decode_of_special_values(row: Row, isa: str) -> None:
    for name in special_values(0):
        payload = special(row, name)[0].payload
        for dtype in DTYPES:
            check_decode(
                row,
                SPECIAL,
                payload[None],
                as_dtype(normal(SPECIAL), dtype),
                step=0,
                scale=0.75,
            )


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_anything(isa: str, data: st.DataObject) -> None:
    row = data.draw(st.sampled_from(ROWS))
    shape = data.draw(shapes())
    feedback = data.draw(st.sampled_from(EVERY_MODE))
    threads = data.draw(st.sampled_from(THREADS))
    dtype = data.draw(st.sampled_from(tuple(DTYPES)))
    anything = st.one_of(floats(), floats(1.0), st.sampled_from((math.nan, math.inf, -math.inf)))
    values = data.draw(tensors(math.prod(shape), anything))
    residual = data.draw(tensors(math.prod(shape), floats()))
    words = st.integers(0, 2**32 - 1)
    noise = NoiseKey(
        data.draw(words), data.draw(words), data.draw(words), data.draw(st.integers(0, 2**64 - 1))
    )
    gradient = as_dtype(values, dtype)

    want = reference_encode(row, shape, gradient, feedback, residual, noise)
    check_encode(row, shape, gradient, feedback, residual, noise, want, threads=threads)
    check_decode(
        row,
        shape,
        want.payload[None],
        gradient,
        step=noise.step,
        scale=data.draw(floats()),
        threads=threads,
    )


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
        feedback = MODES[2]
        gradient, residual, want = expected(row, shape, "float32", feedback, 1)
        noise = NoiseKey(seed=3, rank=1, tensor=9, step=1)
        check_encode(row, shape, gradient, feedback, residual, noise, want, threads=2)

    with ThreadPoolExecutor(4) as pool:
        for result in [pool.submit(one, row) for row in ROWS for _ in range(2)]:
            result.result()
