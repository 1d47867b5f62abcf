"""Expected lengths of payloads beside those of real ones."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_compress.codecs import ECQ, Int8, LevelCodec, NoiseKey, Ternary
from hvd_compress.codecs.lengths import bits_of, expected_bytes, normal_bits
from hvd_compress.codecs.payload import payload_length
from hvd_compress.kernels.batch import Entry
from hvd_compress.kernels.cpu_batch import CpuBatch

CODECS = (
    ECQ(coding="entropy"),
    ECQ(4, "l2", 4096, "entropy"),
    ECQ(4, "linf", 1024, "entropy"),
    ECQ(127, "linf", 64, "entropy"),
    Ternary(coding="entropy"),
)


def _length(codec: LevelCodec, x: np.ndarray) -> int:
    payload = np.zeros(codec.payload_bytes(x.shape), np.uint8)
    batch = CpuBatch([Entry(codec, x.shape, noise=NoiseKey(7))], threads=2)
    batch.encode([x], [None], [None], [0], payload)
    return payload_length(payload, payload.size)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("count", (4096, 200_000))
def test_of_normal_numbers(codec: LevelCodec, count: int) -> None:
    x = np.random.default_rng(1).standard_normal(count, np.float32)
    assert expected_bytes(codec, (count,)) == pytest.approx(_length(codec, x), rel=0.05, abs=32)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_from_the_bits_of_another_payload(codec: LevelCodec) -> None:
    """The numbers have longer tails than normal ones, whose bits would predict other lengths."""
    x = np.random.default_rng(2).laplace(size=240_000).astype(np.float32)
    probe, rest = x[:80_000], x[80_000:]
    bits = bits_of(codec, probe.shape, _length(codec, probe))
    assert expected_bytes(codec, probe.shape, bits) == pytest.approx(_length(codec, probe))
    assert expected_bytes(codec, rest.shape, bits) == pytest.approx(_length(codec, rest), rel=0.02)
    assert bits < normal_bits(codec, rest.size)


def test_never_above_the_capacity() -> None:
    codec = ECQ(127, "linf", 64, "entropy")
    for count in (1, 200, 70_000):
        assert expected_bytes(codec, (count,), 20.0) == codec.payload_bytes((count,))
    for fixed in (Int8(), Ternary()):
        assert expected_bytes(fixed, (70_000,), 0.1) == fixed.payload_bytes((70_000,))
    assert expected_bytes(codec, (0,)) == codec.payload_bytes((0,))
