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
    ErrorFeedback,
    Int8,
    NoiseKey,
    OneBit,
    Ternary,
    TopK,
)
from hvd_compress.codecs.int8 import Kind
from tests.codecs.cases import (
    floats,
    normal,
    shapes,
    special_values,
    tensors,
)
from tests.codecs.rows import ROWS, Row
from tests.cuda.executors import Checked, configure, emulated
from tests.golden import gradients
from tests.golden.make import noise as golden_noise
from tests.golden.test_golden import golden
from tests.kernels.arrays import DTYPES, as_dtype, bits, widened
from tests.kernels.parity import (
    EVERY_MODE,
    LARGE,
    MODES,
    OFF,
    REFERENCE,
    ROUNDED,
    SHAPES,
    SPECIAL,
    TABLES,
    check_decode,
    check_encode,
    check_largest_floats,
    check_tables,
    expected,
    reference_encode,
    special,
)

NOISE = NoiseKey(seed=3, rank=1, tensor=9, step=1)

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


def encode_and_check(
    kernels: Checked,
    row: Row,
    shape: tuple[int, ...],
    dtype: str,
    feedback: ErrorFeedback,
    *,
    offset: int = 0,
) -> None:
    gradient, residual, want = expected(row, shape, dtype, feedback, 1)
    arguments = (gradient, feedback, residual, NOISE, want)
    check_encode(kernels, row, shape, *arguments, offset=offset, device=kernels.device)


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


@pytest.mark.parametrize("kind", TABLES)
def test_tables_of_int8(kernels: Checked, kind: Kind) -> None:
    check_tables(kernels, kind, device=kernels.device)


def test_the_largest_floats(kernels: Checked) -> None:
    check_largest_floats(kernels, device=kernels.device)


@every_row
@every_dtype
def test_encode(kernels: Checked, row: Row, dtype: str) -> None:
    for shape in SHAPES:
        for feedback in (*MODES, ROUNDED[1]):
            encode_and_check(kernels, row, shape, dtype, feedback)


@every_row
def test_encode_in_many_blocks(kernels: Checked, row: Row) -> None:
    for shape in LARGE[1:]:
        for feedback in (MODES[2], ROUNDED[1]):
            encode_and_check(kernels, row, shape, "float32", feedback)


@pytest.mark.parametrize("row", (*SIZES, *SPARSE), ids=str)
def test_groups_of_all_sizes(kernels: Checked, row: Row) -> None:
    for shape in ((4097,), (3, 7001), (70_001,)):
        for feedback in EVERY_MODE:
            encode_and_check(kernels, row, shape, "float32", feedback)
        gradient, _, want = expected(row, shape, "bfloat16", MODES[1], 1)
        check_decode(
            kernels,
            row,
            shape,
            np.stack([want.payload] * 2),
            gradient,
            step=1,
            scale=0.5,
            device=kernels.device,
        )


@pytest.mark.parametrize("name", ("onebit-tensor", "ecq-tensor", "ternary-tensor"))
def test_more_chunks_than_are_added_up_in_one_go(kernels: Checked, name: str) -> None:
    row = next(row for row in ROWS if row.name == name)
    shape = (2048 * 2048 + 2049,)
    gradient, residual, want = expected(row, shape, "float32", OFF, 1)
    check_encode(kernels, row, shape, gradient, OFF, residual, NOISE, want, device=kernels.device)


@every_row
def test_encode_where_arrays_are_not_aligned(kernels: Checked, row: Row) -> None:
    for dtype, offset in (("float32", 4), ("float32", 12), ("float16", 2), ("bfloat16", 6)):
        for feedback in (MODES[2], ROUNDED[1]):
            encode_and_check(kernels, row, (3, 1377), dtype, feedback, offset=offset)


@every_row
def test_encode_special_values(kernels: Checked, row: Row) -> None:
    for name in special_values(0):
        want, gradient, residual = special(row, name)
        check_encode(
            kernels,
            row,
            SPECIAL,
            gradient,
            MODES[1],
            residual,
            NoiseKey(),
            want,
            device=kernels.device,
        )


@every_row
@pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf), ids=str)
def test_numbers_that_are_not_finite(kernels: Checked, row: Row, bad: float) -> None:
    for shape in ((1,), (151, 17), (6, 700)):
        for dtype in DTYPES:
            count = math.prod(shape)
            values = normal(shape)
            values[[0, count // 2, count - 1]] = bad
            gradient, residual = as_dtype(values, dtype), normal(shape, seed=2)
            for feedback in (OFF, MODES[2], ROUNDED[0]):
                want = reference_encode(row, shape, gradient, feedback, residual, NoiseKey())
                check_encode(
                    kernels,
                    row,
                    shape,
                    gradient,
                    feedback,
                    residual,
                    NoiseKey(),
                    want,
                    device=kernels.device,
                )
            check_decode(
                kernels,
                row,
                shape,
                want.payload[None],
                gradient,
                step=0,
                scale=1.0,
                device=kernels.device,
            )


@every_row
@every_dtype
def test_decode_sum(kernels: Checked, row: Row, dtype: str) -> None:
    for shape in SHAPES:
        sent = [expected(row, shape, "float32", OFF, 0)[2].payload]
        for seed in (1, 2):
            gradient = torch.from_numpy(normal(shape, seed=seed, scale=2.0))
            none = np.zeros(0, np.float32)
            sent.append(
                reference_encode(row, shape, gradient, OFF, none, NoiseKey(rank=seed)).payload
            )
        before = as_dtype(normal(shape, seed=7), dtype)
        for payloads in (sent[:0], sent[:1], sent):
            stacked = np.array(payloads, np.uint8).reshape(len(payloads), sent[0].size)
            for scale in (1 / 3, -0.7):
                check_decode(
                    kernels,
                    row,
                    shape,
                    stacked,
                    before,
                    step=0,
                    scale=scale,
                    device=kernels.device,
                )


@pytest.mark.parametrize("row", (*PLAIN, *SIZES, *SPARSE), ids=str)
def test_decode_payloads_that_are_read_together(kernels: Checked, row: Row) -> None:
    """Four, two, and one are left over; into memory of any alignment."""
    shape, none = (3, 2501), np.zeros(0, np.float32)
    sent = []
    for seed in range(3):
        gradient = torch.from_numpy(normal(shape, seed=seed))
        noise = NoiseKey(rank=seed)
        sent.append(reference_encode(row, shape, gradient, OFF, none, noise).payload)
    for offset in (0, 4):
        check_decode(
            kernels,
            row,
            shape,
            np.stack([sent[rank % 3] for rank in range(7)]),
            as_dtype(normal(shape, seed=7), "float32"),
            step=0,
            scale=0.5,
            offset=offset,
            device=kernels.device,
        )


@every_row
def test_decode_in_many_blocks_and_where_arrays_are_not_aligned(kernels: Checked, row: Row) -> None:
    for shape in LARGE[1:]:
        payload = expected(row, shape, "float32", MODES[2], 1)[2].payload
        for dtype, offset in (("float32", 0), ("float32", 4), ("float16", 2), ("bfloat16", 6)):
            check_decode(
                kernels,
                row,
                shape,
                np.stack([payload] * 2),
                as_dtype(normal(shape, seed=7), dtype),
                step=1,
                scale=0.5,
                offset=offset,
                device=kernels.device,
            )


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_anything(kernels: Checked, data: st.DataObject) -> None:
    row = data.draw(st.sampled_from((*PLAIN, *SIZES, *SPARSE)))
    shape = data.draw(shapes())
    feedback = data.draw(st.sampled_from(EVERY_MODE))
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
    check_encode(
        kernels, row, shape, gradient, feedback, residual, noise, want, device=kernels.device
    )
    check_decode(
        kernels,
        row,
        shape,
        want.payload[None],
        gradient,
        step=noise.step,
        scale=data.draw(floats()),
        device=kernels.device,
    )


@pytest.mark.parametrize("row", PLAIN, ids=str)
@pytest.mark.parametrize(("processors", "order"), ((1, 1), (4, 2), (7, 3)))
def test_the_order_in_which_threads_and_blocks_run_does_not_matter(
    row: Row, processors: int, order: int
) -> None:
    """A barrier that is missing, or a block that counts on another, shows on the host as well."""
    configure(processors, order)
    try:
        encode_and_check(emulated(), row, LARGE[1], "float32", MODES[2])
        payload = expected(row, LARGE[1], "float32", MODES[2], 1)[2].payload
        check_decode(
            emulated(),
            row,
            LARGE[1],
            np.stack([payload] * 3),
            torch.from_numpy(normal(LARGE[1])),
            step=1,
            scale=0.5,
        )
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
