"""The description of an exchange, and the batch that an exchange sends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hvd_compress.exchanges.comm import Array, Comm, Exchanging, Group, Scope, Sending
from hvd_compress.exchanges.layout import Member, MessageLayout, Owners, Piece
from hvd_compress.exchanges.steps import Gradient, Message, Steps

ByRank = list[np.ndarray]
"""One array for each rank."""


class Plan(Protocol):
    """The gradients of a bucket, and the tables of its messages: the same in every step."""

    @property
    def group(self) -> Group:
        """The ranks."""
        ...

    @property
    def members(self) -> Sequence[Member]:
        """The gradients of the bucket."""
        ...

    @property
    def owners(self) -> Owners | None:
        """The ranks that divide the gradients; None if ranks do not divide them."""
        ...

    @property
    def inner(self) -> bool:
        """Whether the ranks of a host encode gradients with codecs of their own."""
        ...

    def table(self, name: str, layout: Callable[[], MessageLayout]) -> Any:
        """The table of a message, whose ``layout`` this is; the function is called for a new name only."""
        ...


class Batch(Protocol):
    """A bucket in one step, as exchanges use it; :class:`hvd_compress.engine.batch.Batch` is one.

    Tables are those that :meth:`Plan.table` returns.
    """

    @property
    def plan(self) -> Plan:
        """The plan of the bucket."""
        ...

    def encode(self, table: Any) -> Array:
        """Encodes pieces of the gradients; returns the message, shape=(bytes,), uint8."""
        ...

    def encode_averages(self, table: Any, averages: Sequence[Array]) -> Array:
        """Encodes averages of this rank's parts; returns the message, shape=(bytes,), uint8."""
        ...

    def average(self, table: Any, rows: Array, first: int = 0) -> Sequence[Array]:
        """Averages the parts that this rank owns; ``rows`` holds messages from rank ``first`` on."""
        ...

    def parts_to_owners(self) -> tuple[Array, list[int]]:
        """All gradients' parts without encoding, by owner, and the bytes for each owner."""
        ...

    def average_parts(self, rows: Array) -> Sequence[Array]:
        """The same as :meth:`average`, from the ranks' messages of :meth:`parts_to_owners`."""
        ...

    def guard(self, work: Callable[[], Array], size: int) -> Array:
        """Makes a message of ``size`` bytes; returns zeros if that fails, since other ranks wait."""
        ...

    def all_gather(self, comm: Comm, message: Array, table: Any) -> Sending:
        """Gathers messages, packed if payloads may be short."""
        ...

    def two_shots(
        self,
        comm: Comm,
        message: Array,
        average: Callable[[Array], Array],
        parts: Any,
        own: Any,
        every: Any,
    ) -> Sending:
        """Sends parts to owners and gathers averages, packed if payloads may be short."""
        ...

    def load(
        self, table: Any, rows: Array, sender: Callable[[Piece, int], int], flags: Array
    ) -> None:
        """Takes the result of the last collective, which is decoded at the end of the step."""
        ...


@dataclass(frozen=True)
class Exchange:
    """All that distinguishes one exchange from the others.

    Attributes:
        stages: the scopes of the collectives, in order.
        steps: a function that returns the computation and messages of a rank for one gradient, with one
            message for each stage.
        reference: the definition of the result on every rank, in NumPy. Its arguments are the
            :class:`~hvd_compress.exchanges.simulation.Ranks`, which holds the residuals; a tensor's
            name; the ranks' gradients of the tensor, shape=(n,), float32 each, transposed if ranks divide
            columns; and the factor of the ranks' sum. It returns the result, in the same order.
        run: the exchange of a bucket, a generator function. Its arguments are a :class:`Batch`, or what
            the module of the exchange defines in its place, and a
            :class:`~hvd_compress.exchanges.comm.Comm`. It yields collectives, and receives their results.
        check: a function that raises ``ValueError`` if the exchange cannot carry a tensor; its arguments
            are the name, the shape, the codec, the bytes of an element, the ranks, and ``inner`` if the
            route has such a codec.
        owners: a function that returns the owners of gradients, or None if ranks do not divide gradients.
        residuals: whether ranks keep residuals of their whole gradients; a codec within hosts makes them.
        experimental: whether NumPy computes the exchange, in the memory of the CPU. Such an exchange is for
            experiments; planners do not choose it.
        remainders: the scopes of the additional collectives, in order, in a step in which payloads of
            varying length do not fit (:mod:`hvd_compress.exchanges.packing`).
    """

    stages: tuple[Scope, ...]
    steps: Callable[[Gradient], Steps]
    reference: Callable[[Any, str, ByRank, float], np.ndarray]
    run: Callable[[Any, Comm], Exchanging]
    check: Callable[..., None] = lambda *tensor: None
    owners: Callable[[Group], Owners | None] = lambda group: None
    residuals: bool = True
    experimental: bool = False
    remainders: tuple[Scope, ...] = ()

    def sends(self, gradient: Gradient) -> list[tuple[Scope, Message]]:
        """The messages that a rank sends for a gradient, and the scopes of their collectives."""
        messages = (step for step in self.steps(gradient) if isinstance(step, Message))
        return list(zip(self.stages, messages, strict=True))
