"""Codecs that send whole multiples of a unit, which ranks that share their units can add.

This is TernGrad's scaler sharing (Wen et al., 2017, section 3.1): if each rank has its own scale, the
ranks' values have no common grid, and their sum takes as many bits as floats; if all ranks use the largest
scale, the sum is a small integer.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from hvd_compress.codecs import base, packing
from hvd_compress.codecs.noise import NoiseKey


class LevelCodec(base.Codec):
    """A codec whose elements are a *level*, an integer, times their bucket's *unit*.

    The unit is a fraction of the bucket's *norm*. A larger norm, such as that of another rank's tensor,
    keeps the expectation: ``E[level * unit] = x``.
    """

    bucket: base.Group
    coding: Literal["plain", "entropy"]

    @property
    def varies(self) -> bool:
        """Whether ``coding`` is ``"entropy"``."""
        return self.coding == "entropy"

    @property
    def alphabet(self) -> int:
        """The number of different codes."""
        return 2 * self.top_level + 1

    def pack(self, symbols: np.ndarray) -> np.ndarray:
        """Packs a tensor's codes, shape=(n,), dtype uint8, as in a plain payload: dtype uint8."""
        raise NotImplementedError

    def unpack(self, codes: np.ndarray, count: int) -> np.ndarray:
        """The inverse of :meth:`pack`, shape=(count,), dtype uint8."""
        raise NotImplementedError

    @property
    def top_level(self) -> int:
        """The largest magnitude of a level."""
        raise NotImplementedError

    def norms(self, x: np.ndarray) -> np.ndarray:
        """The norms that the units are derived from; ranks agree on the largest of theirs.

        Args:
            x: the tensor, shape=(n,), dtype float32.

        Returns:
            shape=(buckets,), dtype float32; +Inf for buckets that hold a non-finite number, so that the
            maximum over ranks is Inf too.
        """
        raise NotImplementedError

    def units(self, norms: np.ndarray) -> np.ndarray:
        """The values of level 1, shape=(buckets,), dtype float32.

        The value is 0 for a norm below ``TINY`` and NaN for Inf.
        """
        raise NotImplementedError

    def to_levels(self, x: np.ndarray, norms: np.ndarray, noise: NoiseKey) -> np.ndarray:
        """Rounds elements to multiples of the units, at random.

        Elements beyond the norm are clipped to it; then the rounding is unbiased.

        Args:
            x: the tensor, shape=(n,), dtype float32.
            norms: the norm of each bucket, shape=(buckets,), dtype float32.
            noise: the position in the noise.

        Returns:
            shape=(n,), dtype int32, within ``[-top_level, top_level]``; 0 in buckets whose norm is Inf.
        """
        raise NotImplementedError

    def from_levels(self, levels: np.ndarray, norms: np.ndarray) -> np.ndarray:
        """Multiplies one rank's levels, or a sum of ranks' levels, by the units: shape=(n,), float32."""
        units = base.spread(self.units(norms), levels.size, self.bucket)
        return levels.astype(np.float32) * units

    def level_words(self, shape: base.Shape, bits: int) -> int:
        """The number of words that a tensor's levels take in lanes of ``bits`` bits."""
        layout = self.layout(shape)
        if not layout.count:
            return 0
        last = layout.count - (layout.blocks - 1) * layout.block
        block = packing.lane_words(layout.block, bits)
        return (layout.blocks - 1) * block + packing.lane_words(last, bits)

    def pack_levels(self, levels: np.ndarray, bits: int) -> np.ndarray:
        """Packs levels into lanes of ``bits`` bits, block by block.

        Args:
            levels: the levels, shape=(n,), dtype int32.
            bits: the number of bits in a lane, 2 to 16; see :func:`packing.lane_bits`.

        Returns:
            Words that can be added, shape=(level_words((n,), bits),), dtype int32.
        """
        block = self.layout(levels.shape).block
        full = levels.size - levels.size % block
        words = packing.pack_lanes(levels[:full].reshape(-1, block), bits)
        return np.concatenate([words.ravel(), packing.pack_lanes(levels[full:], bits)])

    def unpack_levels(self, words: np.ndarray, count: int, bits: int) -> np.ndarray:
        """The inverse of :meth:`pack_levels`, for one rank's words or a sum of ranks' words.

        Returns:
            The levels, shape=(count,), dtype int32.
        """
        block = self.layout((count,)).block
        rows, size = count // block, packing.lane_words(block, bits)
        levels = packing.unpack_lanes(words[: rows * size].reshape(rows, size), block, bits)
        last = packing.unpack_lanes(words[rows * size :], count % block, bits)
        return np.concatenate([levels.ravel(), last])


def usable(norms: np.ndarray) -> np.ndarray:
    """Whether each norm is finite and large enough to have a finite reciprocal."""
    return (norms >= base.TINY) & np.isfinite(norms)
