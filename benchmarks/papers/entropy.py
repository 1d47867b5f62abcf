"""The entropy of codes, a lower bound of their size."""

from __future__ import annotations

from collections import Counter

import numpy as np

from hvd_compress.codecs import Codec, NoiseKey, payload_length
from hvd_compress.codecs.payload import open_payload


class Histogram:
    """The counts of each code, over any number of tensors and steps.

    A code is counted by the number that it decodes to with scales of 1: a level, a magnitude, or the side
    of zero.

    Attributes:
        counts: the counts by code.
        elements: the number of elements that were sent.
        scales: the number of float32 numbers that were sent beside the codes.
        packed_bytes: the bytes of this package's payloads.
    """

    def __init__(self) -> None:
        self.counts: Counter[float] = Counter()
        self.elements = self.scales = self.packed_bytes = 0

    def add(
        self, codec: Codec, shape: tuple[int, ...], noise: NoiseKey, payload: np.ndarray
    ) -> None:
        """Counts the codes of one payload."""
        _, scales, packed = open_payload(codec, shape, noise.step, payload)
        # 1-bit's scales are the values of the lower side, then those of the upper side.
        lower = scales.size // 2 if codec.name == "onebit" else 0
        ones = np.concatenate(
            [np.zeros(lower, np.float32), np.ones(scales.size - lower, np.float32)]
        )
        found, often = np.unique(codec.dequantize(ones, packed, shape), return_counts=True)
        self.counts.update(dict(zip(found.tolist(), often.tolist(), strict=True)))
        self.elements += int(often.sum())
        self.scales += scales.size
        self.packed_bytes += payload_length(payload, payload.size)

    @property
    def code_bits(self) -> float:
        """The empirical entropy of a code, in bits."""
        shares = np.array([often / self.elements for often in self.counts.values()])
        return float(-(shares * np.log2(shares)).sum())

    @property
    def coded_bits(self) -> float:
        """Bits of an element: its code's entropy, and its share of the scales.

        ECQ-SGD, section 4: the sum over codes of ``d_k log2(d / d_k)``, and 32 bits a scale.
        """
        return self.code_bits + 32 * self.scales / self.elements

    @property
    def packed_bits(self) -> float:
        """Bits of an element in this package's payloads, headers and padding included."""
        return 8 * self.packed_bytes / self.elements

    @property
    def zeros(self) -> float:
        """The share of codes that stand for zero; of 1-bit, the share below zero."""
        return self.counts[0.0] / self.elements
