"""Buckets: gradients that are encoded, sent and decoded together, each bucket by one collective.

Horovod hands over one gradient after the other while it traces, each in a branch of its own, and does
not say which is the last. So the first gradient of a bucket traces the bucket's operations in its branch.
They find the other gradients in the compressor's ledger when the graph runs; the number of gradients was
noted there when tracing ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import tensorflow as tf

from hvd_compress.tensorflow.slots import GraphSlot

LIMIT = 2**19
"""The most bytes of payloads in a bucket with several gradients. Longer messages may be gathered in another
way (:mod:`hvd_compress.exchanges.sum_as_gather`), which has to be known while tracing."""

FIRST = 2**16
"""The same limit for the first bucket of a step: it holds the first layers' gradients, which are computed
last, so that no computation hides the time to encode and decode them."""


@dataclass(eq=False)
class GraphBucket:
    """Gradients of one call of Horovod that travel together, the same ones on every rank.

    Attributes:
        number: the bucket's position among the buckets of the call.
        exchange: the name of the exchange by which its messages travel.
        slots: the slots of the gradients, in the order of tracing.
        places: the positions of the gradients among those of the call.
        scale: the factor on the sum over ranks; known when Horovod's operation is.
        arrived: the message received from the exchange, shape=(bytes,), uint8.
        encoded: whether that message is encoded, shape=(), bool.
    """

    number: int
    exchange: str
    slots: list[GraphSlot] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    scale: float = 0.0
    arrived: tf.Tensor | None = None
    encoded: tf.Tensor | None = None

    @property
    def label(self) -> str:
        """The name of its collectives."""
        return f"bucket.{self.slots[0].index}"

    @property
    def length(self) -> int | None:
        """Bytes of its payloads; None where tracing does not know them or may still add a gradient."""
        size = self._size()
        return size if size is not None and size >= self._limit else None

    def add(self, slot: GraphSlot, place: int = 0) -> int:
        """Adds a gradient and returns its number."""
        self.slots.append(slot)
        self.places.append(place)
        return len(self.slots) - 1

    def takes(self, slot: GraphSlot) -> bool:
        """Whether a gradient with the same exchange may join the bucket."""
        size, more = self._size(), _payload_bytes(slot)
        if size is None or more is None:
            return False
        return size + more <= self._limit

    @property
    def _limit(self) -> int:
        return LIMIT if self.number else FIRST

    def _size(self) -> int | None:
        sizes = [_payload_bytes(slot) for slot in self.slots]
        return None if None in sizes else sum(size for size in sizes if size is not None)


def _payload_bytes(slot: GraphSlot) -> int | None:
    return None if slot.shape is None else slot.route.codec.payload_bytes(slot.shape)
