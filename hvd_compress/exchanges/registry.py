"""Every exchange by name: its collectives, what it computes and sends, who keeps what, what it can carry.

To add an exchange: a generator function of its name in ``engine/exchanges/NAME.py``, its steps in
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
        size: how many there are.
        hosts: where they are; None where the exchange does not ask.
    """

    rank: int
    size: int
    hosts: Hosts | None = None

    def members(self, scope: Scope) -> list[int]:
        """The ranks that a collective of this rank is among."""
        if scope == "all" or self.hosts is None:
            return list(range(self.size))
        return (self.hosts.within if scope == "local" else self.hosts.between)(self.rank)


@dataclass(frozen=True)
class Exchange:
    """What is known of an exchange without a framework.

    Attributes:
        stages: the scopes of its collectives, in order.
        steps: what a rank computes and sends for one gradient, with a message for each stage.
        residuals: whether ranks keep residuals of their whole gradients.
        check: raises ``ValueError`` where it cannot carry a tensor, of which it is told the name, the
            shape, the codec, the bytes of an element, and the ranks.
        owners: how ranks share gradients out; None where they do not.
        on_device: whether it has kernels for GPUs.
        remainders: the scopes of the collectives that follow in a step in which payloads of varying length
            do not fit, in order (:mod:`hvd_compress.exchanges.packing`).
    """

    stages: tuple[Scope, ...]
    steps: Callable[[Gradient], Steps]
    residuals: bool
    check: Callable[[str, Shape, Codec, int, Group], None]
    owners: Callable[[Group], Owners | None] = lambda group: None
    on_device: bool = True
    remainders: tuple[Scope, ...] = ()

    def sends(self, gradient: Gradient) -> list[tuple[Scope, Message]]:
        """What a rank sends of a gradient, and among which ranks."""
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
"""By the name that compressors call it; the first is the default."""

UNCOMPRESSED = Exchange(("all",), steps.uncompressed, False, lambda *gradient: None)
"""What the framework does itself with gradients that no codec encodes."""
