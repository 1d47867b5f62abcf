"""The CUDA kernels' bytes are the reference's, for every row of the table and for groups of all sizes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvd_compress.codecs import (
    ECQ,
    Int8,
    NoiseKey,
    OneBit,
    Ternary,
    TopK,
)
from hvd_compress.codecs.int8 import Kind
from tests.codecs.cases import (
    normal,
)
from tests.codecs.rows import FEW, ROWS, Row
from tests.cuda.executors import Checked, configure, emulated
from tests.golden import gradients
from tests.golden.make import noise as golden_noise
from tests.golden.test_golden import golden
from tests.kernels import parity
from tests.kernels.arrays import DTYPES, as_dtype, bits, widened
from tests.kernels.parity import (
    EVERY_MODE,
    LARGE,
    MODES,
    OFF,
    REFERENCE,
    ROUNDED,
    SHAPES,
    check_decode,
    check_gaussian,
    check_sum,
    expected,
    reference_encode,
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
few_rows = pytest.mark.parametrize("row", [row for row in FEW if row in PLAIN], ids=str)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


@every_row
def test_golden_bytes(kernels: Checked, row: Row) -> None:
    payload, after = golden(row)
    residual = torch.from_numpy(gradients.residual()).to(kernels.device)
    gradient = torch.from_numpy(gradients.gradient()).to(kernels.device)
    made = torch.empty(payload.size, dtype=torch.uint8, device=kernels.device)
    kernels.encode(
        row.codec,
        gradients.SHAPE,
        gradient,
        made,
        feedback=row.feedback,
        residual=residual,
        noise=golden_noise(),
    )
    assert np.array_equal(made.cpu().numpy(), payload)
    assert np.array_equal(residual.cpu().numpy().view(np.uint32), after.view(np.uint32))
    decoded = torch.empty(after.size, device=kernels.device)
    kernels.decode_sum(row.codec, gradients.SHAPE, made[None], decoded, step=gradients.STEP)
    explained = row.feedback.carry(
        gradients.gradient(), gradients.residual(), decoded.cpu().numpy(), NoiseKey()
    )
    assert np.array_equal(explained, after)


@pytest.mark.parametrize("kind", parity.TABLES)
def test_tables_of_int8(kernels: Checked, kind: Kind) -> None:
    parity.check_tables(kernels, kind)


def test_the_largest_floats(kernels: Checked) -> None:
    parity.check_largest_floats(kernels)


@every_row
@every_dtype
def test_encode(kernels: Checked, row: Row, dtype: str) -> None:
    for shape in SHAPES:
        for feedback in (*MODES, ROUNDED[1]):
            check_gaussian(kernels, row, shape, dtype, feedback)


@every_row
def test_many_blocks(kernels: Checked, row: Row) -> None:
    for shape in LARGE[1:]:
        for feedback in (MODES[2], ROUNDED[1]):
            check_gaussian(kernels, row, shape, "float32", feedback)
        for dtype in DTYPES:
            check_sum(kernels, row, shape, dtype, 2)


@pytest.mark.parametrize("row", (*SIZES, *SPARSE), ids=str)
def test_groups_of_all_sizes(kernels: Checked, row: Row) -> None:
    for shape in ((4097,), (3, 7001), (70_001,)):
        for feedback in EVERY_MODE:
            check_gaussian(kernels, row, shape, "float32", feedback)
        check_sum(kernels, row, shape, "bfloat16", 2)


@pytest.mark.parametrize("name", ("onebit-tensor", "ecq-tensor", "ternary-tensor"))
def test_more_chunks_than_are_added_up_in_one_go(kernels: Checked, name: str) -> None:
    row = next(row for row in ROWS if row.name == name)
    check_gaussian(kernels, row, (2048 * 2048 + 2049,), "float32", OFF)


@few_rows
def test_arrays_that_are_not_aligned(kernels: Checked, row: Row) -> None:
    parity.check_unaligned(kernels, row)


@few_rows
def test_special_values(kernels: Checked, row: Row) -> None:
    parity.check_special_values(kernels, row)


@every_row
@pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf), ids=str)
def test_numbers_that_are_not_finite(kernels: Checked, row: Row, bad: float) -> None:
    parity.check_not_finite(kernels, row, bad)


@every_row
@every_dtype
def test_decode_sum(kernels: Checked, row: Row, dtype: str) -> None:
    parity.check_sums(kernels, row, dtype, (1 / 3, -0.7))


@pytest.mark.parametrize("row", (*PLAIN, *SIZES, *SPARSE), ids=str)
def test_decode_payloads_that_are_read_together(kernels: Checked, row: Row) -> None:
    """Four, two, and one are left over; into memory of any alignment."""
    shape, none = (3, 2501), np.zeros(0, np.float32)
    sent = []
    for seed in range(3):
        gradient = torch.from_numpy(normal(shape, seed=seed))
        noise = NoiseKey(rank=seed)
        sent.append(reference_encode(row, shape, gradient, OFF, none, noise).payload)
    payloads = np.stack([sent[rank % 3] for rank in range(7)])
    before = as_dtype(normal(shape, seed=7), "float32")
    for offset in (0, 4):
        check_decode(kernels, row, shape, payloads, before, step=0, scale=0.5, offset=offset)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_anything(kernels: Checked, data: st.DataObject) -> None:
    parity.check_anything(kernels, data, (*PLAIN, *SIZES, *SPARSE))


@pytest.mark.parametrize("row", PLAIN, ids=str)
@pytest.mark.parametrize(("processors", "order"), ((1, 1), (4, 2), (7, 3)))
def test_the_order_in_which_threads_and_blocks_run_does_not_matter(
    row: Row, processors: int, order: int
) -> None:
    """A barrier that is missing, or a block that counts on another, shows on the host as well."""
    configure(processors, order)
    try:
        check_gaussian(emulated(), row, LARGE[1], "float32", MODES[2])
        check_sum(emulated(), row, LARGE[1], "float32", 3)
    finally:
        configure(1, 0)


def test_all_ranks_at_once(kernels: Checked) -> None:
    """As many payloads as a call may have: sums in rank order, all checksums looked at."""
    row = ROWS[1]
    shape = (300,)
    sent = expected(row, shape, "float32", MODES[0], 0)[2].payload
    payloads = np.stack([sent] * 1024)
    want = np.zeros(shape, np.float32)
    REFERENCE.decode_sum(row.codec, shape, payloads, want, step=0, scale=1 / 1024)
    out = torch.zeros(shape, device=kernels.device)
    stacked = torch.from_numpy(payloads).to(kernels.device)
    kernels.decode_sum(row.codec, shape, stacked, out, step=0, scale=1 / 1024)
    assert np.array_equal(bits(out), bits(want))
    assert widened(out.cpu()).shape == want.shape
