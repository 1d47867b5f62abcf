"""The CUDA kernels' bytes are the reference's, for every row of the table and for groups of all sizes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvd_compress.codecs import ECQ, Int8, NoiseKey, OneBit, Ternary, TopK
from hvd_compress.codecs.int8 import Kind
from tests.codecs.cases import encode, normal
from tests.codecs.rows import ROWS, Row
from tests.cuda.executors import Checked, configure, emulated
from tests.golden import gradients
from tests.golden.test_golden import entry, golden
from tests.kernels.arrays import DTYPES, as_dtype
from tests.kernels.parity import (
    EVERY_MODE,
    LARGE,
    MODES,
    OFF,
    ROUNDED,
    SHAPES,
    TABLES,
    expected,
)

SIZES = tuple(
    Row(f"{name}-{size}", codec(size), 0, MODES[2])
    for size in (1024, 1088, 2112, 4096, 4160, 8192, 65536)
    for name, codec in (
        ("onebit", OneBit),
        ("linear", lambda size: Int8("linear", size)),
        ("dynamic", lambda size: Int8("dynamic", size)),
        ("ternary", Ternary),
        ("ecq", lambda size: ECQ(bucket=size)),
    )
)
"""Groups of one warp and of a block, held in two chunks, the largest that is held, and larger ones."""

SPARSE = tuple(
    Row(f"topk-{chunk}-{keep}-{bits}", TopK(chunk, keep, bits), 0, MODES[2])
    for chunk, keep, bits in (
        (64, 1, 1),
        (1088, 1000, 3),
        (4096, 4096, 32),
        (4160, 4100, 5),
        (8192, 3, 8),
        (65536, 500, 2),
        (65536, 65536, 7),
    )
)
"""Chunks of one tile and of several, and more entries than are held at a time."""

PLAIN = tuple(row for row in ROWS if row.codec.on_device and not row.codec.varies)
"""An entropy code is the CPU's."""

every_row = pytest.mark.parametrize("row", PLAIN, ids=str)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


@every_row
def test_golden_bytes(kernels: Checked, row: Row) -> None:
    payload, after = golden(row)
    residual = torch.from_numpy(gradients.residual()).to(kernels.device)
    gradient = torch.from_numpy(gradients.gradient()).to(kernels.device)
    made = torch.empty(payload.size, dtype=torch.uint8, device=kernels.device)
    batch = kernels.batch([entry(row)])
    batch.encode([gradient], [residual], [residual], [gradients.STEP], made)
    assert np.array_equal(made.cpu().numpy(), payload)
    assert np.array_equal(residual.cpu().numpy().view(np.uint32), after.view(np.uint32))
    decoded = torch.empty(after.size, device=kernels.device)
    batch.decode_sum([decoded], [gradients.STEP], made[None])
    explained = row.feedback.carry(
        gradients.gradient(), gradients.residual(), decoded.cpu().numpy(), NoiseKey()
    )
    assert np.array_equal(explained, after)


@pytest.mark.parametrize("kind", TABLES)
def test_tables_of_int8(kernels: Checked, kind: Kind) -> None:
    kernels.parity.tables(kind)


def test_the_largest_floats(kernels: Checked) -> None:
    kernels.parity.largest_floats()


@every_row
@every_dtype
def test_encode(kernels: Checked, row: Row, dtype: str) -> None:
    for shape in SHAPES:
        for feedback in (*MODES, ROUNDED[1]):
            kernels.parity.encode_expected(row, shape, dtype, feedback)


@every_row
def test_encode_in_many_blocks(kernels: Checked, row: Row) -> None:
    for shape in LARGE[1:]:
        for feedback in (MODES[2], ROUNDED[1]):
            kernels.parity.encode_expected(row, shape, "float32", feedback)


@pytest.mark.parametrize("row", (*SIZES, *SPARSE), ids=str)
def test_groups_of_all_sizes(kernels: Checked, row: Row) -> None:
    for shape in ((4097,), (3, 7001), (70_001,)):
        for feedback in EVERY_MODE:
            kernels.parity.encode_expected(row, shape, "float32", feedback)
        gradient, _, want = expected(row, shape, "bfloat16", MODES[1], 1)
        kernels.parity.decode(row, shape, [want.payload] * 2, gradient, step=1, scale=0.5)


@pytest.mark.parametrize("name", ("onebit-tensor", "ecq-tensor", "ternary-tensor"))
def test_more_chunks_than_are_added_up_in_one_go(kernels: Checked, name: str) -> None:
    row = next(row for row in ROWS if row.name == name)
    kernels.parity.encode_expected(row, (2048 * 2048 + 2049,), "float32", OFF)


@every_row
def test_encode_where_arrays_are_not_aligned(kernels: Checked, row: Row) -> None:
    for dtype, offset in (("float32", 4), ("float32", 12), ("float16", 2), ("bfloat16", 6)):
        for feedback in (MODES[2], ROUNDED[1]):
            kernels.parity.encode_expected(row, (3, 1377), dtype, feedback, offset=offset)


@every_row
def test_special_values(kernels: Checked, row: Row) -> None:
    kernels.parity.special_values(row)


@every_row
@pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf), ids=str)
def test_numbers_that_are_not_finite(kernels: Checked, row: Row, bad: float) -> None:
    kernels.parity.nonfinite(row, bad)


@every_row
@every_dtype
def test_decode_sum(kernels: Checked, row: Row, dtype: str) -> None:
    kernels.parity.sums(row, dtype)


@pytest.mark.parametrize("row", (*PLAIN, *SIZES, *SPARSE), ids=str)
def test_decode_payloads_that_are_read_together(kernels: Checked, row: Row) -> None:
    """Four, two, and one are left over; into memory of any alignment."""
    shape, before = (3, 2501), torch.from_numpy(normal((3, 2501), seed=7))
    sent = [
        encode(row.codec, shape, normal(shape, seed=seed), noise=NoiseKey(rank=seed))
        for seed in range(3)
    ]
    sent = [sent[rank % 3] for rank in range(7)]
    for offset in (0, 4):
        kernels.parity.decode(row, shape, sent, before, scale=0.5, offset=offset)


@every_row
def test_decode_in_many_blocks_and_where_arrays_are_not_aligned(kernels: Checked, row: Row) -> None:
    for shape in LARGE[1:]:
        sent = [expected(row, shape, "float32", MODES[2], 1)[2].payload] * 2
        for dtype, offset in (("float32", 0), ("float32", 4), ("float16", 2), ("bfloat16", 6)):
            before = as_dtype(normal(shape, seed=7), dtype)
            kernels.parity.decode(row, shape, sent, before, step=1, scale=0.5, offset=offset)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_anything(kernels: Checked, data: st.DataObject) -> None:
    kernels.parity.anything((*PLAIN, *SIZES, *SPARSE), data)


@pytest.mark.parametrize("row", PLAIN, ids=str)
@pytest.mark.parametrize(("processors", "order"), ((1, 1), (4, 2), (7, 3)))
def test_the_order_in_which_threads_and_blocks_run_does_not_matter(
    row: Row, processors: int, order: int
) -> None:
    """A barrier that is missing, or a block that counts on another, shows on the host as well."""
    configure(processors, order)
    try:
        shape, parity = LARGE[1], emulated().parity
        parity.encode_expected(row, shape, "float32", MODES[2])
        payload = expected(row, shape, "float32", MODES[2], 1)[2].payload
        before = torch.from_numpy(normal(shape))
        parity.decode(row, shape, [payload] * 3, before, step=1, scale=0.5)
    finally:
        configure(1, 0)


def test_all_ranks_at_once(kernels: Checked) -> None:
    """As many payloads as a call may have: sums in rank order, all checksums looked at."""
    payload = expected(ROWS[1], (300,), "float32", OFF, 0)[2].payload
    kernels.parity.decode(ROWS[1], (300,), [payload] * 1024, torch.zeros(300), scale=1 / 1024)
