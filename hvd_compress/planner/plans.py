"""Plans, and what they are predicted to cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hvd_compress.exchange.bundling import LIMIT
from hvd_compress.exchange.routing import DENSE, Route
from hvd_compress.perfmodel import cost
from hvd_compress.perfmodel.exchanges import Work, together
from hvd_compress.planner.measured import KINDS, Measured, kind

Plan = tuple[Route, ...]
"""A route for every tensor, in their order."""

_WEIGHTS = (0.25, 0.5, 1.0)
"""What a second of transfer is weighed with, beside a second of computing, to find mixed plans."""


@dataclass(frozen=True)
class Tensor:
    """A gradient that is exchanged in every step.

    Attributes:
        name: the parameter's.
        shape: its shape.
        element_bytes: of the gradient's type.
        choices: the routes that it may take; the first is :data:`~hvd_compress.exchange.routing.DENSE`.
    """

    name: str
    shape: tuple[int, ...]
    element_bytes: int
    choices: tuple[Route, ...] = (DENSE,)

    @property
    def count(self) -> int:
        """Its elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Price:
    """What one tensor, or all of them, cost in a step.

    Attributes:
        codec: seconds of encoding and decoding.
        wire: seconds of transfer.
        sent: bytes that a rank sends.
    """

    codec: float = 0.0
    wire: float = 0.0
    sent: float = 0.0

    def __add__(self, other: Price) -> Price:
        return Price(self.codec + other.codec, self.wire + other.wire, self.sent + other.sent)

    def __sub__(self, other: Price) -> Price:
        return Price(self.codec - other.codec, self.wire - other.wire, self.sent - other.sent)


@dataclass(frozen=True)
class Candidate:
    """A plan with its prediction.

    Attributes:
        label: what it is called.
        plan: a route for every tensor.
        price: of all tensors.
        seconds: what the exchange adds to a step: codecs, and the transfer that is not hidden.
    """

    label: str
    plan: Plan
    price: Price
    seconds: float

    @property
    def loss(self) -> int:
        """How gradients are changed: 0 not at all, 1 by a cast, 2 by a codec."""
        return max(map(_loss, self.plan))

    @property
    def exchanges(self) -> frozenset[str]:
        """Those that its payloads take."""
        return frozenset(route.exchange for route in self.plan if not route.dense)


def price(tensor: Tensor, route: Route, measured: Measured) -> Price:
    """What a tensor's exchange costs by :mod:`hvd_compress.perfmodel.cost`.

    Messages of small tensors travel together, by Horovod's fusion or in bundles. So of a collective's
    start a tensor pays only its part of a bundle.
    """
    speed, part = measured.speed(route), min(1.0, tensor.count / LIMIT)
    ranks = measured.cluster(KINDS[0])
    total = Price()
    for step in cost.steps_of(tensor.shape, route, ranks, element_bytes=tensor.element_bytes):
        if isinstance(step, Work):
            seconds = step.encoded * speed.encode + step.decoded * speed.decode
            total += Price(codec=seconds + step.added * speed.add)
        elif step.rounds:
            cluster = measured.cluster(kind(step, route))
            shared = (1 - part) * cluster.start
            total += Price(wire=together([(step, speed)], cluster) - shared, sent=step.sent)
    return total


def label(route: Route, routes: Iterable[Route]) -> str:
    """A route's short name, unlike those of the other routes."""
    alike = {other for other in routes if _short(other) == _short(route)}
    return _short(route) if len(alike | {route}) == 1 else str(route)


def uniform(tensors: Sequence[Tensor], route: Route) -> Plan:
    """The plan in which every tensor that may take a route takes it, and the others go as they are."""
    return tuple(route if route in tensor.choices else DENSE for tensor in tensors)


def routes_of(tensors: Iterable[Tensor]) -> list[Route]:
    """All choices of all tensors, in the order in which they first appear."""
    return list(dict.fromkeys(route for tensor in tensors for route in tensor.choices))


def smallest(tensors: Sequence[Tensor], hosts: int, local: int) -> Plan:
    """The uniform plan that sends the fewest bytes: before anything is measured it risks least.

    On a slow network it saves most, and on a fast one all it costs is computing.
    """
    ranks = cost.Cluster(hosts, local, cost.Link(math.inf))

    def sent(route: Route) -> float:
        taken = zip(tensors, uniform(tensors, route), strict=True)
        return sum(
            cost.wire_bytes(tensor.shape, chosen, ranks, element_bytes=tensor.element_bytes)
            for tensor, chosen in taken
        )

    return uniform(tensors, min(routes_of(tensors), key=sent, default=DENSE))


def propose(tensors: Sequence[Tensor], measured: Measured) -> list[Candidate]:
    """All plans worth a thought, those that are predicted to be fastest first.

    One for each route that all tensors take as far as they may, and the best mixed one that was found. Of
    equals, the one that changes gradients less is first.

    Args:
        tensors: at least one.
        measured: the job.
    """
    prices = {
        (tensor, route): price(tensor, route, measured)
        for tensor in set(tensors)
        for route in tensor.choices
    }
    routes = routes_of(tensors)
    plans: dict[Plan, str] = {}
    for route in sorted(routes, key=_loss):
        plans.setdefault(uniform(tensors, route), label(route, routes))
    plans.setdefault(_mixed(tensors, prices, measured.window), "mixed")
    candidates = []
    for plan, name in plans.items():
        total = sum((prices[taken] for taken in zip(tensors, plan, strict=True)), start=Price())
        candidates.append(Candidate(name, plan, total, _seconds(total, measured.window)))
    return sorted(candidates, key=lambda one: one.seconds)


def behind(tensors: Sequence[Tensor], plan: Plan, measured: Measured) -> float:
    """Seconds of a step by which a plan is predicted to be behind the best one."""
    prices = (price(*taken, measured) for taken in zip(tensors, plan, strict=True))
    own = _seconds(sum(prices, start=Price()), measured.window)
    return max(0.0, own - propose(tensors, measured)[0].seconds)


def _mixed(
    tensors: Sequence[Tensor], prices: Mapping[tuple[Tensor, Route], Price], window: float
) -> Plan:
    """The fastest of many plans in which tensors take ways of their own.

    Transfer is free as long as it is hidden, so that only as many tensors are encoded as it takes. For each
    weight of transfer beside computing, tensors change to their cheapest way one by one, those that save
    most for their codec's time first.
    """
    dense: Plan = tuple(tensor.choices[0] for tensor in tensors)
    best, fastest = dense, math.inf
    for weight in _WEIGHTS:
        plan = list(dense)
        total = sum((prices[tensor, DENSE] for tensor in tensors), start=Price())
        changes = []
        for index, tensor in enumerate(tensors):
            costs = {
                r: prices[tensor, r].codec + weight * prices[tensor, r].wire for r in tensor.choices
            }
            route = min(costs, key=costs.__getitem__)
            change = prices[tensor, route] - prices[tensor, DENSE]
            worth = -change.wire / change.codec if change.codec > 0 else math.inf
            changes.append((-worth, index, route, change))
        for _, index, route, change in sorted(changes, key=lambda c: c[:2]):
            plan[index], total = route, total + change
            if _seconds(total, window) < fastest:
                best, fastest = tuple(plan), _seconds(total, window)
    return best


def _seconds(total: Price, window: float) -> float:
    return total.codec + max(0.0, total.wire - window)


def _short(route: Route) -> str:
    return route.codec.name if route.dense else f"{route.codec.name} {route.exchange}"


def _loss(route: Route) -> int:
    """As it is, then cast, then anything else; sorting keeps the user's order among these."""
    return 0 if route == DENSE else 1 if route.dense else 2
