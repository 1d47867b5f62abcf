"""The integer sum: ranks share the largest norms, and their levels are added as integers.

TernGrad's scaler sharing (section 3.1): with one scale for all ranks, the sum of their values has few
levels, and a plain allreduce can add it. Levels travel in lanes of 32-bit words, as narrow as the sum of
that many ranks allows.

Behind the levels, every rank adds 1 to one word, by which senders are counted, and the check of its words
and norms to another one. Checks are linear, so that their sum is the check of the sums.
"""

from __future__ import annotations

from hvd_compress.codecs import Codec, LevelCodec
from hvd_compress.codecs.packing import WORD_BITS, lane_bits

_UNCOMPRESSED_BITS = 16
"""What an element takes in an allreduce of halves, without any loss by rounding to levels."""

EXTRA_WORDS = 2
"""Behind the levels: the count of senders, and the check."""

MODULUS = 4194301
"""Of checks: the largest prime below 2**22, so that a word holds the sum of those of 512 ranks."""

COLUMNS = 64
"""Word ``j`` is in column ``j`` modulo this."""

FACTORS = tuple(pow(3, column, MODULUS) for column in range(COLUMNS))
"""Of the columns. A check is the sum of the words, signed numbers of 32 bits, times the factors of their
columns, modulo :data:`MODULUS`. It finds every change of a single word."""


def bits_of(codec: LevelCodec, size: int) -> int:
    """The width of a lane that holds the levels' sum of ``size`` ranks."""
    return lane_bits(codec.top_level * size)


def most_ranks(codec: LevelCodec) -> int:
    """With how many ranks a word still holds three lanes: fewer would take as long as halves do."""
    bits = WORD_BITS // (WORD_BITS // _UNCOMPRESSED_BITS + 1)
    return (2 ** (bits - 1) - 1) // codec.top_level


def check(name: str, codec: Codec, size: int) -> LevelCodec:
    """The codec, which has levels.

    Raises:
        ValueError: it has none, they are entropy coded, or lanes would be too wide to be worth it.
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
