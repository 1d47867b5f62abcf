"""The expected lengths of payloads that vary in length, by the bits of an element's code.

The length of such a payload depends on the gradient. The performance model and the planner predict it
from the average number of bits in an element's code, either measured or from :func:`normal_bits`.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from hvd_compress.codecs import rans
from hvd_compress.codecs.base import HEADER_BYTES, Codec, Shape
from hvd_compress.codecs.levels import LevelCodec
from hvd_compress.codecs.noise import NoiseKey

SAMPLE = 65536
"""The largest number of elements in the sample of :func:`normal_bits`."""


def expected_bytes(codec: Codec, shape: Shape, bits: float | None = None) -> float:
    """The number of bytes that a payload for a tensor of the given shape is expected to occupy.

    It is at most :meth:`~hvd_compress.codecs.Codec.payload_bytes`, and exactly that if payloads have a
    fixed size. ``bits`` is the average number of bits in an element's code; None means :func:`normal_bits`.
    """
    capacity, count = codec.payload_bytes(shape), math.prod(shape)
    if not isinstance(codec, LevelCodec) or not codec.varies or not count:
        return capacity
    bits = normal_bits(codec, count) if bits is None else bits
    return min(capacity, _without_words(codec, shape) + bits * count / 8)


def bits_of(codec: LevelCodec, shape: Shape, length: int) -> float:
    """The bits per element's code in a payload of ``length`` bytes, for a tensor that is not empty.

    The inverse of :func:`expected_bytes`, for predicting the payloads of other tensors.
    """
    return max(0.0, 8 * (length - _without_words(codec, shape)) / math.prod(shape))


def normal_bits(codec: LevelCodec, count: int) -> float:
    """The entropy of an element's code in bits, if gradients are normally distributed.

    The entropy coder exceeds this by less than a percent. The entropy is that of the codec's levels for
    a sample. A group that covers a whole tensor is assumed to have at most :data:`SAMPLE` elements: in
    larger groups, norms are larger, and codes take fewer bits.

    Args:
        codec: the codec, with or without entropy coding.
        count: the number of elements in the tensor, at least one.
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
    """The bytes of an entropy-coded payload, except for the words of its codes."""
    layout = codec.layout(shape)
    return HEADER_BYTES + layout.codes_offset + rans.fixed_bytes(layout, codec.alphabet)
