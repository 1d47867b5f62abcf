"""The graph in which gradients are traced: their exchanges, and whether XLA is to compile it."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from hvd_compress.ranks.errors import ExchangeError
from hvd_compress.tensorflow.buckets import GraphBucket
from hvd_compress.tensorflow.collectives import digest
from hvd_compress.tensorflow.placement import HOST
from hvd_compress.tensorflow.slots import GraphSlot
from hvd_compress.tensorflow.sources import SharedTrace

_BEGINNINGS = "_hvd_compress_beginnings"


@dataclass(eq=False)
class Beginning:
    """The beginning of an exchange in a graph, and what its gradients share.

    The gradients of one call of a tape or optimizer are one exchange. The next one in the same graph begins
    when the results of this one are available: it may have the same variables, and so the same residuals.

    Args:
        graph: a number that identifies the exchange among all graphs.
        ranks: the number of ranks.
        gradients: the list of gradients with which Horovod's function was called; None for other callers.

    Attributes:
        begun: the tensor on which all messages of the exchange depend.
        everybody: whether all ranks take part in the exchange, shape=(), bool.
        slots: the slots of the gradients that come back, in the order of tracing.
        beside: descriptions of the gradients that the caller exchanges by other means, by name.
        digest: a variable, the digest of :attr:`slots` and :attr:`beside` when the graph runs.
        buckets: the buckets of the gradients that are encoded.
        shared: the slots of the graph if variables are looked up in each call.
    """

    graph: int
    ranks: int
    gradients: Any = None
    begun: tf.Tensor = field(default_factory=lambda: tf.ones([1]))
    everybody: tf.Tensor = field(default_factory=lambda: tf.constant(True))
    slots: Sequence[GraphSlot] = ()
    beside: Mapping[str, str] = field(default_factory=dict)
    buckets: list[GraphBucket] = field(default_factory=list)
    shared: SharedTrace | None = None
    _counts: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        with tf.init_scope(), tf.device(HOST):
            self.digest = ResourceVariable(self._digest(), trainable=False)

    def exchanges(self, slots: Sequence[GraphSlot]) -> None:
        """Sets the slots of the gradients that come back."""
        if slots == self.slots:
            return
        self.slots = slots
        with tf.init_scope():
            self.digest.assign(self._digest())

    def _digest(self) -> np.ndarray:
        return digest([dict(self.beside), *(slot.index for slot in self.slots)], self.ranks)

    def bucket_for(self, slot: GraphSlot) -> GraphBucket:
        """The bucket that a gradient joins: the newest one of its exchange, or else a new one."""
        exchange = slot.route.exchange
        newest = [bucket for bucket in self.buckets if bucket.exchange == exchange][-1:]
        if newest and newest[0].takes(slot):
            return newest[0]
        self.buckets.append(GraphBucket(len(self.buckets), exchange))
        return self.buckets[-1]

    def count(self, thing: Any) -> int:
        """The number of earlier calls of this method with the same tensor or variable."""
        self._counts[id(thing)] += 1
        return self._counts[id(thing)] - 1


def graph_of(gradient: tf.Tensor) -> Any:
    """The graph around the branch of Horovod in which a gradient is being compressed.

    Raises:
        ExchangeError: there is no such graph, or XLA is to compile it.
    """
    here = tf.compat.v1.get_default_graph()
    if tf.executing_eagerly() or not hasattr(here, "outer_graph"):
        if tf.config.functions_run_eagerly():
            raise ExchangeError(
                "expected a gradient in a graph, got tf.config.run_functions_eagerly(True), under which "
                "Horovod makes none: leave it off where gradients are exchanged"
            )
        raise ExchangeError(
            "expected a gradient in a tf.function, as DistributedGradientTape and DistributedOptimizer "
            "send them, got one outside of any: compress() cannot tell whose it is"
        )
    if GraphOrParentsInXlaContext(here):
        raise ExchangeError(
            f"expected a tf.function with jit_compile=False around the exchange of gradients, got "
            f"jit_compile=True around {gradient.name}: XLA can compile neither Horovod's operations nor "
            f"the codecs'. Compile a function of the forward and backward pass alone, and send the "
            f"gradients outside of it; in Keras, compile(jit_compile=False)"
        )
    return here.outer_graph if type(here).__name__ == "CondBranchFuncGraph" else here


def is_outermost(graph: Any) -> bool:
    """Whether a function's graph is not inside another function's graph."""
    return getattr(graph.outer_graph, "outer_graph", None) is None


def beginnings_in(graph: Any, tracing: Any) -> list[Beginning]:
    """The beginnings of a compressor's exchanges in a graph, which live as long as the graph."""
    notes = getattr(graph, _BEGINNINGS, None)
    if notes is None:
        notes = weakref.WeakKeyDictionary()
        setattr(graph, _BEGINNINGS, notes)
    beginnings: list[Beginning] = notes.setdefault(tracing, [])
    return beginnings
