"""What a planner may choose among, from what a user allows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvd_compress.codecs import SCHEMES, Codec, ErrorFeedback, codec_from_config
from hvd_compress.codecs.base import check_choice
from hvd_compress.codecs.registry import scheme_of
from hvd_compress.exchange.routing import DENSE, EXCHANGES, Route, Router
from hvd_compress.perfmodel import exchanges as model
from hvd_compress.planner.measured import Coding
from hvd_compress.planner.plans import Tensor

DEFAULT_CODECS = ("fp16", "int8", "onebit")
"""A cast, eight bits, and one bit whose error is sent later."""


def allowed(codecs: Sequence[Any], exchanges: Sequence[str]) -> list[Route]:
    """Every allowed way, those without a codec first.

    Args:
        codecs: names of schemes, which have their papers' error feedback, codecs, or pairs of a codec and
            its :class:`ErrorFeedback`.
        exchanges: how payloads may travel.

    Raises:
        TypeError, ValueError: "expected X, got Y".
    """
    if isinstance(codecs, str) or not isinstance(codecs, Sequence):
        raise TypeError(
            f"Auto.codecs: expected a sequence of codecs or their names, got {codecs!r}"
        )
    if isinstance(exchanges, str) or not isinstance(exchanges, Sequence):
        raise TypeError(f"Auto.exchanges: expected a sequence of names, got {exchanges!r}")
    for exchange in exchanges:
        check_choice("Auto", "exchanges", exchange, EXCHANGES)
    routes = []
    for codec, feedback in map(_coding, codecs):
        one = Route(codec, feedback)
        if one.dense:
            routes.append(one)
        else:
            # Where no model can say what an exchange costs, it cannot be planned with.
            known = (exchange for exchange in exchanges if exchange in model.EXCHANGES)
            routes += [dataclasses.replace(one, exchange=exchange) for exchange in known]
    return sorted(dict.fromkeys(routes), key=lambda route: not route.dense)


def tensor_of(
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    item_bytes: int,
    *,
    routes: Sequence[Route],
    router: Router,
    check: Callable[[Route], None],
) -> Tensor:
    """A gradient with the ways that it may take.

    Args:
        name: what patterns match.
        shape: its shape.
        dtype: its type's name.
        item_bytes: of an element.
        routes: those that are allowed.
        router: what goes uncompressed in any case.
        check: raises ``TypeError`` or ``ValueError`` where the tensor cannot take a route with a codec.
    """
    choices = [DENSE]
    for route in routes:
        try:
            taken = router.with_route(route).choose(name, shape, dtype)
            if not taken.dense:
                check(taken)
        except (TypeError, ValueError):
            continue  # This tensor cannot go that way.
        if taken.dense and dtype != "float32":
            continue  # Nothing is cast.
        if taken not in choices:
            choices.append(taken)
    # Horovod has no bfloat16.
    sent_bytes = 4 if dtype == "bfloat16" else item_bytes
    return Tensor(name, shape, sent_bytes, tuple(choices))


def codings_of(tensors: Sequence[Tensor]) -> list[Coding]:
    """What some tensor may be encoded with or cast to, each once."""
    routes = (route for tensor in tensors for route in tensor.choices[1:])
    return list(dict.fromkeys((route.codec, route.feedback) for route in routes))


def nothing_to_choose(ranks: int) -> str:
    """Why there is no plan: the text that stands for an explanation."""
    if ranks == 1:
        return "nothing to choose: there is one rank"
    return "nothing to choose: no tensor is large enough for a codec, or of a dtype that has one"


def config_of(route: Route) -> dict[str, Any]:
    """A route as JSON has it."""
    feedback = {"alpha": route.feedback.alpha, "beta": route.feedback.beta}
    return {"codec": route.codec.to_config(), **feedback, "exchange": route.exchange}


def route_of(config: Mapping[str, Any]) -> Route:
    """The route of :func:`config_of`."""
    feedback = ErrorFeedback(config["alpha"], config["beta"])
    return Route(codec_from_config(dict(config["codec"])), feedback, config["exchange"])


def _coding(given: Any) -> Coding:
    if isinstance(given, str):
        check_choice("Auto", "codecs", given, tuple(SCHEMES))
        return SCHEMES[given].codec(), SCHEMES[given].feedback
    if isinstance(given, Codec):
        return given, scheme_of(given).feedback
    if isinstance(given, tuple) and list(map(type, given))[1:] == [ErrorFeedback]:
        codec, feedback = given
        if isinstance(codec, Codec):
            return codec, feedback
    raise TypeError(
        f"Auto.codecs: expected names, codecs, or pairs of a codec and ErrorFeedback, got {given!r}"
    )
