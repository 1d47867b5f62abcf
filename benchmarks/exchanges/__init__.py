"""The exchanges that the exchange benchmark measures, by their names on command lines and in tables."""

from __future__ import annotations

from benchmarks.compressions import Compression, option
from benchmarks.exchanges.allreduce import AllReduce
from benchmarks.exchanges.base import Exchange
from benchmarks.exchanges.coded import Coded
from hvd_compress.exchanges.routing import EXCHANGE_NAMES

ALLREDUCE = "allreduce"
EXCHANGES = (ALLREDUCE, *EXCHANGE_NAMES)


def exchange(text: str) -> Exchange:
    """Reads ``EXCHANGE:COMPRESSION[:key=value,...]``, such as ``allgather:onebit:group=512``.

    Raises:
        ValueError, TypeError: an unknown exchange, or a compression that the exchange does not take.
    """
    name, _, rest = text.partition(":")
    if name not in EXCHANGES or not rest:
        expected = ", ".join(f"{known}:COMPRESSION" for known in EXCHANGES)
        raise ValueError(f"expected one of {expected}, got {text!r}")
    codec, _, options = rest.partition(":")
    chosen = dict(option(part) for part in options.split(",") if part)
    compression = Compression(rest, codec, chosen)
    try:
        return AllReduce.of(compression) if name == ALLREDUCE else Coded.of(name, compression)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None
