"""The routes that a planner may choose among, from what a user allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hvd_compress.codecs.checks import check_choice
from hvd_compress.exchanges.routing import (
    EXCHANGE_NAMES,
    UNCOMPRESSED_ROUTE,
    Route,
    Router,
    route_of,
)
from hvd_compress.planner.plans import PlannedTensor

DEFAULT_CODECS = ("fp16", "int8", "onebit")


def allowed(codecs: Sequence[Any], exchanges: Sequence[str]) -> list[Route]:
    """Every allowed route, those without a codec first; ``TypeError`` or ``ValueError`` if one is wrong.

    Args:
        codecs: codecs, :class:`~hvd_compress.Route` objects or names of codecs.
        exchanges: names of exchanges, for what has none of its own.
    """
    kinds = {"codecs": (codecs, "codecs or their names"), "exchanges": (exchanges, "names")}
    for field, (given, kind) in kinds.items():
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise TypeError(f"Auto.{field}: expected a sequence of {kind}, got {given!r}")
    for exchange in exchanges:
        check_choice("Auto", "exchanges", exchange, EXCHANGE_NAMES)
    routes = []
    for one in (route_of(given, "", "Auto.codecs") for given in codecs):
        if one.uncompressed:
            routes.append(replace(one, exchange=EXCHANGE_NAMES[0]))
        else:
            names = [one.exchange] if one.exchange else exchanges
            routes += [replace(one, exchange=name) for name in names]
    return sorted(dict.fromkeys(routes), key=lambda route: not route.uncompressed)


def tensor_of(
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    item_bytes: int,
    *,
    routes: Sequence[Route],
    router: Router,
    check: Callable[[Route], None],
) -> PlannedTensor:
    """A gradient with the routes that it may take.

    Args:
        name, shape, dtype, item_bytes: of the gradient.
        routes: those that the user allows.
        router: decides which tensors are never compressed.
        check: raises ``TypeError`` or ``ValueError`` where the tensor cannot take a route with a codec.
    """
    choices = [UNCOMPRESSED_ROUTE]
    for route in routes:
        try:
            taken = router.with_route(route).choose(name, shape, dtype)
            if not taken.uncompressed:
                check(taken)
        except (TypeError, ValueError):
            continue  # This tensor cannot take that route.
        cast = taken.uncompressed and dtype != "float32"  # Only float32 is cast.
        if taken not in choices and not cast:
            choices.append(taken)
    width = 4 if dtype == "bfloat16" else item_bytes  # Horovod has no bfloat16.
    return PlannedTensor(name, shape, width, tuple(choices), dtype)
