"""Frozen bytes: what was written once is written, and read, for ever."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_compress.codecs import NoiseKey
from hvd_compress.kernels.batch import Batch, Entry
from hvd_compress.kernels.cpu_batch import CpuBatch
from hvd_compress.kernels.reference import ReferenceBatch
from tests.codecs.rows import ROWS, Row
from tests.golden import gradients
from tests.golden.make import FOLDER, golden_file, noise

every_row = pytest.mark.parametrize("row", ROWS, ids=str)
both = pytest.mark.parametrize("make", (ReferenceBatch, CpuBatch))


def entry(row: Row) -> Entry:
    """The golden gradient's place at the front of a message."""
    return Entry(row.codec, gradients.SHAPE, row.feedback, noise())


def golden(row: Row) -> tuple[np.ndarray, np.ndarray]:
    """A golden file's payload and residual."""
    data = np.frombuffer(golden_file(row).read_bytes(), np.uint8)
    size = row.codec.payload_bytes(gradients.SHAPE)
    return data[:size].copy(), data[size:].view("<f4").astype(np.float32)


def test_every_row_has_a_file_and_every_file_a_row() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == {row.name for row in ROWS}


@both
@every_row
def test_encoding_gives_the_golden_bytes(row: Row, make: type[Batch]) -> None:
    payload, after = golden(row)
    residual = gradients.residual()
    made = np.empty_like(payload)
    values, residuals = [gradients.gradient()], [residual]
    make([entry(row)]).encode(values, residuals, residuals, [gradients.STEP], made)
    assert np.array_equal(made, payload)
    assert np.array_equal(residual.view(np.uint32), after.view(np.uint32))


@both
@every_row
def test_decoding_the_golden_bytes_explains_the_residual(row: Row, make: type[Batch]) -> None:
    """The file itself says what the payload decodes to: (beta h + g) - decoded is its residual."""
    payload, after = golden(row)
    decoded = np.empty(after.size, np.float32)
    make([entry(row)]).decode_sum([decoded], [gradients.STEP], payload[None])
    expected = row.feedback.carry(gradients.gradient(), gradients.residual(), decoded, NoiseKey())
    assert np.array_equal(expected, after)
