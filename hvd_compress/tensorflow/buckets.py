"""Buckets: gradients that are encoded, sent and decoded together, each bucket by one collective.

Horovod hands over one gradient after the other while it traces, each in a branch of its own, and does
not say which is the last. So the first gradient of a bucket traces the bucket's operations in its branch.
They find the others' numbers in the compressor's ledger, when the graph runs: how many there are was
noted there when tracing had come to its end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hvd_compress.tensorflow.slots import Slot

if TYPE_CHECKING:
    from hvd_compress.tensorflow.exchanges.base import Exchange

LIMIT = 2**19
"""Bytes of the payloads of a bucket with several gradients. Longer messages may be gathered in another way
(:mod:`hvd_compress.exchanges.sum_as_gather`), which has to be known while tracing."""

FIRST = 2**16
"""The same for the first bucket of a step: it has the first layers' gradients, which are computed last, and
what encodes and decodes them is not hidden behind anything."""


@dataclass(eq=False)
class EncodedMessage:
    """What a bucket sends first.

    Attributes:
        data: shape=(bytes,), uint8.
        sizes: bytes for each owner, shape=(owners,), int32.
        encoded: whether the message is encoded, shape=(), bool; if not, it holds the gradients as float32.
    """

    data: tf.Tensor
    sizes: tf.Tensor
    encoded: tf.Tensor


@dataclass(eq=False)
class Bucket:
    """Gradients of one graph that travel together, composed alike on every rank.

    Attributes:
        number: among the buckets of the graph.
        exchange: how its messages travel.
        graph: that holds Horovod's branches.
        slots: whose gradients, in the order of tracing.
        scales: for each, the factor on the sum of the ranks' gradients; known when Horovod's operation is.
        arrived: what came back, shape=(bytes,), uint8.
        encoded: whether that is encoded, shape=(), bool.
    """

    number: int
    exchange: Exchange
    graph: Any
    slots: list[Slot] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    arrived: tf.Tensor | None = None
    encoded: tf.Tensor | None = None

    def __post_init__(self) -> None:
        operations = self.graph.get_operations()
        self._newest = operations[-1]._id if operations else -1

    @property
    def label(self) -> str:
        """What its collectives are called by."""
        return f"bucket.{self.slots[0].index}"

    @property
    def length(self) -> int | None:
        """Bytes of its payloads; None where tracing does not know them, or may add another gradient."""
        size = self._size()
        return size if size is not None and size >= self._limit else None

    def add(self, slot: Slot) -> int:
        """Adds a gradient, and returns its number."""
        self.slots.append(slot)
        self.scales.append(0.0)
        return len(self.slots) - 1

    def takes(self, slot: Slot, gradient: tf.Tensor) -> bool:
        """Whether a gradient of its exchange may join those that are in it."""
        size, more = self._size(), _payload_bytes(slot)
        if size is None or more is None:
            return False
        return size + more <= self._limit and self._precedes(gradient)

    @property
    def _limit(self) -> int:
        return LIMIT if self.number else FIRST

    def _size(self) -> int | None:
        sizes = [_payload_bytes(slot) for slot in self.slots]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def _precedes(self, gradient: tf.Tensor) -> bool:
        """Whether a gradient was there before the bucket, so that it cannot depend on its results.

        The gradients of a second tape may, and a bucket would wait for itself.
        """
        if gradient.graph is self.graph:
            return bool(gradient.op._id <= self._newest)
        around = self.graph
        while around is not None and around is not gradient.graph:
            around = getattr(around, "outer_graph", None)
        return around is not None


def _payload_bytes(slot: Slot) -> int | None:
    return None if slot.shape is None else slot.route.codec.payload_bytes(slot.shape)
