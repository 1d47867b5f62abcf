"""A gradient that can travel in several ways, of which a variable chooses one in each step."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from hvd_compress.exchange.hosts import Hosts
from hvd_compress.exchange.routing import DENSE, Route
from hvd_compress.exchange.shards import Shards
from hvd_compress.tensorflow.coder import Coder, Encoded
from hvd_compress.tensorflow.collectives import Collectives
from hvd_compress.tensorflow.exchanges.base import Exchange
from hvd_compress.tensorflow.graphs import Beginning
from hvd_compress.tensorflow.native import spec_bytes
from hvd_compress.tensorflow.placement import HOST
from hvd_compress.tensorflow.reduction import Asked, asked_for
from hvd_compress.tensorflow.slots import PlannedSlot, Slot


@dataclass(eq=False)
class Underway:
    """A gradient of which the step decides how it travels.

    Attributes:
        slot: whose gradient.
        gradient: as it was given.
        beginning: of its step.
        way: which of the slot's choices it takes, shape=(), int32.
    """

    slot: PlannedSlot
    gradient: tf.Tensor
    beginning: Beginning
    way: tf.Tensor


class Ways:
    """Traces each way as a branch; those that are not taken do not run.

    Horovod's own allreduce is not in a branch, and gets what there is: the gradient if it goes as it is,
    or else a token. Everything else is started when Horovod's operation is known, but does not wait for it.

    Sending, and receiving what goes as it is, are operations and no branches, because executing the graph
    costs time for each node, taken or not. For the same reason one would want branches to stay functions
    of their own; but then TensorFlow renames what is in them, and Horovod calls its tensors by these names.

    Args:
        operations: the module of operations.
        ledger: the compressor's.
        collectives: the ranks.
        coder: what this rank encodes with.
        exchanges: those that may be chosen, by name.
        hosts: as ranks of the job are spread over them.

    Attributes:
        chosen: for each gradient which of its choices it takes from the next step on, shape=(gradients,),
            int32; the same on every rank.
    """

    def __init__(
        self,
        operations: Any,
        ledger: tf.Tensor,
        collectives: Collectives,
        coder: Coder,
        exchanges: Mapping[str, Exchange],
        hosts: Hosts,
    ) -> None:
        self._ops = operations
        self._ledger = ledger
        self._collectives = collectives
        self._coder = coder
        self._exchanges = dict(exchanges)
        self._hosts = hosts
        with tf.device(HOST):
            self.chosen = ResourceVariable(
                tf.zeros([0], tf.int32),
                trainable=False,
                shape=tf.TensorShape([None]),
                name="chosen",
            )

    @property
    def exchanges(self) -> list[Exchange]:
        """Those that may be chosen."""
        return list(self._exchanges.values())

    def check(self, slot: PlannedSlot, route: Route) -> None:
        """Raises ``ValueError`` where a gradient cannot take a route with a codec."""
        if route.exchange not in self._exchanges:
            raise ValueError(f"{slot.label}: expected another exchange, got {route.exchange}")
        spec_bytes(route.codec)
        self._exchanges[route.exchange].check(slot.by(route))

    def send(
        self, slot: PlannedSlot, gradient: tf.Tensor, beginning: Beginning
    ) -> tuple[tf.Tensor, Underway]:
        """What Horovod shall allreduce, 1-dimensional, and the gradient on its way."""
        # Horovod has no bfloat16.
        wide = tf.cast(gradient, tf.float32) if gradient.dtype == tf.bfloat16 else gradient
        sent, way = self._ops.hvdc_send(
            wide,
            beginning.begun,
            beginning.everybody,
            beginning.ways,
            self._ledger,
            position=slot.index,
            uncompressed_item_bytes=gradient.dtype.size,
            **self._rest(slot, DENSE),
        )
        return sent, Underway(slot, gradient, beginning, way)

    def receive(self, reduced: tf.Tensor, underway: Underway) -> tf.Tensor:
        """The result, in the shape and dtype of the gradient.

        Args:
            reduced: what Horovod made of what it got.
            underway: the gradient.

        Raises:
            ExchangeError: an operation that compressed gradients cannot follow, or another process set.
        """
        asked = asked_for(reduced.op, underway.slot, self._collectives.process_set)
        gradient = underway.gradient
        branches: list[Callable[[], tf.Tensor]] = [lambda: tf.zeros([0], gradient.dtype)]
        for route in underway.slot.tensor.choices[1:]:
            take = self._cast if route.dense else self._encoded
            branches.append(functools.partial(take, underway, route, asked))
        made = tf.switch_case(underway.way, branches)
        reduced = tf.cast(reduced, gradient.dtype)
        return self._ops.hvdc_receive(reduced, made, gradient, underway.way, self._ledger)

    def release(
        self, slot: PlannedSlot, route: Route, gradient: tf.Tensor, everybody: tf.Tensor
    ) -> tf.Tensor:
        """The gradient, and what other ways than this route have left unsent of it."""
        return self._ops.hvdc_release(gradient, everybody, self._ledger, **self._rest(slot, route))

    def _rest(self, slot: PlannedSlot, route: Route) -> dict[str, Any]:
        exchange = None if route.dense else self._exchanges[route.exchange]
        carried = exchange is not None and route.feedback.enabled
        rest: list[tuple[ResourceVariable, int, float]] = []
        if exchange is None or not (carried and exchange.has_residuals):
            rest.append((slot.residual, 0, 1.0))
        if slot.shape is not None:
            if not (carried and route.exchange == "two_shot"):
                ranks = self._collectives
                rest.append(self._part(slot, slot.owned, ranks.size, max(0, ranks.rank)))
            if not (carried and route.exchange == "hierarchical"):
                place = self._hosts.place(max(0, self._collectives.rank))
                rest.append(self._part(slot, slot.owned_on_host, self._hosts.local, place))
        return {
            "residuals": [variable.handle for variable, _, _ in rest],
            "begins": [begin for _, begin, _ in rest],
            "weights": [weight for _, _, weight in rest],
            "label": slot.label,
        }

    def _part(
        self, slot: Slot, owned: ResourceVariable, owners: int, owner: int
    ) -> tuple[ResourceVariable, int, float]:
        assert slot.shape is not None
        begin, _ = Shards(math.prod(slot.shape), owners, slot.index).of(owner)
        # In an average of so many ranks' gradients: a rank that sends it alone has to send more.
        return owned, begin, float(owners)

    def _cast(self, underway: Underway, route: Route, asked: Asked) -> tf.Tensor:
        slot, beginning, gradient = underway.slot, underway.beginning, underway.gradient
        released = self.release(slot, route, gradient, beginning.everybody)
        sent = self._ops.hvdc_dense(
            tf.cast(released, route.dense_dtype),
            beginning.begun,
            self._ledger,
            uncompressed_item_bytes=gradient.dtype.size,
        )
        total = self._collectives.reduce(sent, asked, f"{slot.label}.{route.dense_dtype}")
        return tf.cast(self._ops.hvdc_arrived(total, self._ledger), gradient.dtype)

    def _encoded(self, underway: Underway, route: Route, asked: Asked) -> tf.Tensor:
        slot, beginning = underway.slot.by(route), underway.beginning
        exchange = self._exchanges[route.exchange]
        released = self.release(underway.slot, route, underway.gradient, beginning.everybody)
        message, step = exchange.encode(slot, released, beginning.begun)
        arrived = exchange.send(slot, released, message, step)
        arrived.set_shape([None])
        sent = Encoded(slot, released, step, tf.constant(True), arrived)
        # What Horovod makes of the token comes later, and tells nothing.
        return exchange.decode(sent, beginning.begun, asked.scale(self._collectives.size))
