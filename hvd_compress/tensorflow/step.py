"""The beginning of a step: all ranks are present, agree on what they send, and none has failed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_compress.ranks import agreement, token
from hvd_compress.ranks.errors import ExchangeError
from hvd_compress.tensorflow.collectives import GraphCollectives
from hvd_compress.tensorflow.graphs import Beginning
from hvd_compress.tensorflow.slots import common_name
from hvd_compress.tensorflow.sources import tensorflow_variable

_FAILURE = "error in an earlier step"
_LATE = "error that an earlier step could not know"


class GraphStep:
    """The collectives before a step's messages, which all depend on them.

    The participation check, a sum of tokens, tells whether any rank has joined. Two more numbers tell
    whether any rank's settings have still to be compared, and whether any rank has failed; and a digest,
    whether all ranks exchange the same gradients. Only in these cases do the ranks gather their settings
    and failures, and only if all ranks are present: a gather would crash a rank that has joined.

    Args:
        operations: the module of operations.
        ledger: the compressor's ledger.
        collectives: the collectives among the ranks.
        configuration: returns the settings that have to be the same on every rank.
    """

    def __init__(
        self,
        operations: Any,
        ledger: tf.Tensor,
        collectives: GraphCollectives,
        configuration: Callable[[], dict[str, Any]],
    ) -> None:
        self._ops = operations
        self._ledger = ledger
        self._collectives = collectives
        self._configuration = configuration
        self._rank_of_job = hvd.rank()

    def begin(self, beginning: Beginning, first: bool) -> tuple[tf.Tensor, tf.Tensor]:
        """Traces the beginning of an exchange.

        Args:
            beginning: the exchange's notes, whose graph is the current one.
            first: whether a step begins with it; otherwise it belongs to the step before, with which its
                residuals are dropped.

        Returns:
            The token, shape=(1,), float32, and whether all ranks take part, shape=(), bool.
        """
        ranks = self._collectives
        with tf.control_dependencies([self._same_place()]):
            begun, standing = self._ops.hvdc_begin(self._ledger, graph=beginning.graph, first=first)
        own = [begun * tf.constant(token.make(ranks.rank)), standing, beginning.digest.read_value()]
        sums = ranks.all_reduce(tf.concat(own, 0), "participation")
        present, rest, digests = tf.split(sums, [3, 2, 3])
        wanted = np.array(token.of_everybody(ranks.size), np.float32)
        everybody = tf.reduce_all(tf.abs(present - wanted) <= token.TOLERANCE * wanted)
        alike = tf.reduce_all(digests == present[0] * own[2])
        to_be_settled = tf.logical_and(everybody, tf.reduce_any(rest > 0.5))
        settled = tf.cond(
            tf.logical_and(alike, tf.logical_not(to_be_settled)),
            lambda: tf.constant(True),
            lambda: tf.cond(
                everybody, partial(self._settle, beginning), partial(self._refuse, beginning)
            ),
        )
        with tf.control_dependencies([settled]):
            return tf.identity(begun), tf.identity(everybody)

    def same_variables(self, variables: Sequence[Any]) -> list[tf.Operation]:
        """Traces a check that a function within another one is called with the variables of its trace.

        TensorFlow uses one trace for all variables of the same shapes.
        """
        if not variables:
            return []
        handles = [
            inner.handle for inner in map(tensorflow_variable, variables) if inner is not None
        ]
        with tf.init_scope():
            names = [self._ops.hvdc_variable(handle).numpy() for handle in handles]
        return [self._ops.hvdc_same_variables(handles, names=names)]

    def forget_agreement(self) -> None:
        """Makes the ranks compare their settings in the next step."""
        self._ops.hvdc_tell(self._ledger, what="compare")

    def _same_place(self) -> tf.Operation:
        """Fails if Horovod has been initialized again and this rank has another place now.

        Graphs hold the old place: the rank's number and the owner of each part.
        """
        ranks = self._collectives
        return tf.debugging.assert_equal(
            tf.stack([hvd.rank_op(), hvd.size_op(ranks.process_set.process_set_id)]),
            tf.constant([self._rank_of_job, ranks.size]),
            f"expected rank {self._rank_of_job} of {ranks.size}, as when this compressor was made, got "
            f"another place: Horovod has been initialized again; make a compressor, and the functions that "
            f"use it, after each hvd.init(), and with elastic Horovod give it to begin() of "
            f"hvd_compress.tensorflow.elastic.TensorFlowState",
        )

    def _settle(self, beginning: Beginning) -> tf.Tensor:
        # In Python, because the comparison is the one that every frontend uses. It rarely runs.
        earlier = self._ops.hvdc_earlier_failure(self._ledger)
        line = _in_python(partial(self._line, beginning), [*earlier], tf.uint8)
        line.set_shape([None])
        gathered = self._collectives.all_gather(line, "configuration")
        same = _in_python(_check, [gathered], tf.bool)
        with tf.control_dependencies([same]):
            agreed = self._ops.hvdc_tell(self._ledger, what="agreed")
        with tf.control_dependencies([agreed]):
            return tf.reshape(tf.identity(same), [])

    def _refuse(self, beginning: Beginning) -> tf.Tensor:
        """Raises an error: ranks differ, but cannot say in what, since one of them has joined."""

        def refuse() -> bool:
            encoded = [f"{slot.label} ({slot.variable_name})" for slot in beginning.slots]
            here = ", ".join([*encoded, *beginning.beside.values()])
            raise ExchangeError(
                f"expected the same gradients of all ranks that take part in a step, got {here} on this "
                f"rank and others on another"
            )

        return tf.ensure_shape(_in_python(refuse, [], tf.bool), [])

    def _line(self, beginning: Beginning, failure: bytes, late: bool) -> np.ndarray:
        try:
            configuration = self._configuration()
        except Exception as error:  # The other ranks wait for the line.
            told = f"{type(error).__name__}: {error}"
            configuration, failure, late = {}, told.encode(), True
        configuration["in this step"] = {
            f"gradient.{slot.index} ({common_name(slot.variable_name)})": f"number {i}"
            for i, slot in enumerate(beginning.slots)
        } | dict(beginning.beside)
        if failure:
            configuration[_LATE if late else _FAILURE] = failure.decode()
        return np.frombuffer(agreement.serialize(configuration), np.uint8)


def _in_python(function: Callable[..., Any], inputs: Sequence[tf.Tensor], dtype: Any) -> tf.Tensor:
    """Traces a call of a Python function, whose exceptions end elastic training with their words.

    TensorFlow makes an ``UnknownError`` of most exceptions. If such an error does not name a collective,
    ``hvd.elastic.run`` takes it for the end of training and drops it. A ``ValueError`` becomes an
    ``InvalidArgumentError``.
    """

    def call(*values: Any) -> Any:
        try:
            return function(*values)
        except Exception as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error

    return tf.numpy_function(call, inputs, dtype)


def _check(lines: np.ndarray) -> bool:
    configurations = [json.loads(line) for line in lines.tobytes().splitlines()]
    late = {rank: c[_LATE] for rank, c in enumerate(configurations) if _LATE in c}
    if late:
        raise ExchangeError("; ".join(f"on rank {rank}: {text}" for rank, text in late.items()))
    if all(_FAILURE in configuration for configuration in configurations):
        # Each rank has raised an error, and goes on all the same.
        for configuration in configurations:
            del configuration[_FAILURE]
    agreement.compare(configurations)
    return True
