"""The routes that a planner may choose among, from what a user allows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from hvd_compress.codecs import SCHEMES, Codec, ErrorFeedback
from hvd_compress.codecs.base import check_choice
from hvd_compress.codecs.registry import scheme_of
from hvd_compress.exchanges.routing import EXCHANGE_NAMES, UNCOMPRESSED_ROUTE, Route, Router
from hvd_compress.planner.measured import Coding
from hvd_compress.planner.plans import PlannedTensor

DEFAULT_CODECS = ("fp16", "int8", "onebit")


def allowed(codecs: Sequence[Any], exchanges: Sequence[str]) -> list[Route]:
    """Every allowed route, those without a codec first; ``TypeError`` or ``ValueError`` if one is wrong.

    Args:
        codecs: names of schemes, which have their papers' error feedback, codecs, or pairs of a codec
            and its :class:`ErrorFeedback`.
        exchanges: names of exchanges.
    """
    kinds = {"codecs": (codecs, "codecs or their names"), "exchanges": (exchanges, "names")}
    for field, (given, kind) in kinds.items():
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise TypeError(f"Auto.{field}: expected a sequence of {kind}, got {given!r}")
    for exchange in exchanges:
        check_choice("Auto", "exchanges", exchange, EXCHANGE_NAMES)
    routes = []
    for one in (Route(*_coding(given)) for given in codecs):
        names = [one.exchange] if one.uncompressed else exchanges
        routes += [dataclasses.replace(one, exchange=name) for name in names]
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


def _coding(given: Any) -> Coding:
    if isinstance(given, str):
        check_choice("Auto", "codecs", given, tuple(SCHEMES))
        return SCHEMES[given].codec(), SCHEMES[given].feedback
    codec, *rest = given if isinstance(given, tuple) and given else (given,)
    if isinstance(codec, Codec) and not rest:
        return codec, scheme_of(codec).feedback
    if isinstance(codec, Codec) and [type(one) for one in rest] == [ErrorFeedback]:
        return codec, rest[0]
    raise TypeError(
        f"Auto.codecs: expected names, codecs, or pairs of a codec and ErrorFeedback, got {given!r}"
    )
