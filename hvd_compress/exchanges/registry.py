"""The exchanges by name. To add an exchange, write one module like the others, and its line here."""

from __future__ import annotations

from hvd_compress.exchanges import (
    allgather,
    hierarchical,
    integer_sum,
    low_rank,
    two_shot,
    uncompressed,
)
from hvd_compress.exchanges.base import Exchange

EXCHANGES: dict[str, Exchange] = {
    "allgather": allgather.EXCHANGE,
    "two_shot": two_shot.EXCHANGE,
    "hierarchical": hierarchical.EXCHANGE,
    "integer_sum": integer_sum.EXCHANGE,
    "low_rank": low_rank.EXCHANGE,
}
"""The exchanges by the names that compressors use."""

UNCOMPRESSED = uncompressed.EXCHANGE
"""The framework's own reduction of gradients that no codec encodes."""
