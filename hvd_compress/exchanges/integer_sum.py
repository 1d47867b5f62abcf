"""The integer sum: ranks share the largest norms, and their levels are added as integers.

This is TernGrad's scaler sharing (section 3.1): with one scale for all ranks, the sum of their values has
few levels, and a plain allreduce can compute it. Levels are sent in lanes of 32-bit words, which are as
narrow as the sum over all ranks allows.

After the levels, a message has two more words: every rank adds 1 to the first, which counts the senders,
and the check of its words and norms to the second. Checks are linear: their sum is the check of the sums.
"""

from __future__ import annotations

from hvd_compress.codecs import Codec, LevelCodec
from hvd_compress.codecs.packing import WORD_BITS, lane_bits

_UNCOMPRESSED_BITS = 16
"""The bits of an element in an allreduce of halves, which does not lose anything by rounding to levels."""

EXTRA_WORDS = 2
"""The number of words after the levels: the count of senders, and the check."""

MODULUS = 4194301
"""The modulus of checks: the largest prime below 2**22, so that a word holds 512 ranks' sum."""

COLUMNS = 64
"""The number of columns: word ``j`` is in column ``j`` modulo this number."""

FACTORS = tuple(pow(3, column, MODULUS) for column in range(COLUMNS))
"""The factors of the columns. A check is the sum of all words, as signed numbers of 32 bits, times the
factors of their columns, modulo :data:`MODULUS`. It finds every change of a single word."""


def bits_of(codec: LevelCodec, size: int) -> int:
    """The bits of a lane that holds the sum of ``size`` ranks' levels."""
    return lane_bits(codec.top_level * size)


def most_ranks(codec: LevelCodec) -> int:
    """The largest number of ranks for which a word holds three lanes: with two, halves are as short."""
    bits = WORD_BITS // (WORD_BITS // _UNCOMPRESSED_BITS + 1)
    return (2 ** (bits - 1) - 1) // codec.top_level


def check(name: str, codec: Codec, size: int) -> LevelCodec:
    """Checks that the integer sum can carry the codec's levels; returns the codec.

    Raises:
        ValueError: the codec has no levels or entropy codes them, or lanes would be too wide to be useful.
    """
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
    if size > most_ranks(codec):
        raise ValueError(
            f"{name}: expected at most {most_ranks(codec)} ranks for exchange='integer_sum' with "
            f"{codec.top_level} levels, got {size}: sums of {bits_of(codec, size)} bits are no shorter "
            f"than 16-bit floats; use fewer levels, exchange='two_shot' or fp16"
        )
    return codec
