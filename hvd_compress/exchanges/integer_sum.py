"""The integer sum: ranks share the largest norms, and their levels are added as integers.

This is TernGrad's scaler sharing (section 3.1): with one scale for all ranks, the sum of their values has
few levels, and a plain allreduce can compute it. Levels are sent in lanes of 32-bit words, which are as
narrow as the sum over all ranks allows. NumPy computes them: this exchange is for experiments.

After the levels, a message has two more words: every rank adds 1 to the first, which counts the senders,
and the check of its words and norms to the second. Checks are linear: their sum is the check of the sums.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from hvd_compress.codecs import Codec, LevelCodec
from hvd_compress.codecs.base import Shape
from hvd_compress.codecs.packing import WORD_BITS, lane_bits
from hvd_compress.exchanges.base import ByRank, Exchange
from hvd_compress.exchanges.comm import Array, Comm, Exchanging, Group
from hvd_compress.exchanges.simulation import Ranks
from hvd_compress.exchanges.steps import Computation, Gradient, Steps, all_reduce

_UNCOMPRESSED_BITS = 16
"""The bits of an element in an allreduce of halves, which does not lose anything by rounding to levels."""

EXTRA_WORDS = 2
"""The number of words after the levels: the count of senders, and the check."""

MODULUS = 4194301
"""The modulus of checks: the largest prime below 2**22, so that a word holds 512 ranks' sum."""

_FACTORS = np.array([pow(3, column, MODULUS) for column in range(64)])
"""The factors of words: word ``j`` has the one whose number is ``j`` modulo 64."""


def bits_of(codec: LevelCodec, size: int) -> int:
    """The bits of a lane that holds the sum of ``size`` ranks' levels."""
    return lane_bits(codec.top_level * size)


def most_ranks(codec: LevelCodec) -> int:
    """The largest number of ranks for which a word holds three lanes: with two, halves are as short."""
    bits = WORD_BITS // (WORD_BITS // _UNCOMPRESSED_BITS + 1)
    return (2 ** (bits - 1) - 1) // codec.top_level


def check_of(words: np.ndarray) -> int:
    """The sum of all words, as signed numbers, times their factors, modulo :data:`MODULUS`.

    Checks are linear, and find every change of a single word.

    Args:
        words: shape=(n,), dtype int32.
    """
    columns = np.zeros((-(-words.size // _FACTORS.size), _FACTORS.size), np.int64)
    columns.reshape(-1)[: words.size] = words
    return int(columns.sum(0) % MODULUS @ _FACTORS) % MODULUS


def steps(gradient: Gradient) -> Steps:
    """Ranks compute norms, share the maximum, encode levels with it, and sum the levels."""
    codec, shape = gradient.codec, gradient.shape
    assert isinstance(codec, LevelCodec)
    words = codec.level_words(shape, bits_of(codec, gradient.hosts.size))
    return (
        Computation(added=gradient.count),
        all_reduce(codec.layout(shape).scales),
        Computation(encoded=gradient.count),
        all_reduce(words, WORD_BITS // 8),
        Computation(decoded=gradient.count),
    )


def check(name: str, shape: Shape, codec: Codec, element_bytes: int, group: Group) -> None:
    """Raises ``ValueError`` if the codec has no levels or entropy codes them, or lanes are too wide."""
    if not isinstance(codec, LevelCodec):
        raise ValueError(
            f"{name}: expected a codec of evenly spaced levels around 0 for exchange='integer_sum', such "
            f"as ternary, ecq or qsgd, got {codec!r}: its codes have no common unit in which they could "
            f"be added; use exchange='two_shot', or None for this tensor in layers="
        )
    if codec.varies:
        raise ValueError(
            f"{name}: expected coding='plain' for exchange='integer_sum', got {codec!r}: ranks add levels, "
            f"and send no payloads that an entropy code could shorten; use coding='plain', or another "
            f"exchange"
        )
    if group.size > most_ranks(codec):
        raise ValueError(
            f"{name}: expected at most {most_ranks(codec)} ranks for exchange='integer_sum' with "
            f"{codec.top_level} levels, got {group.size}: sums of {bits_of(codec, group.size)} bits are no "
            f"shorter than 16-bit floats; use fewer levels, exchange='two_shot' or fp16"
        )


def reference(ranks: Ranks, name: str, gradients: ByRank, scale: float) -> np.ndarray:
    """The result on every rank."""
    codec, kept = ranks.codec, [residuals[name] for residuals in ranks.residuals]
    assert isinstance(codec, LevelCodec)
    inputs = [ranks.compensate(g, h) for g, h in zip(gradients, kept, strict=True)]
    if not inputs[0].size:
        return inputs[0]
    norms = np.max([codec.norms(x) for x in inputs], axis=0)
    ranks.see(norms)
    total = np.zeros(inputs[0].size, np.int32)
    for rank, x in enumerate(inputs):
        noise = ranks.noise(name, rank)
        levels = codec.to_levels(x, norms, noise)
        total += levels
        ranks.carry(gradients[rank], kept[rank], codec.from_levels(levels, norms), noise)
    return codec.from_levels(total, norms) * np.float32(scale)


class Levels(Protocol):
    """A bucket's gradients as levels that ranks add; see :mod:`hvd_compress.engine.levels`."""

    def norms(self) -> Array:
        """This rank's norms and flags, shape=(norms,), float32."""
        ...

    def encode(self, norms: Array) -> Array:
        """This rank's levels for the largest norms of all ranks, shape=(words,), int32."""
        ...

    def load(self, norms: Array, words: Array) -> None:
        """Takes the largest norms and the sum of the levels, which are decoded at the end of the step."""
        ...


def run(levels: Levels, comm: Comm) -> Exchanging:
    """Shares the largest norms, and then adds levels.

    The flags are sent with the norms: their maximum is 1 if some rank used the gradient. A rank that fails
    adds zeros, and does not count itself in the word behind the levels.
    """
    norms = yield comm.all_reduce(levels.norms(), "max")
    words = yield comm.all_reduce(levels.encode(norms))
    levels.load(norms, words)


EXCHANGE = Exchange(("all", "all"), steps, reference, run, check, experimental=True)
