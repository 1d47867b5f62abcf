"""The exchanges that TensorFlow has, by name, and what they can carry."""

from __future__ import annotations

from typing import Any

from hvd_compress.codecs.checks import check_choice
from hvd_compress.codecs.registry import expect_payloads
from hvd_compress.exchanges.default import AUTO
from hvd_compress.exchanges.routing import EXCHANGE_CHOICES, Route, Router
from hvd_compress.tensorflow.exchanges.allgather import Allgather
from hvd_compress.tensorflow.exchanges.base import GraphExchange
from hvd_compress.tensorflow.exchanges.two_shot import TwoShot

EXCHANGES: dict[str, type[GraphExchange]] = {
    "allgather": Allgather,
    "two_shot": TwoShot,
}

NAMES = tuple(EXCHANGES)
"""The names of the exchanges, as users write them."""


def check_name(
    exchange: str, where: str = "Compressor.exchange", choices: tuple[str, ...] = (AUTO, *NAMES)
) -> None:
    """Raises ``ValueError`` for the name of an exchange that is not a choice in TensorFlow.

    Args:
        exchange: the name.
        where: the parameter, for the message.
        choices: the names that the parameter takes.
    """
    if exchange in EXCHANGE_CHOICES and exchange not in (AUTO, *NAMES):
        expected = f"one of {', '.join(map(repr, choices))}"
        raise _only_in_pytorch(where, expected, repr(exchange))
    owner, _, option = where.rpartition(".")
    check_choice(f"hvd_compress.tensorflow.{owner}", option, exchange, choices)


def check_planned(exchange: str, where: str) -> None:
    """The same for a name among which :class:`~hvd_compress.tensorflow.Auto` chooses."""
    check_name(exchange, where, NAMES)


def check_inner(given: Any, where: str) -> None:
    """Raises ``ValueError`` for a route with a codec within hosts, ``inner``.

    Args:
        given: the codec, the Route or the name that the user wrote.
        where: the parameter, for the message.
    """
    if isinstance(given, Route) and given.inner is not None:
        got = f"inner={given.inner!r} for exchange='hierarchical'"
        raise _only_in_pytorch(where, "a Route without a codec within hosts", got)


def _only_in_pytorch(where: str, expected: str, got: str) -> ValueError:
    return ValueError(
        f"hvd_compress.tensorflow.{where}: expected {expected}, got {got}, which only the PyTorch "
        f"frontends have; use {' or '.join(map(repr, NAMES))}"
    )


def check(router: Router, exchange: str, ranks: int) -> None:
    """Raises ``ValueError`` if TensorFlow cannot carry what some routes of a compressor send.

    Args:
        router: the routes.
        exchange: the compressor's exchange.
        ranks: the number of ranks.
    """
    for codec in router.codecs:
        expect_payloads("hvd_compress.tensorflow.Compressor.codec", codec)
        if codec.varies:
            raise ValueError(
                f"hvd_compress.tensorflow: expected coding='plain', got {codec!r}: tracing gives "
                f"a graph's messages their lengths, so that entropy-coded payloads would be padded to the "
                f"length of plain ones; entropy coding is for the PyTorch frontends"
            )
    others = {route.among(ranks).exchange for route in router.encoding} - {exchange}
    for name in (exchange, *others):
        check_name(name)
    if others:
        raise ValueError(
            f"Compressor.layers: expected routes of one exchange, {exchange!r}, or without one, got "
            f"{', '.join(map(repr, sorted(others)))}, too: in TensorFlow, all layers of a compressor take "
            f"the same; make a compressor and a tape for each"
        )
