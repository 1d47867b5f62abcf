"""The description of an exchange, and the ranks that take part in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hvd_compress.exchanges.hosts import Hosts
from hvd_compress.exchanges.layout import Owners
from hvd_compress.exchanges.steps import Gradient, Message, Steps

if TYPE_CHECKING:
    from hvd_compress.engine.comm import Comm, Exchanging
    from hvd_compress.exchanges.reference import Simulation

ByRank = list[np.ndarray]
"""One array for each rank."""

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
    """All that distinguishes one exchange from the others.

    Attributes:
        stages: the scopes of the collectives, in order.
        steps: a function that returns the computation and messages of a rank for one gradient, with one
            message for each stage.
        reference: the definition of the result on every rank, in NumPy. Its arguments are the
            :class:`~hvd_compress.exchanges.reference.Simulation`, which holds the residuals; a tensor's
            name; the ranks' gradients of the tensor, shape=(n,), float32 each, transposed if ranks divide
            columns; and the factor of the ranks' sum. It returns the result, in the same order.
        run: the exchange of a bucket, a generator function. Its arguments are a
            :class:`~hvd_compress.engine.batch.Batch` and a :class:`~hvd_compress.engine.comm.Comm`. It
            yields collectives, and receives their results.
        check: a function that raises ``ValueError`` if the exchange cannot carry a tensor; its arguments
            are the name, the shape, the codec, the bytes of an element, the ranks, and ``inner`` if the
            route has such a codec.
        owners: a function that returns the owners of gradients, or None if ranks do not divide gradients.
        residuals: whether ranks keep residuals of their whole gradients; a codec within hosts makes them.
        on_device: whether the exchange has kernels for GPUs.
        remainders: the scopes of the additional collectives, in order, in a step in which payloads of
            varying length do not fit (:mod:`hvd_compress.exchanges.packing`).
    """

    stages: tuple[Scope, ...]
    steps: Callable[[Gradient], Steps]
    reference: Callable[[Simulation, str, ByRank, float], np.ndarray]
    run: Callable[[Any, Comm], Exchanging]
    check: Callable[..., None] = lambda *tensor: None
    owners: Callable[[Group], Owners | None] = lambda group: None
    residuals: bool = True
    on_device: bool = True
    remainders: tuple[Scope, ...] = ()

    def sends(self, gradient: Gradient) -> list[tuple[Scope, Message]]:
        """The messages that a rank sends for a gradient, and the scopes of their collectives."""
        messages = (step for step in self.steps(gradient) if isinstance(step, Message))
        return list(zip(self.stages, messages, strict=True))
