"""The exchange of one update's gradients, which become the average of all ranks' gradients."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.tensorflow.compression import Compressor as HorovodCompressor
from tensorflow.python.ops import control_flow_util

from hvd_compress.codecs import Codec
from hvd_compress.codecs.calls import expect_instance
from hvd_compress.codecs.checks import check_number
from hvd_compress.exchanges.routing import Route
from hvd_compress.ranks.errors import ExchangeError
from hvd_compress.ranks.names import distinct
from hvd_compress.ranks.use import warn_of_onebit
from hvd_compress.tensorflow import Auto, Compressor
from hvd_compress.tensorflow.collectives import called, digest, known_to_horovod
from hvd_compress.tensorflow.native import operations
from hvd_compress.tensorflow.slots import common_name
from hvd_compress.tensorflow.sources import name_of


class KerasExchange:
    """Reduces the gradients of an optimizer with Horovod.

    Args:
        compression: a compressor of Horovod or of this package; None sends gradients uncompressed.
        op: ``hvd.Average`` or ``hvd.Sum``.
        gradient_predivide_factor: the gradients of an average are divided by this factor before they are
            added, and multiplied by it afterwards.
        sparse_as_dense: whether ``IndexedSlices`` are made dense, and compressed.
        process_set: the ranks that take part; None is all ranks.
        name: the prefix of the collectives' names; None numbers exchanges in the order in which they are
            made, which must then be the same on every rank.

    Raises:
        TypeError, ValueError: an argument is wrong, "expected X, got Y".
        ExchangeError: ``hvd.init()`` was not called.
    """

    def __init__(
        self,
        compression: Any | None,
        *,
        op: Any,
        gradient_predivide_factor: float,
        sparse_as_dense: bool,
        process_set: Any | None,
        name: str | None,
    ) -> None:
        self._settings = {
            "op": op,
            "gradient_predivide_factor": gradient_predivide_factor,
            "sparse_as_dense": sparse_as_dense,
            "process_set": process_set,
        }
        if isinstance(compression, Codec | Route | str):
            compression = Compressor(compression, process_set=process_set)
        kind = compression if isinstance(compression, type) else type(compression)
        if issubclass(kind, Compressor):
            write = "DistributedOptimizer(optimizer, {})"
            expect_instance("DistributedOptimizer", compression, Compressor, write)
        if not hvd.is_initialized():
            raise ExchangeError("expected hvd.init() before DistributedOptimizer, got no Horovod")
        if compression is None:
            compression = kind = hvd.Compression.none
        if not issubclass(kind, HorovodCompressor):
            raise TypeError(
                f"DistributedOptimizer: expected a codec or its name, a compressor of hvd_compress.keras "
                f"or Horovod, or None as compression, got {compression!r}"
            )
        if op not in (hvd.Average, hvd.Sum):
            raise ValueError(
                "DistributedOptimizer: expected hvd.Average or hvd.Sum as op, got another"
            )
        check_number(
            "DistributedOptimizer",
            "gradient_predivide_factor",
            gradient_predivide_factor,
            1e-30,
            1e30,
        )
        if gradient_predivide_factor != 1 and op != hvd.Average:
            raise ValueError(
                "DistributedOptimizer: expected op=hvd.Average with gradient_predivide_factor, got hvd.Sum"
            )
        if isinstance(compression, Compressor):
            compression.use.remedy = (
                "compile the model with the optimizer that has it, on every rank"
            )
        self.compression = compression
        self._op = op
        self._predivide = gradient_predivide_factor
        self._sparse_as_dense = sparse_as_dense
        self._process_set = hvd.global_process_set if process_set is None else process_set
        self._name = distinct("hvd_compress.keras") if name is None else name
        self._graphs: dict[Any, tuple[Any, Sequence[Any]]] = {}
        self.saved: dict[Any, Any] = {}
        self.all_variables: Sequence[Any] = ()
        """All variables of the optimizer."""
        self.variables: list[Any] = []
        """The variables whose gradients are passed to :meth:`average` next."""
        self.updates = 0
        """The number of calls of :meth:`average`, while tracing or eagerly."""
        self._checked = False

    def with_compression(self, compression: Any, name: str) -> KerasExchange:
        """The same exchange with another compressor, to be traced again."""
        return KerasExchange(compression, name=name, **self._settings)

    def begin(self) -> None:
        """Called at the start of a batch, which may exchange nothing; the last one's updates were used."""
        if isinstance(self.compression, Compressor):
            self.compression.keep_step()

    def average(self, gradients: Sequence[Any]) -> list[Any]:
        """The ranks' gradients reduced by ``op``, dense ones as tensors, sparse ones as ``IndexedSlices``.

        Args:
            gradients: the gradients of one update, in the same order on every rank; tensors or
                ``IndexedSlices``.

        Raises:
            ExchangeError: it is called under XLA or under a ``tf.distribute`` strategy.
        """
        self.updates += 1
        self._check_place()
        if not self._together():
            return list(gradients)
        specs = tuple(map(_spec_of, gradients))
        variables = self.variables
        key = specs, tuple(map(id, variables))
        if key not in self._graphs:
            if isinstance(self.compression, Compressor):
                self.compression.check_patterns([name_of(v) for v in self.all_variables])
            if isinstance(self.compression, Auto):
                pairs = [p for p in zip(variables, specs, strict=True) if self._compresses(p[1])]
                self.compression.plan([spec for _, spec in pairs], [name_of(v) for v, _ in pairs])
            # Traced by a thread of its own, so that no graph is around it: Keras nests functions and traces
            # them several times, and a compressor counts gradients within the outermost one. It is the
            # same function eagerly, and in the branch of tf.cond that has the accumulated gradients.
            traced = tf.function(partial(self._reduce_all, variables), autograph=False)
            with ThreadPoolExecutor(1) as thread:
                future = thread.submit(traced.get_concrete_function, list(specs))
                self._graphs[key] = future.result(), variables  # Kept: ids are of what is there.
        return list(self._graphs[key][0](list(gradients)))

    def expect_to_suit(self, optimizer: Any) -> None:
        """Warns, once, if the compressor encodes gradients by a codec that does not suit the optimizer."""
        if not self._checked and isinstance(self.compression, Compressor):
            self._checked = True
            if any(slot.route.codec.name == "onebit" for slot in self.compression.slots):
                warn_of_onebit(optimizer)

    def everywhere(self, flag: tf.Tensor) -> tf.Tensor:
        """Whether the flag is true on every rank, shape=(), bool."""
        self._check_place()
        if not self._together():
            return flag
        # Not the least flag: a rank that has joined sends zeros.
        others = _to_horovod(1 - tf.cast(flag, tf.float32))
        return hvd.allreduce(others, op=hvd.Sum, **self._called("flag")) < 0.5

    def _together(self) -> bool:
        if os.environ.get("HOROVOD_ELASTIC"):
            return True  # The number of ranks may change.
        return bool(self._process_set.included()) and self._process_set.size() > 1

    def _check_place(self) -> None:
        if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
            raise ExchangeError(
                "expected a graph without XLA, got jit_compile=True, for which neither Horovod nor the "
                "codecs have operations: pass jit_compile=False to model.compile()"
            )
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        if replicas > 1:
            raise ExchangeError(
                f"expected one replica in each of Horovod's processes, got {replicas} by tf.distribute: "
                f"start a process for each device instead"
            )

    def _compresses(self, spec: tf.TypeSpec) -> bool:
        return self._sparse_as_dense or not isinstance(spec, tf.IndexedSlicesSpec)

    def _reduce_all(self, variables: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        if self._sparse_as_dense:
            # All before the first is sent, so that they can be sent together.
            gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        places = {id(variable): place for place, variable in enumerate(self.all_variables)}
        sent = [(g, v, places.get(id(v), -1)) for g, v in zip(gradients, variables, strict=True)]
        encoded = isinstance(self.compression, Compressor)
        apart = {
            f"gradient {i} of the update": f"{type(gradient).__name__} of variable {place} "
            f"({common_name(name_of(variable))})"
            for i, (gradient, variable, place) in enumerate(sent)
            if not encoded or isinstance(gradient, tf.IndexedSlices)
        }
        if apart:
            apart["op"] = "op=Sum" if self._op == hvd.Sum else "op=Average"
        begun = [self.compression.begin_step(apart)] if encoded and apart else []
        check = None if encoded else self._check_of(apart)
        with tf.control_dependencies(begun):
            reduced = [self._reduce_one(*one, f"gradient.{i}") for i, one in enumerate(sent)]
        if check is not None:
            # An error before could keep something from being sent, whose receivers would wait.
            with tf.control_dependencies(tf.nest.flatten(reduced, expand_composites=True)):
                check()
        return reduced

    def _check_of(self, sent: Mapping[str, str]) -> Callable[[], None]:
        """Traces a sum that tells whether all ranks reduce the same gradients by the same op.

        A compressor compares what ranks send; this is for exchanges without one.

        Args:
            sent: descriptions of the gradients and the op, by any names.

        Returns:
            A function that traces the comparison.
        """
        own = np.array([1, *digest(sent, self._process_set.size())], np.float32)
        sums = hvd.allreduce(_to_horovod(tf.constant(own)), op=hvd.Sum, **self._called("same"))
        message = (
            f"expected the same op, and gradients of the same variables, on every rank, got "
            f"{', '.join(sent.values())} on this rank and others on another"
        )
        return lambda: tf.debugging.assert_equal(sums, sums[0] * own, message)

    def _reduce_one(self, gradient: Any, variable: Any, place: int, label: str) -> Any:
        if isinstance(gradient, tf.IndexedSlices):
            return self._reduce_sparse(gradient, label)
        sent = gradient
        if isinstance(self.compression, Compressor):
            self.compression.expect(variable, name_of(variable), place)
        else:
            sent = _to_horovod(sent)
        reduced = hvd.allreduce(
            sent,
            op=self._op,
            compression=self.compression,
            prescale_factor=1 / self._predivide,
            postscale_factor=self._predivide,
            **self._called(label),
        )
        return tf.cast(reduced, gradient.dtype)

    def _reduce_sparse(self, gradient: tf.IndexedSlices, label: str) -> tf.IndexedSlices:
        values, indices = (
            hvd.allgather(_to_horovod(sent), **self._called(f"{label}.{what}"))
            for what, sent in (("values", gradient.values), ("indices", gradient.indices))
        )
        # Rows that several ranks have are added up: Keras's Adam would square them one by one.
        rows, places = tf.unique(indices)
        values = tf.math.unsorted_segment_sum(values, places, tf.size(rows))
        if self._op == hvd.Average:
            values /= tf.cast(self._process_set.size(), values.dtype)
        values = tf.cast(values, gradient.dtype)
        return tf.IndexedSlices(values, rows, gradient.dense_shape)

    def _called(self, what: str) -> dict[str, Any]:
        # By names of their own: those of tensors depend on how many layers a rank has made before.
        return called(f"{self._name}.{what}", self._process_set)


def _to_horovod(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor as Horovod can send it, and never as a constant of the graph.

    Horovod does not register its operations as stateful. If the input of one is a constant of the trace,
    TensorFlow runs the operation once, before the graph, and keeps the result: other ranks, which have not
    traced anew, do not take part, and later steps get the old average.
    """
    return operations().hvdc_value(known_to_horovod(tensor))


def _spec_of(gradient: Any) -> tf.TypeSpec:
    """The spec with which a gradient is traced; a sparse gradient may have any number of rows."""
    if isinstance(gradient, tf.IndexedSlices):
        dense_shape = gradient.dense_shape
        return tf.IndexedSlicesSpec(
            gradient.shape,
            gradient.dtype,
            gradient.indices.dtype,
            None if dense_shape is None else dense_shape.dtype,
            tf.TensorShape([None]),
        )
    return tf.TensorSpec(gradient.shape, gradient.dtype)
