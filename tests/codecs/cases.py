"""Tensors to encode, and short ways to encode them with the reference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from hvd_compress.codecs import (
    Codec,
    ErrorFeedback,
    LevelCodec,
    NoiseKey,
    PayloadLayout,
    payload_length,
)
from hvd_compress.codecs.base import HEADER_BYTES
from hvd_compress.codecs.payload import checksum, open_payload
from hvd_compress.kernels.batch import Entry
from hvd_compress.kernels.reference import ReferenceBatch, dequantize, quantize
from hvd_compress.testing import SHAPES as SHAPES
from hvd_compress.testing import special_values as special_values
from tests.codecs.rows import Row

Shape = tuple[int, ...]

OFF = ErrorFeedback(alpha=0.0)


def normal(shape: Shape, seed: int = 1, scale: float = 1.0) -> np.ndarray:
    """Gaussian numbers, shape=(n,), dtype float32."""
    values = np.random.default_rng(seed).normal(0.0, scale, math.prod(shape))
    return values.astype(np.float32)


def shapes() -> st.SearchStrategy[Shape]:
    """Small shapes of up to four dimensions, and lengths around tiles and groups."""
    boundary = st.builds(
        lambda unit, times, off: (max(0, unit * times + off),),
        st.sampled_from((16, 20, 64, 192)),
        st.integers(0, 4),
        st.integers(-2, 2),
    )
    small = st.lists(st.integers(0, 7), max_size=4).map(tuple)
    wide = st.tuples(st.integers(1, 9), st.integers(1, 140))
    return st.one_of(boundary, small, wide, wide.map(lambda shape: shape[::-1]))


def floats(limit: float = 3e38) -> st.SearchStrategy[float]:
    """float32 numbers of any magnitude below a limit, zeros and subnormals included."""
    bound = float(np.float32(limit))
    return st.floats(-bound, bound, width=32)


def tensors(count: int, elements: st.SearchStrategy[float]) -> st.SearchStrategy[np.ndarray]:
    """shape=(count,), dtype float32; many elements are alike, as Hypothesis fills arrays."""
    return npst.arrays(np.float32, count, elements=elements, fill=elements)


def encode(
    codec: Codec,
    shape: Shape,
    gradient: np.ndarray,
    *,
    feedback: ErrorFeedback = OFF,
    residual: np.ndarray | None = None,
    noise: NoiseKey | None = None,
) -> np.ndarray:
    """A payload by the reference; the residual is updated in place."""
    payload = np.full(codec.payload_bytes(shape), 0xAA, np.uint8)
    noise = noise or NoiseKey()
    batch = ReferenceBatch([Entry(codec, shape, feedback, noise)])
    batch.encode([gradient], [residual], [residual], [noise.step], payload)
    return payload


@dataclass(frozen=True)
class Truncated(Codec):
    """The upper half of every float32, cut off without rounding; a codec without native kernels."""

    codec_id: ClassVar[int] = 200
    name: ClassVar[str] = "truncated"
    error: ClassVar[Literal["unbiased", "contractive"]] = "contractive"

    def layout(self, shape: tuple[int, ...]) -> PayloadLayout:
        count = int(np.prod(shape))
        return PayloadLayout(count, 0, 64, 128, 2 * (count % 64 or 64))

    def quantize(
        self, x: np.ndarray, shape: tuple[int, ...], noise: NoiseKey
    ) -> tuple[np.ndarray, np.ndarray]:
        upper = (x.view(np.uint32) >> np.uint32(16)).astype("<u2")
        return np.empty(0, np.float32), upper.view(np.uint8)

    def dequantize(
        self, scales: np.ndarray, codes: np.ndarray, shape: tuple[int, ...]
    ) -> np.ndarray:
        return (codes.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def any_change(
    codec: LevelCodec, shape: Shape, payload: np.ndarray, number: int, random: np.random.Generator
) -> np.ndarray:
    """An entropy-coded payload with one change, of a kind that follows from ``number``, and a checksum."""
    changed = payload.copy()
    codes = HEADER_BYTES + codec.layout(shape).codes_offset
    if number % 4 == 0:  # another length
        units = int(random.integers(0, payload.size // 16 + 2))
        changed[16:20] = np.frombuffer((units << 4 | 2).to_bytes(4, "little"), np.uint8)
    elif number % 4 == 1:  # frequencies with the same sum
        table = changed[codes : codes + 2 * codec.alphabet].view("<u2")
        table[np.argmax(table)] -= 1
        table[int(random.integers(0, table.size))] += 1
    elif number % 4 == 2:  # the table, the index, or the first states
        changed[codes + int(random.integers(0, 40))] ^= 1 << int(random.integers(0, 8))
    else:  # states and words
        begin, end = codes + 2 * codec.alphabet + 6, payload_length(payload, payload.size)
        for at in random.integers(begin, end, 20):
            changed[at] ^= 1 << int(random.integers(0, 8))
    units = int.from_bytes(changed[16:20].tobytes(), "little") >> 4
    seal(changed[: min(max(32, 16 * units), changed.size)])
    return changed


def seal(payload: np.ndarray) -> None:
    """Writes a payload's checksum anew; bytes behind its length are left out."""
    payload[24:32] = np.frombuffer(checksum(payload).to_bytes(8, "little"), np.uint8)


def decode(codec: Codec, shape: Shape, payload: np.ndarray, step: int = 0) -> np.ndarray:
    """Decodes one payload, without adding it to +0; shape=(n,), dtype float32."""
    _, scales, codes = open_payload(codec, shape, step, payload)
    return dequantize(codec, shape, scales, codes)


def through(codec: Codec, x: np.ndarray, shape: Shape | None = None, **noise: Any) -> np.ndarray:
    """Q(x): quantized and dequantized again."""
    shape = x.shape if shape is None else shape
    with np.errstate(all="ignore"):
        return dequantize(codec, shape, *quantize(codec, shape, x.reshape(-1), NoiseKey(**noise)))


def group_of_each(row: Row, count: int) -> np.ndarray:
    """The number of the group that decides whether an element is sent as NaN, shape=(count,)."""
    if row.whole:
        return np.zeros(count, np.int64)
    size = row.group if isinstance(row.group, int) else 1
    return np.arange(count) // size


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    """Whether two arrays are the same to the bit, signs of zeros included; all NaNs are alike."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    bits = f"u{left.dtype.itemsize}"
    return bool(np.all((left.view(bits) == right.view(bits)) | (np.isnan(left) & np.isnan(right))))
