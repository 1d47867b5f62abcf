"""Horovod's compressor interface in TensorFlow's graphs."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow.compression import Compressor as HorovodCompressor

from hvd_compress.codecs import Codec, ErrorFeedback
from hvd_compress.codecs.base import check_number
from hvd_compress.codecs.payload import FORMAT_VERSION
from hvd_compress.exchange import agreement, token
from hvd_compress.exchange.counters import Counters
from hvd_compress.exchange.errors import ExchangeError
from hvd_compress.exchange.routing import DEFAULT_THRESHOLD, Route, Router, check_gather
from hvd_compress.tensorflow.guard import check_who_hashes
from hvd_compress.tensorflow.native import operations, spec_bytes
from hvd_compress.tensorflow.slots import Slot, kind_of

_UNKNOWN_SIZE = 2**31 - 1
"""Stands for a size that tracing does not know: large, so that the gradient is encoded."""

_instances = 0


@dataclass(eq=False)
class _Exchange:
    """What the gradients of one graph share.

    Attributes:
        begun: what all messages of a step depend on, and the token that is reduced in their place.
        everybody: whether all ranks take part in the step, shape=(), bool.
        graph: a number of the graph's own.
        encoded: how many gradients are encoded in it.
    """

    begun: tf.Tensor
    everybody: tf.Tensor
    graph: int
    encoded: int = 0


@dataclass(eq=False)
class _Dense:
    dtype: tf.DType


@dataclass(eq=False)
class _Encoded:
    slot: Slot
    gradient: tf.Tensor
    payload: tf.Tensor
    step: tf.Tensor
    message: tf.Tensor
    gathered: tf.Tensor


@dataclass(eq=False)
class _Traced:
    """What is known about the graphs under an outermost one."""

    position: int = 0
    exchanges: dict[int, _Exchange] = field(default_factory=dict)


class Compressor(tf.Module, HorovodCompressor):
    """Sends gradients encoded; pass one to ``hvd.DistributedGradientTape(compression=...)``.

    Make one for each model and optimizer: it holds the residuals. Two compressors are never equal.

    Args:
        codec: what gradients are encoded with.
        feedback: coefficients of error feedback.
        threshold: gradients with fewer elements are left to Horovod, which fuses them.
        exclude: patterns (``fnmatch``) of gradients to leave to Horovod. They are called ``gradient.0``,
            ``gradient.1`` and so on, in the order of the tape's sources; None and sparse ones do not count.
        layers: other codecs by pattern: a codec, a scheme's name or None for uncompressed.
        warmup_steps: steps at the start that go uncompressed.
        seed: of the stochastic codecs' noise, the same on every rank.
        process_set: as the tape's or optimizer's; None is all ranks.
        threads: kernel threads; None is TensorFlow's number for one operation.
        name: what this compressor's collectives are called by; None numbers compressors in the order in
            which they are made, which must then be the same on every rank.

    Raises:
        TypeError, ValueError: an argument is wrong, "expected X, got Y".
        ExchangeError: ``hvd.init()`` was not called.
    """

    def __init__(
        self,
        codec: Codec,
        feedback: ErrorFeedback,
        *,
        threshold: int = DEFAULT_THRESHOLD,
        exclude: Sequence[str] = (),
        layers: Mapping[str, Codec | str | None] | None = None,
        warmup_steps: int = 0,
        seed: int = 0,
        process_set: Any | None = None,
        threads: int | None = None,
        name: str | None = None,
    ) -> None:
        global _instances
        check_number("Compressor", "warmup_steps", warmup_steps, 0, 2**62, integer=True)
        check_number("Compressor", "seed", seed, 0, 2**32 - 1, integer=True)
        if threads is not None:
            check_number("Compressor", "threads", threads, 1, 1024, integer=True)
        if not hvd.is_initialized():
            raise ExchangeError("expected hvd.init() before a compressor is made, got no Horovod")
        super().__init__(name="hvd_compress")
        self._process_set = hvd.global_process_set if process_set is None else process_set
        if self._process_set.process_set_id is None:
            raise ExchangeError(
                "expected a registered process set, got one unknown to Horovod: pass it to hvd.init() or "
                "hvd.add_process_set() first"
            )
        self._prefix = f"hvd_compress.{_instances}" if name is None else name
        _instances += 1
        self._included = bool(self._process_set.included())
        self._rank = self._process_set.rank() if self._included else -1
        self._size = self._process_set.size()
        self._router = Router(Route(codec, feedback), threshold, exclude, layers)
        self._warmup_steps = warmup_steps
        self._seed = seed
        self._threads = threads
        self._graphs: Any = weakref.WeakKeyDictionary()
        self._ops = operations()
        self._ledger = self._ops.hvdc_ledger()
        self._exchanges = 0
        self._offset = Counters()
        self.slots: list[Slot] = []
        self._agreed = tf.Variable(False, trainable=False, name="agreed")
        self._configuration = tf.Variable(
            tf.zeros([0], tf.uint8), trainable=False, shape=tf.TensorShape([None]), name="settings"
        )

    def __hash__(self) -> int:
        check_who_hashes()
        return super().__hash__()

    @tf.autograph.experimental.do_not_convert
    def compress(self, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Horovod's entry: starts the exchange of one gradient.

        Returns:
            What Horovod shall allreduce, and the context for :meth:`decompress`.
        """
        here = tf.compat.v1.get_default_graph()
        if tf.executing_eagerly() or not hasattr(here, "outer_graph"):
            raise ExchangeError(
                "expected a gradient in a tf.function, as DistributedGradientTape and DistributedOptimizer "
                "send them, got one outside of any: compress() cannot tell whose it is"
            )
        traced = self._graphs.setdefault(_outermost(here), _Traced())
        slot = self._slot(traced.position, tensor)
        traced.position += 1
        exchange = self._exchange(traced, here)
        if slot.route.dense:
            return self._start_dense(slot, tensor, exchange)
        return self._start_encoded(slot, tensor, exchange)

    @tf.autograph.experimental.do_not_convert
    def decompress(self, tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Horovod's exit: the reduced gradient, in the shape and dtype of the one given to compress.

        Raises:
            ExchangeError: an operation that compressed gradients cannot follow, or another process set.
        """
        if isinstance(ctx, _Dense):
            return tf.cast(tensor, ctx.dtype)
        slot = ctx.slot
        return self._ops.hvdc_decode(
            message=ctx.message,
            gathered=ctx.gathered,
            reduced=tensor,
            gradient=ctx.gradient,
            payload=ctx.payload,
            step=ctx.step,
            ledger=self._ledger,
            ranks=self._size,
            scale=self._scale(tensor.op, slot),
            **self._attributes(slot),
        )

    @property
    def counters(self) -> Counters:
        """What this rank has sent since construction or the last reset."""
        now = self._counted()
        return Counters(**{k: v - getattr(self._offset, k) for k, v in vars(now).items()})

    def reset_counters(self) -> None:
        """Sets :attr:`counters` to zero."""
        self._offset = self._counted()

    def routes(self) -> dict[str, Route]:
        """How each gradient that has been traced travels, by name."""
        return {slot.label: slot.route for slot in self.slots}

    def residual_norm(self) -> float:
        """The l2 norm of all residuals of this rank together."""
        norms = [tf.norm(slot.residual) for slot in self.slots]
        return float(tf.norm(norms)) if norms else 0.0

    def _counted(self) -> Counters:
        steps, tensors, elements, plain, payloads, dense, encode, decode = (
            self._ops.hvdc_counters(self._ledger).numpy().tolist()
        )
        counters = Counters(
            steps=int(steps),
            encoded_elements=int(elements),
            uncompressed_bytes=int(plain),
            encode_seconds=encode,
            decode_seconds=decode,
        )
        counters.add_allgather(self._size, int(payloads))
        counters.add_allreduce(self._size, int(dense) + 4 * int(tensors))
        return counters

    def _slot(self, position: int, gradient: tf.Tensor) -> Slot:
        kind = kind_of(gradient)
        if position < len(self.slots):
            slot = self.slots[position]
            if slot.kind != kind:
                raise ExchangeError(
                    f"{slot.label}: expected {slot.kind} as before, got {kind}: make a compressor for each "
                    f"model and optimizer, and pass a tape's sources in the same order every time"
                )
            return slot
        shape = gradient.shape.as_list() if gradient.shape.rank is not None else [None]
        known = None not in shape
        size = tuple(shape) if known else (_UNKNOWN_SIZE,)
        label = f"gradient.{position}"
        route = self._router.choose(label, size, gradient.dtype.name)
        if not route.dense and known:
            check_gather(label, route.codec.payload_bytes(size), self._size)
        with tf.init_scope():
            if not tf.executing_eagerly():
                raise ExchangeError(
                    "expected TensorFlow 2's eager execution, got a graph of TensorFlow 1"
                )
            slot = Slot(position, kind, route)
            self.slots.append(slot)
            self._note_configuration()
        return slot

    def _note_configuration(self) -> None:
        # Read when the graph runs for the first time; by then it is complete.
        tensors = {
            s.label: f"{s.kind} by {s.route}, exchange {int(s.exchanges)}" for s in self.slots
        }
        line = agreement.serialize(
            {
                "format version": FORMAT_VERSION,
                "ranks": self._size,
                "seed": self._seed,
                "warmup_steps": self._warmup_steps,
                "gradient of": tensors,
            }
        )
        self._configuration.assign(tf.io.decode_raw(line, tf.uint8))
        self._agreed.assign(False)

    def _exchange(self, traced: _Traced, here: Any) -> _Exchange:
        # Horovod calls compress in a branch; what gradients share belongs where the branches are.
        branch = type(here).__name__ == "CondBranchFuncGraph"
        graph = here.outer_graph if branch else here
        if id(graph) not in traced.exchanges:
            self._exchanges += 1
            with graph.as_default():
                traced.exchanges[id(graph)] = self._begin(self._exchanges)
        return traced.exchanges[id(graph)]

    def _begin(self, graph: int) -> _Exchange:
        if not self._included or (self._size == 1 and not os.environ.get("HOROVOD_ELASTIC")):
            # The branch in which compress is called does not run on this rank.
            return _Exchange(tf.ones([1]), tf.constant(True), graph)
        agreed = tf.cond(self._agreed, lambda: tf.constant(True), self._agree)
        with tf.control_dependencies([agreed]):
            begun = self._ops.hvdc_begin(self._ledger, graph=graph)
        present = hvd.allreduce(
            begun * tf.constant(token.make(self._rank)),
            op=hvd.Sum,
            name=self._called("roll call"),
            process_set=self._process_set,
            ignore_name_scope=True,
        )
        wanted = tf.constant(token.of_everybody(self._size))
        everybody = tf.reduce_all(tf.abs(present - wanted) <= token.TOLERANCE * wanted)
        return _Exchange(begun, everybody, graph)

    def _agree(self) -> tf.Tensor:
        gathered = hvd.allgather(
            self._configuration.read_value(),
            name=self._called("configuration"),
            process_set=self._process_set,
            ignore_name_scope=True,
        )

        def check(lines: Any) -> Any:
            agreement.check(lines.tobytes())
            return True

        # Once a trace: the comparison is the one that every frontend uses, and it raises.
        same = tf.numpy_function(check, [gathered], tf.bool)
        with tf.control_dependencies([same]):
            self._agreed.assign(True)
        return tf.reshape(same, [])

    def _start_dense(
        self, slot: Slot, gradient: tf.Tensor, exchange: _Exchange
    ) -> tuple[tf.Tensor, _Dense]:
        sent = gradient
        wanted = slot.route.dense_dtype
        if wanted is not None and gradient.dtype == tf.float32:
            sent = tf.cast(gradient, wanted)
        elif gradient.dtype == tf.bfloat16:
            sent = tf.cast(gradient, tf.float32)  # Horovod has no bfloat16.
        sent = self._ops.hvdc_dense(
            sent, exchange.begun, self._ledger, uncompressed_item_bytes=gradient.dtype.size
        )
        return sent, _Dense(gradient.dtype)

    def _start_encoded(
        self, slot: Slot, gradient: tf.Tensor, exchange: _Exchange
    ) -> tuple[tf.Tensor, _Encoded]:
        with tf.init_scope():
            exchange.encoded += 1
            self._ops.hvdc_expect(self._ledger, graph=exchange.graph, count=exchange.encoded)
        payload, step = self._ops.hvdc_encode(
            gradient,
            exchange.begun,
            slot.residual.handle,
            slot.exchanges.handle,
            self._ledger,
            seed=self._seed,
            rank=max(0, self._rank),
            ranks=self._size,
            warmup=self._warmup_steps,
            **self._attributes(slot),
        )
        gathered = exchange.everybody
        if self._warmup_steps:
            gathered = tf.logical_and(gathered, step >= 0)
        message = tf.cond(
            gathered, lambda: self._gather(slot, payload), lambda: self._sum(slot, gradient)
        )
        message.set_shape([None])
        token = tf.identity(exchange.begun)
        return token, _Encoded(slot, gradient, payload, step, message, gathered)

    def _gather(self, slot: Slot, payload: tf.Tensor) -> tf.Tensor:
        return hvd.allgather(
            payload,
            name=self._called(slot.label),
            process_set=self._process_set,
            ignore_name_scope=True,
        )

    def _sum(self, slot: Slot, gradient: tf.Tensor) -> tf.Tensor:
        total = hvd.allreduce(
            tf.reshape(tf.cast(gradient, tf.float32), [-1]),
            op=hvd.Sum,
            name=self._called(f"{slot.label}.dense"),
            process_set=self._process_set,
            ignore_name_scope=True,
        )
        return tf.reshape(tf.bitcast(total, tf.uint8), [-1])

    def _attributes(self, slot: Slot) -> dict[str, Any]:
        threads = self._threads or tf.config.threading.get_intra_op_parallelism_threads()
        return {
            "label": slot.label,
            "spec": spec_bytes(slot.route.codec),
            "tensor": slot.index,
            "threads": threads or len(os.sched_getaffinity(0)),
            "alpha": slot.route.feedback.alpha,
            "beta": slot.route.feedback.beta,
        }

    def _scale(self, reduction: Any, slot: Slot) -> float:
        """The factor on the sum of the gradients that Horovod's reduction of the token stands for."""
        if reduction.type not in ("HorovodAllreduce", "HorovodGroupedAllreduce"):
            raise ExchangeError(
                f"{slot.label}: expected Horovod's allreduce of the token, got {reduction.type}"
            )
        operation, process_set = (
            reduction.get_attr(name) for name in ("reduce_op", "process_set_id")
        )
        if operation not in (hvd.Average, hvd.Sum):
            raise ExchangeError(
                f"{slot.label}: expected op=Average or op=Sum, got another: compressed gradients cannot be "
                f"reduced with Min, Max, Product or Adasum"
            )
        if process_set != self._process_set.process_set_id:
            raise ExchangeError(
                f"{slot.label}: expected the compressor's process set "
                f"{self._process_set.process_set_id}, got {process_set}: pass the same process_set to both"
            )
        factors = reduction.get_attr("prescale_factor") * reduction.get_attr("postscale_factor")
        return factors / self._size if operation == hvd.Average else factors

    def _called(self, what: str) -> str:
        return f"{self._prefix}.{what}".replace(" ", "_")


def _outermost(graph: Any) -> Any:
    while getattr(graph.outer_graph, "outer_graph", None) is not None:
        graph = graph.outer_graph
    return graph
