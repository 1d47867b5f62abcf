"""How long payloads are that vary in length: from an element's bits, and back.

A payload of varying length is not known before its gradient is. The performance model and the planner
predict its length from the bits of an element's code: measured ones, or :func:`normal_bits`.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from hvd_compress.codecs import rans
from hvd_compress.codecs.base import Codec, Shape
from hvd_compress.codecs.levels import LevelCodec
from hvd_compress.codecs.noise import NoiseKey
from hvd_compress.codecs.payload import HEADER_BYTES

SAMPLE = 65536
"""Elements that :func:`normal_bits` looks at, at the most."""


def expected_bytes(codec: Codec, shape: Shape, bits: float | None = None) -> float:
    """Bytes that a payload for a tensor of that shape is expected to occupy.

    Args:
        codec: any.
        shape: the tensor's.
        bits: of an element's code, on average; None is :func:`normal_bits`. Without meaning where the
            codec's payloads have a fixed size.

    Returns:
        At most, and where payloads have a fixed size, :meth:`~hvd_compress.codecs.Codec.payload_bytes`.
    """
    capacity, count = codec.payload_bytes(shape), math.prod(shape)
    if not isinstance(codec, LevelCodec) or not codec.varies or not count:
        return capacity
    bits = normal_bits(codec, count) if bits is None else bits
    return min(capacity, _without_words(codec, shape) + bits * count / 8)


def bits_of(codec: LevelCodec, shape: Shape, length: int) -> float:
    """Bits of an element's code in a payload of that length, for a tensor that is not empty.

    The inverse of :func:`expected_bytes`: another tensor of such numbers is predicted from it.
    """
    return max(0.0, 8 * (length - _without_words(codec, shape)) / math.prod(shape))


def normal_bits(codec: LevelCodec, count: int) -> float:
    """The entropy of an element's code where gradients are normally distributed, in bits.

    An entropy code takes that many bits, and less than a percent more. The codec's own levels of a sample
    are counted. A group over a whole tensor is taken to have no more than :data:`SAMPLE` elements: in
    larger ones, norms are larger, and codes take fewer bits.

    Args:
        codec: with or without an entropy code.
        count: elements of the tensor, at least one.
    """
    return _normal_bits(codec, min(count, SAMPLE))


@lru_cache(maxsize=4096)
def _normal_bits(codec: LevelCodec, count: int) -> float:
    x = np.random.default_rng(0).standard_normal(count, np.float32)
    levels = codec.to_levels(x, codec.norms(x), NoiseKey())
    counts = np.unique(levels, return_counts=True)[1].tolist()
    # Rounded, so that ranks on different processors make the same plans.
    return round(math.log2(count) - sum(c * math.log2(c) for c in counts) / count, 6)


def _without_words(codec: LevelCodec, shape: Shape) -> int:
    """Bytes of a payload with an entropy code, but for the words of its codes."""
    layout = codec.layout(shape)
    return HEADER_BYTES + layout.codes_offset + rans.fixed_bytes(layout, codec.alphabet)
