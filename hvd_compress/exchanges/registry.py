"""The exchanges by name: their collectives, computation, messages, residuals, owners and limits.

To add an exchange, write a generator function with its name in ``engine/exchanges/NAME.py``, its steps in
:mod:`hvd_compress.exchanges.steps`, and its line here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hvd_compress.codecs import Codec
from hvd_compress.codecs.base import Shape
from hvd_compress.exchanges import hosts, integer_sum, steps, two_shot
from hvd_compress.exchanges.hosts import Hosts
from hvd_compress.exchanges.layout import Owners, host_owners
from hvd_compress.exchanges.limits import check_gather
from hvd_compress.exchanges.shards import shared
from hvd_compress.exchanges.steps import Gradient, Message, Steps

Scope = Literal["all", "local", "cross"]
"""The ranks of a collective: all, those of this host, or those with this local rank on all hosts."""


@dataclass(frozen=True)
class Group:
    """The ranks of an exchange.

    Attributes:
        rank: this rank.
        size: the number of ranks.
        hosts: the ranks on their hosts; None if the exchange does not need them.
    """

    rank: int
    size: int
    hosts: Hosts | None = None

    def members(self, scope: Scope) -> list[int]:
        """The ranks that take part in this rank's collectives of the given scope."""
        if scope == "all" or self.hosts is None:
            return list(range(self.size))
        return (self.hosts.within if scope == "local" else self.hosts.between)(self.rank)


@dataclass(frozen=True)
class Exchange:
    """The properties of an exchange that do not depend on a framework.

    Attributes:
        stages: the scopes of the collectives, in order.
        steps: the computation and messages of a rank for one gradient, with one message for each stage.
        residuals: whether ranks keep residuals of their whole gradients.
        check: a function that raises ``ValueError`` if the exchange cannot carry a tensor; its arguments
            are the name, the shape, the codec, the bytes of an element, and the ranks.
        owners: a function that returns the owners of gradients, or None if ranks do not divide gradients.
        on_device: whether the exchange has kernels for GPUs.
        remainders: the scopes of the additional collectives, in order, in a step in which payloads of
            varying length do not fit (:mod:`hvd_compress.exchanges.packing`).
    """

    stages: tuple[Scope, ...]
    steps: Callable[[Gradient], Steps]
    residuals: bool
    check: Callable[[str, Shape, Codec, int, Group], None]
    owners: Callable[[Group], Owners | None] = lambda group: None
    on_device: bool = True
    remainders: tuple[Scope, ...] = ()

    def sends(self, gradient: Gradient) -> list[tuple[Scope, Message]]:
        """The messages that a rank sends for a gradient, and the scopes of their collectives."""
        messages = (step for step in self.steps(gradient) if isinstance(step, Message))
        return list(zip(self.stages, messages, strict=True))


def _check_allgather(name: str, shape: Shape, codec: Codec, width: int, group: Group) -> None:
    check_gather(name, codec.payload_bytes(shape), group.size)


def _check_two_shot(name: str, shape: Shape, codec: Codec, width: int, group: Group) -> None:
    cut = shared(codec, shape)
    two_shot.check(name, cut.codec, cut.shards(group.size))


def _check_hierarchical(name: str, shape: Shape, codec: Codec, width: int, group: Group) -> None:
    assert group.hosts is not None
    cut = shared(codec, shape)
    hosts.check(name, cut.codec, cut.shards(group.hosts.local), group.hosts, width)


def _check_integer_sum(name: str, shape: Shape, codec: Codec, width: int, group: Group) -> None:
    integer_sum.check(name, codec, group.size)


def _owners_on_host(group: Group) -> Owners:
    assert group.hosts is not None
    return host_owners(group.rank, group.hosts)


EXCHANGES: dict[str, Exchange] = {
    "allgather": Exchange(("all",), steps.allgather, True, _check_allgather, remainders=("all",)),
    "two_shot": Exchange(
        ("all", "all"),
        steps.two_shot,
        True,
        _check_two_shot,
        lambda group: Owners(group.size, group.rank, group.size),
        remainders=("all", "all"),
    ),
    "hierarchical": Exchange(
        ("local", "cross", "local"),
        steps.hierarchical,
        False,
        _check_hierarchical,
        _owners_on_host,
        remainders=("cross",),
    ),
    "integer_sum": Exchange(
        ("all", "all"), steps.integer_sum, True, _check_integer_sum, on_device=False
    ),
}
"""The exchanges by the names that compressors use; the first is the default."""

UNCOMPRESSED = Exchange(("all",), steps.uncompressed, False, lambda *gradient: None)
"""The framework's own reduction of gradients that no codec encodes."""
