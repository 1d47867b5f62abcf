"""The exchanges that TensorFlow has, by the kind of a route, and what they can carry."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_compress.codecs import Codec
from hvd_compress.codecs.checks import check_choice
from hvd_compress.codecs.registry import expect_payloads
from hvd_compress.exchanges.default import AUTO
from hvd_compress.exchanges.routing import EXCHANGE_CHOICES, EXCHANGE_NAMES, Router
from hvd_compress.kernels.native import spec_of
from hvd_compress.tensorflow.exchanges.allgather import Allgather
from hvd_compress.tensorflow.exchanges.base import GraphExchange
from hvd_compress.tensorflow.exchanges.hierarchical import Hierarchical, HierarchicalByTwoCodecs
from hvd_compress.tensorflow.exchanges.two_shot import TwoShot

EXCHANGES: dict[str, type[GraphExchange]] = {
    "allgather": Allgather,
    "two_shot": TwoShot,
    "hierarchical": Hierarchical,
    "hierarchical by two codecs": HierarchicalByTwoCodecs,
}

NAMES = tuple(name for name in EXCHANGE_NAMES if name in EXCHANGES)
"""The names of the exchanges, as users write them."""


def check_name(exchange: str) -> None:
    """Raises ``ValueError`` for the name of an exchange that TensorFlow does not have."""
    if exchange in EXCHANGE_CHOICES and exchange not in (AUTO, *NAMES):
        raise ValueError(
            f"hvd_compress.tensorflow.Compressor.exchange: expected one of "
            f"{', '.join(map(repr, (AUTO, *NAMES)))}, got {exchange!r}, which only the PyTorch frontends "
            f"have; use 'allgather' or 'two_shot'"
        )
    check_choice("hvd_compress.tensorflow.Compressor", "exchange", exchange, (AUTO, *NAMES))


def kernels_for_gpus(exchange: str, codecs: Sequence[Codec]) -> tuple[str, bool]:
    """The setting that decides on kernels for GPUs, for messages, and whether there are such kernels."""
    for codec in codecs:
        if spec_of(codec, ()) is None or not codec.on_device:
            return repr(codec), False
    return f"exchange={exchange!r}", EXCHANGES[exchange].on_gpu


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
