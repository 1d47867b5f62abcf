"""Horovod's compressor interface in TensorFlow's graphs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow.compression import Compressor as HorovodCompressor

from hvd_compress.codecs import Codec, ErrorFeedback
from hvd_compress.codecs.base import check_number
from hvd_compress.codecs.payload import FORMAT_VERSION
from hvd_compress.exchange.counters import Counters
from hvd_compress.exchange.errors import ExchangeError
from hvd_compress.exchange.routing import DEFAULT_THRESHOLD, Route, Router, check_gather
from hvd_compress.tensorflow.graphs import Exchange, Traced, graph_of, traced_under
from hvd_compress.tensorflow.guard import check_who_hashes
from hvd_compress.tensorflow.native import operations, spec_bytes
from hvd_compress.tensorflow.slots import Slot
from hvd_compress.tensorflow.state import Inheritance, Owner, inheritance
from hvd_compress.tensorflow.step import Step

_UNKNOWN_SIZE = 2**31 - 1
"""Stands for a size that tracing does not know: large, so that the gradient is encoded."""

_instances = 0


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
        self._ops = operations()
        self._ledger = self._ops.hvdc_ledger()
        self._step = Step(
            self._ops,
            self._ledger,
            self._rank,
            self._size,
            self._process_set,
            self._prefix,
            self._configuration,
        )
        self._exchanges = 0
        self._offset = Counters()
        self.slots: list[Slot] = []
        self.owner = Owner(self._rank, self._size, seed, self._step.forget_agreement)
        self._inheritance = Inheritance()

    def __hash__(self) -> int:
        check_who_hashes()
        return super().__hash__()

    @tf.autograph.experimental.do_not_convert
    def compress(self, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Horovod's entry: starts the exchange of one gradient.

        Returns:
            What Horovod shall allreduce, and the context for :meth:`decompress`.
        """
        graph = graph_of(tensor)
        traced = traced_under(graph, self)
        slot = self._slot(traced.position, tensor)
        traced.position += 1
        exchange = self._exchange(traced, graph)
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
            return tf.cast(self._ops.hvdc_arrived(tensor, self._ledger), ctx.dtype)
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

    def load_resized(self, checkpoints: Sequence[str], name: str = "compressor") -> None:
        """Continues where a job with another number of ranks left off.

        What was not sent keeps its part in the ranks' average, on other ranks
        (:mod:`hvd_compress.exchange.resize`).

        Args:
            checkpoints: the paths of every rank's checkpoint of that job, in any order.
            name: the compressor's in them: ``"a"`` for ``tf.train.Checkpoint(a=compressor)``.

        Raises:
            ValueError: not one checkpoint of each rank, another seed, or checkpoints of different steps;
                nothing is changed then.
        """
        inherited = inheritance(checkpoints, name, self._rank, self._size, self._seed)
        self._inheritance = inherited
        for slot in self.slots:
            inherited.give(slot)
        self._step.forget_agreement()

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
        if position < len(self.slots):
            self.slots[position].check(gradient)
            return self.slots[position]
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
            slot = Slot(position, gradient.dtype, gradient.shape, route)
            self.slots.append(slot)
            self._inheritance.give(slot)
            self._step.forget_agreement()
        return slot

    def _configuration(self) -> dict[str, Any]:
        tensors = {
            s.label: f"{s.kind} by {s.route}, exchange {int(s.exchanges)}" for s in self.slots
        }
        return {
            "format version": FORMAT_VERSION,
            "ranks": self._size,
            "seed": self._seed,
            "warmup_steps": self._warmup_steps,
            "gradient of": tensors,
        }

    def _exchange(self, traced: Traced, graph: Any) -> Exchange:
        if graph not in traced.exchanges:
            self._exchanges += 1
            with graph.as_default():
                traced.exchanges[graph] = self._begin(self._exchanges)
        exchange = traced.exchanges[graph]
        exchange.gradients += 1
        with tf.init_scope():
            self._ops.hvdc_expect(self._ledger, graph=exchange.graph, count=exchange.gradients)
        return exchange

    def _begin(self, graph: int) -> Exchange:
        if not self._included or (self._size == 1 and not os.environ.get("HOROVOD_ELASTIC")):
            # The branch in which compress is called does not run on this rank.
            return Exchange(tf.ones([1]), tf.constant(True), graph)
        return Exchange(*self._step.begin(graph), graph)

    def _start_dense(
        self, slot: Slot, gradient: tf.Tensor, exchange: Exchange
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
        self, slot: Slot, gradient: tf.Tensor, exchange: Exchange
    ) -> tuple[tf.Tensor, _Encoded]:
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
        return f"{self._prefix}.{what}"
