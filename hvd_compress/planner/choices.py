"""The routes among which a planner may choose, from the user's settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hvd_compress.codecs.checks import check_choice
from hvd_compress.codecs.registry import expect_payloads
from hvd_compress.exchanges.routing import (
    PLANNED_NAMES,
    UNCOMPRESSED_ROUTE,
    Route,
    Router,
    route_of,
)
from hvd_compress.planner.plans import PlannedTensor

DEFAULT_CODECS = ("fp16", "int8")
"""The codecs of every ``Auto`` unless a script names others: no record sets them apart from uncompressed
training, whatever the optimizer. Fewer bits cost accuracy with some optimizers, and a planner sees time
alone."""


def check_planned(exchange: str, where: str) -> None:
    """Raises ``ValueError`` for an exchange that no planner chooses; ``where`` is the parameter."""
    owner, _, option = where.rpartition(".")
    check_choice(owner, option, exchange, PLANNED_NAMES)


def allowed(
    codecs: Sequence[Any],
    exchanges: Sequence[str],
    check: Callable[[str, str], None] = check_planned,
) -> list[Route]:
    """All allowed routes, uncompressed ones first; raises ``TypeError`` or ``ValueError`` for a wrong one.

    Args:
        codecs: codecs, :class:`~hvd_compress.Route` objects or names of codecs.
        exchanges: the names of the exchanges for codecs and routes without their own exchange.
        check: a function that raises ``ValueError`` for the name of an exchange that the frontend's planner
            cannot choose; its second argument is the parameter, for the message.
    """
    kinds = {"codecs": (codecs, "codecs or their names"), "exchanges": (exchanges, "names")}
    for field, (given, kind) in kinds.items():
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise TypeError(f"Auto.{field}: expected a sequence of {kind}, got {given!r}")
    for exchange in exchanges:
        check(exchange, "Auto.exchanges")
    routes = []
    for one in (route_of(given, "", "Auto.codecs") for given in codecs):
        expect_payloads("Auto.codecs", one.codec)
        if one.exchange:
            check(one.exchange, "Auto.codecs.exchange")
        if one.uncompressed:
            routes.append(replace(one, exchange=PLANNED_NAMES[0]))
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
        name, shape, dtype, item_bytes: the gradient's name, shape, dtype, and bytes per element.
        routes: the routes that the user allows.
        router: the router that decides which tensors are never compressed.
        check: a function that raises ``TypeError`` or ``ValueError`` if the tensor cannot take a route
            with a codec.
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
