"""Top-k: which elements are sent, how close their values are, and what is no payload."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_compress.codecs import NoiseKey, PayloadError, TopK
from hvd_compress.codecs.base import TINY
from hvd_compress.kernels.batch import Batch, Entry
from hvd_compress.kernels.cpu_batch import CpuBatch
from hvd_compress.kernels.reference import ReferenceBatch
from tests.codecs.cases import encode, floats, normal, tensors, through


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_the_largest_elements_are_sent_and_no_others(data: st.DataObject) -> None:
    codec = data.draw(st.builds(TopK, st.sampled_from((64, 128)), st.integers(1, 64)))
    x = data.draw(tensors(data.draw(st.integers(1, 300)), floats(1e30)))
    sent = through(TopK(codec.chunk, codec.keep, 32), x, x.shape)
    for start in range(0, x.size, codec.chunk):
        chunk, got = x[start : start + codec.chunk], sent[start : start + codec.chunk]
        kept = -(-codec.keep * chunk.size // codec.chunk)
        largest = np.argsort(-np.abs(chunk), kind="stable")[:kept]
        assert np.array_equal(got[largest], chunk[largest])
        assert not np.delete(got, largest).any()


@pytest.mark.parametrize("bits", range(1, 9))
def test_no_other_unit_fits_the_multiples_better(bits: int) -> None:
    codec = TopK(64, 20, bits)
    x = normal((640,), seed=bits)
    units, _ = codec.quantize(x, x.shape, NoiseKey())
    sent = through(codec, x, x.shape).reshape(-1, 64).astype(np.float64)
    chunks = x.reshape(-1, 64).astype(np.float64)
    for unit, chunk, got in zip(units, chunks, sent, strict=True):
        multiples = np.rint(got / float(unit))
        assert np.abs(multiples).max() <= 2 ** (bits - 1)
        assert np.array_equal(np.sign(got), np.sign(chunk) * (got != 0))

        def error(factor: float, c: np.ndarray = chunk, m: np.ndarray = multiples) -> float:
            return float(np.sum((c - factor * m) ** 2))

        assert error(float(unit)) <= min(error(float(unit) * f) for f in (0.999, 1.001))


def test_more_bits_are_closer() -> None:
    x = normal((65_536,))
    errors = [float(np.sum((through(TopK(bits=b), x, x.shape) - x) ** 2)) for b in (1, 2, 3, 4, 32)]
    assert errors == sorted(errors, reverse=True) and len(set(errors)) == 5


def test_zeros_do_not_take_part() -> None:
    x = np.zeros(4096, np.float32)
    x[[0, 7, 4000]] = 1.0, -1.0, 1.0
    assert np.array_equal(through(TopK(bits=1), x, x.shape), x)


def test_zeros_and_tiny_chunks_are_sent_as_zeros() -> None:
    x = np.full(200, np.float32(TINY) * np.float32(0.99))
    x[64:] = 0.0
    assert not through(TopK(64, 5, 2), x, x.shape).any()
    assert np.count_nonzero(through(TopK(64, 5, 32), x, x.shape)) == 5


def altered_entries(index: int, added: int = 0) -> tuple[TopK, tuple[int], np.ndarray]:
    """A payload whose entry 5 has another index, and its entry 6 index 5; added: to the checksum."""
    codec, shape = TopK(64, 30, 2), (62,)
    payload = encode(codec, shape, np.arange(62, 0, -1).astype(np.float32))
    begin = 32 + codec.layout(shape).codes_offset
    payload[begin + 5] = index  # Entry 5 of 8 bits has index 5.
    payload[begin + 6] = 5
    return codec, shape, with_checksum(payload, added)


def with_checksum(payload: np.ndarray, added: int = 0) -> np.ndarray:
    """The payload with the checksum of what is in it, plus a number."""
    payload[24:32] = 0
    words = payload.view("<u4").astype(np.uint64)
    weights = np.arange(words.size, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    total = (words * weights).sum() + np.uint64(added)
    payload[24:32] = np.frombuffer(total.tobytes(), np.uint8)
    return payload


@pytest.mark.parametrize("added", (0, 1))
@pytest.mark.parametrize("make", (ReferenceBatch, CpuBatch))
@pytest.mark.parametrize(
    "index", (63, 2, 5, 0), ids=("outside", "descending", "repeated", "unused")
)
def test_indices_that_no_encoder_writes(make: type[Batch], index: int, added: int) -> None:
    """Nothing outside of the chunk is written, whether the checksum fits or not."""
    codec, shape, payload = altered_entries(index, added)
    out = np.full(66, np.float32(7))
    with pytest.raises(PayloadError):
        make([Entry(codec, shape)]).decode_sum([out[2:64]], [0], payload[None])
    assert (out[:2] == 7).all() and (out[64:] == 7).all()


@pytest.mark.parametrize(
    ("fields", "message"),
    (
        ({"chunk": 100}, "TopK.chunk: expected a multiple of 64 up to 65536, got 100"),
        ({"chunk": "tensor"}, "TopK.chunk: expected a multiple of 64 up to 65536, got 'tensor'"),
        ({"keep": 0}, r"TopK.keep: expected an integer in \[1, 4096\], got 0"),
        ({"chunk": 64, "keep": 65}, r"TopK.keep: expected an integer in \[1, 64\], got 65"),
        ({"bits": 9}, "TopK.bits: expected 1 to 8, or 32, got 9"),
        ({"bits": 33}, r"TopK.bits: expected an integer in \[1, 32\], got 33"),
    ),
)
def test_settings_out_of_range(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TopK(**fields)
