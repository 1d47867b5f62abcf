"""Plans and their predicted costs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hvd_compress.exchanges.buckets import LIMIT
from hvd_compress.exchanges.routing import UNCOMPRESSED_ROUTE, Route
from hvd_compress.planner.cost import Cost, seconds, sum_of
from hvd_compress.planner.measured import HALF, KINDS, Measured

RoutePlan = tuple[Route, ...]
"""The routes of all tensors, in the order of the tensors."""

_WORTH = 0.1
"""The fraction of the uncompressed exchange that a codec must save if no step is timed."""


@dataclass(frozen=True)
class PlannedTensor:
    """A gradient with the routes that it may take; the first leaves it uncompressed."""

    name: str
    shape: tuple[int, ...]
    element_bytes: int
    choices: tuple[Route, ...] = (UNCOMPRESSED_ROUTE,)
    dtype: str = "float32"

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Candidate:
    """A plan with its predicted price."""

    label: str
    plan: RoutePlan
    price: Cost

    @property
    def seconds(self) -> float:
        """The most seconds that the plan's exchange is predicted to add to a step."""
        return self.price.total

    @property
    def loss(self) -> int:
        """The change of gradients: 0 for none, 1 for a cast, 2 for a codec."""
        return max(map(_loss, self.plan))

    @property
    def exchanges(self) -> frozenset[str]:
        """The exchanges of the plan's payloads."""
        return frozenset(route.exchange for route in self.plan if not route.uncompressed)


def price(tensor: PlannedTensor, route: Route, measured: Measured) -> Cost:
    """The cost of a tensor's exchange; small tensors share the starts of messages with their bucket."""
    half = route.uncompressed and route.cast_dtype == "float16"
    return seconds(
        tensor.shape,
        route,
        measured.speed(route),
        measured.cluster(KINDS[0]),
        element_bytes=tensor.element_bytes,
        links=lambda kind: measured.cluster(HALF if half else kind),
        started=min(1.0, tensor.count / LIMIT),
        bits=measured.bits.get((route.codec, route.feedback)),
    )


def price_of(tensors: Sequence[PlannedTensor], plan: RoutePlan, measured: Measured) -> Cost:
    """The cost of the exchange of all tensors with a plan."""
    return sum_of(price(*pair, measured) for pair in zip(tensors, plan, strict=True))


def label(route: Route, routes: Iterable[Route]) -> str:
    """A short name of a route that differs from the names of the other routes."""
    alike = {other for other in routes if _short(other) == _short(route)}
    return _short(route) if len(alike | {route}) == 1 else str(route)


def uniform(tensors: Sequence[PlannedTensor], route: Route) -> RoutePlan:
    """The plan with the given route for every tensor that may take it; the others are uncompressed."""
    return tuple(route if route in tensor.choices else UNCOMPRESSED_ROUTE for tensor in tensors)


def routes_of(tensors: Iterable[PlannedTensor]) -> list[Route]:
    """All choices of all tensors, in the order in which they first appear."""
    return list(dict.fromkeys(route for tensor in tensors for route in tensor.choices))


def smallest(tensors: Sequence[PlannedTensor], hosts: int, local: int) -> RoutePlan:
    """The plan that sends the fewest bytes, which is the safest one before anything is measured."""
    alike = Measured(hosts, local, 1.0, 0.0, dict.fromkeys(KINDS, 1.0))
    return min(propose(tensors, alike), key=lambda candidate: candidate.price.sent).plan


def propose(tensors: Sequence[PlannedTensor], measured: Measured) -> list[Candidate]:
    """The plans to consider, by predicted time, the fastest first.

    For each route, there is a plan with this route for all tensors that may take it; a mixed plan has the
    cheapest route of each tensor. Among equally fast plans, the one that changes gradients less is first.
    """
    routes = sorted(routes_of(tensors), key=_loss)
    plans: dict[RoutePlan, str] = {}
    for route in routes:
        plans.setdefault(uniform(tensors, route), label(route, routes))
    prices = {tensor: {r: price(tensor, r, measured) for r in tensor.choices} for tensor in tensors}
    cheapest = [min(t.choices, key=lambda r, t=t: prices[t][r].total) for t in tensors]  # type: ignore[misc]
    plans.setdefault(tuple(cheapest), "mixed")
    candidates = []
    for plan, name in plans.items():
        total = sum_of(prices[tensor][route] for tensor, route in zip(tensors, plan, strict=True))
        candidates.append(Candidate(name, plan, total))
    return sorted(candidates, key=lambda candidate: candidate.seconds)


def predicted_best(
    tensors: Sequence[PlannedTensor], measured: Measured, bursts: Sequence[Measured] = ()
) -> Candidate:
    """The plan to use if no step can be timed: the fastest, unless its gain may be noise.

    A codec must save a tenth of the uncompressed exchange, according to ``measured`` and also to each of
    the ``bursts`` of measurements that ``measured`` is made from.
    """
    plain = uniform(tensors, UNCOMPRESSED_ROUTE)

    def gains(plan: RoutePlan) -> bool:
        return plan == plain or all(
            price_of(tensors, plan, one).total < (1 - _WORTH) * price_of(tensors, plain, one).total
            for one in (measured, *bursts)
        )

    return next(one for one in propose(tensors, measured) if gains(one.plan))


def _short(route: Route) -> str:
    return route.codec.name if route.uncompressed else f"{route.codec.name} {route.kind}"


def _loss(route: Route) -> int:
    """A sort key: 0 for uncompressed, 1 for a cast, 2 for others, which keep the user's order."""
    return 0 if route == UNCOMPRESSED_ROUTE else 1 if route.uncompressed else 2
