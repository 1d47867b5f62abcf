"""Traces the exchanges of a compressor's gradients: their beginnings, buckets and operations."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from hvd_compress.ranks.errors import ExchangeError
from hvd_compress.tensorflow.buckets import GraphBucket
from hvd_compress.tensorflow.coder import Coder
from hvd_compress.tensorflow.collectives import GraphCollectives
from hvd_compress.tensorflow.exchanges import registry
from hvd_compress.tensorflow.exchanges.base import GraphExchange
from hvd_compress.tensorflow.graphs import Beginning, beginnings_in, is_outermost
from hvd_compress.tensorflow.placement import HOST
from hvd_compress.tensorflow.reduction import scale_of
from hvd_compress.tensorflow.slots import GraphSlot
from hvd_compress.tensorflow.sources import Call
from hvd_compress.tensorflow.step import GraphStep

Started = tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]
"""The tensor that Horovod has to reduce, and a function of what it made of it, which returns the result."""


class Tracing:
    """The exchanges of one compressor in all graphs.

    Args:
        coder: this rank's encoder and decoder.
        collectives: the collectives among the ranks.
        configuration: returns the settings that have to be the same on every rank.

    Attributes:
        exchanges: the exchanges by name.
        step: the collectives before a step's messages.
        calls: the number of exchanges that have been traced.
    """

    def __init__(
        self,
        coder: Coder,
        collectives: GraphCollectives,
        configuration: Callable[[], dict[str, Any]],
    ) -> None:
        self._coder, self._ops, self._ledger = coder, coder.operations, coder.ledger
        self._collectives = collectives
        self.step = GraphStep(self._ops, self._ledger, collectives, configuration)
        self.exchanges: dict[str, GraphExchange] = {}
        self.calls = 0

    def set_exchanges(self, names: Iterable[str]) -> None:
        """Makes the exchanges that gradients can take."""
        self.exchanges = {
            name: registry.EXCHANGES[name](self._collectives, self._coder) for name in names
        }

    def begin(
        self,
        graph: Any,
        call: Call | None = None,
        beside: Mapping[str, str] = MappingProxyType({}),
    ) -> Beginning:
        """The beginning of the exchange of one call of Horovod; of a graph's only exchange without one."""
        earlier = beginnings_in(graph, self)
        gradients = call.gradients if call else None
        if not earlier or earlier[-1].gradients is not gradients:
            self.calls += 1
            with graph.as_default(), tf.device(HOST):
                first: Any = []
                if call is not None and call.shared and not is_outermost(graph):
                    first = self.step.same_variables(call.variables)
                with tf.control_dependencies(first):
                    beginning = Beginning(
                        self.calls, self._collectives.size, gradients, beside=beside
                    )
                    if self._takes_part():
                        began = self.step.begin(beginning, first=not earlier)
                        beginning.begun, beginning.everybody = began
            earlier.append(beginning)
        return earlier[-1]

    def start(
        self,
        slot: GraphSlot,
        gradient: tf.Tensor,
        beginning: Beginning,
        state: Sequence[tf.Tensor],
    ) -> Started:
        """Traces the exchange of a gradient, the last one of the beginning's slots.

        Args:
            slot: the slot of the gradient.
            gradient: the gradient.
            beginning: the beginning of the exchange.
            state: the tensors of :attr:`GraphSlot.handles`.
        """
        if slot.route.uncompressed:
            return self._start_uncompressed(slot, gradient, beginning)
        return self._start_encoded(slot, gradient, beginning, state)

    def exchange_now(self, beginning: Beginning, slots: Sequence[GraphSlot]) -> None:
        """Called when a trace that several lists of variables share is called for some slots."""
        if slots != beginning.slots:
            beginning.exchanges(slots)
            self._expect(beginning, beginning.buckets)

    def _expect(self, beginning: Beginning, buckets: Sequence[GraphBucket] = ()) -> None:
        """Tells the ledger what has been traced so far; Horovod does not say which gradient is the last.

        Args:
            beginning: the beginning of the exchange.
            buckets: the buckets whose layouts are other ones than before.
        """
        with tf.init_scope(), tf.device(HOST):
            self._coder.expect(beginning.graph, len(beginning.slots))
            for bucket in buckets:
                slots = [beginning.slots[place] for place in bucket.places]
                layouts = self.exchanges[bucket.exchange].layouts(slots)
                self._coder.lay_out(beginning.graph, bucket, slots, layouts)

    def _takes_part(self) -> bool:
        """Whether the branch in which ``compress`` is called runs on this rank."""
        alone = self._collectives.size == 1 and not os.environ.get("HOROVOD_ELASTIC")
        return self._collectives.included and not alone

    def _start_uncompressed(
        self, slot: GraphSlot, gradient: tf.Tensor, beginning: Beginning
    ) -> Started:
        sent = gradient
        wanted = slot.route.cast_dtype
        if wanted is not None and gradient.dtype == tf.float32:
            sent = tf.cast(gradient, wanted)
        elif gradient.dtype == tf.bfloat16:
            sent = tf.cast(gradient, tf.float32)  # Horovod has no bfloat16.
        sent = self._ops.hvdc_uncompressed(
            sent, beginning.begun, self._ledger, uncompressed_item_bytes=gradient.dtype.size
        )

        def finish(reduced: tf.Tensor) -> tf.Tensor:
            self._expect(beginning)
            return tf.cast(self._ops.hvdc_returned(reduced, self._ledger), gradient.dtype)

        return sent, finish

    def _start_encoded(
        self,
        slot: GraphSlot,
        gradient: tf.Tensor,
        beginning: Beginning,
        state: Sequence[tf.Tensor],
    ) -> Started:
        exchange = self.exchanges[slot.route.exchange]
        bucket = beginning.bucket_for(slot)
        member = bucket.add(slot, len(beginning.slots) - 1)
        ordered = exchange.ordered(slot, gradient)
        token = self._coder.submit(bucket, member, ordered, beginning.begun, state)
        if member == 0:
            message, sizes, bucket.encoded = exchange.encode(bucket, token, beginning.everybody)
            bucket.arrived = tf.cond(
                bucket.encoded,
                lambda: exchange.send(bucket, message, sizes),
                lambda: self._send_uncompressed(bucket, message),
            )
            bucket.arrived.set_shape([None])

        def finish(reduced: tf.Tensor) -> tf.Tensor:
            scale = scale_of(
                reduced.op, slot, self._collectives.process_set, self._collectives.size
            )
            if member and scale != bucket.scale:
                raise ExchangeError(
                    f"{slot.label}: expected the factor {bucket.scale} of the call's other gradients, got "
                    f"{scale}: exchange gradients with other factors in another call"
                )
            bucket.scale = scale
            if slot.scale != scale:
                slot.scale = scale
                with tf.init_scope():
                    self.step.forget_agreement()
            self._expect(beginning, [bucket])
            # TensorFlow runs only what a result depends on. No result depends on what Horovod makes of the
            # token, so that TensorFlow leaves its sum out.
            decoded = [exchange.decode(bucket)] if member == 0 else []
            with tf.control_dependencies(decoded):
                result = self._coder.run("result", bucket, token, ordered, member=member)
            return exchange.restored(slot, result)

        return token, finish

    def _send_uncompressed(self, bucket: GraphBucket, message: tf.Tensor) -> tf.Tensor:
        ranks = self._collectives
        name = f"{bucket.label}.uncompressed"
        return ranks.bytes(ranks.all_reduce(ranks.numbers(message), name))
