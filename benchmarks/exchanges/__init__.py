"""What the exchange benchmark measures, by the name that command lines and tables call it."""

from __future__ import annotations

from benchmarks.compressions import Compression, option
from benchmarks.exchanges.allgather import AllGather
from benchmarks.exchanges.allreduce import AllReduce
from benchmarks.exchanges.base import Exchange
from benchmarks.exchanges.hierarchical import Hierarchical
from benchmarks.exchanges.integer_sum import IntegerSum
from benchmarks.exchanges.two_shot import TwoShot

EXCHANGES: dict[str, type[Exchange]] = {
    "allreduce": AllReduce,
    "allgather": AllGather,
    "two_shot": TwoShot,
    "integer_sum": IntegerSum,
    "hierarchical": Hierarchical,
}


def exchange(text: str) -> Exchange:
    """Reads ``EXCHANGE:COMPRESSION[:key=value,...]``, such as ``allgather:onebit:group=512``.

    Raises:
        ValueError, TypeError: there is no such exchange, or it takes no such compression.
    """
    name, _, rest = text.partition(":")
    if name not in EXCHANGES or not rest:
        expected = ", ".join(f"{known}:COMPRESSION" for known in EXCHANGES)
        raise ValueError(f"expected one of {expected}, got {text!r}")
    codec, _, options = rest.partition(":")
    chosen = dict(option(part) for part in options.split(",") if part)
    try:
        return EXCHANGES[name].of(Compression(rest, codec, chosen))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None
