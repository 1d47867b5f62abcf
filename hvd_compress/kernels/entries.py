"""The places of tensors that share a message."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hvd_compress.codecs import Codec, ErrorFeedback, NoiseKey
from hvd_compress.codecs.base import Shape


@dataclass(frozen=True)
class Entry:
    """One tensor's place in a batch.

    Attributes:
        codec: the codec that encodes the tensor.
        shape: the tensor's shape; arrays are flat and row-major.
        feedback: the error feedback coefficients; if they are not enabled, there is no residual.
        noise: the seed, rank and tensor of the noise; the step is an argument of each call.
        offset: the offset of the payload in the message in bytes, a multiple of 4.
    """

    codec: Codec
    shape: Shape
    feedback: ErrorFeedback
    noise: NoiseKey
    offset: int

    @property
    def end(self) -> int:
        """The offset of the payload's end in the message, in bytes."""
        return self.offset + self.codec.payload_bytes(self.shape)


@dataclass(frozen=True)
class Arrays:
    """The places of the entries' values and residuals in the arrays of a call.

    Attributes:
        sizes: the number of elements in each array.
        places: each entry's array, by number, and the entry's first element in this array.
    """

    sizes: Sequence[int]
    places: Sequence[tuple[int, int]]

    @classmethod
    def whole(cls, shapes: Iterable[Shape]) -> Arrays:
        """One whole array for each entry."""
        sizes = [math.prod(shape) for shape in shapes]
        return cls(sizes, [(number, 0) for number in range(len(sizes))])
