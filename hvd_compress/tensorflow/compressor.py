"""Horovod's compressor interface in TensorFlow's graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow.compression import Compressor as HorovodCompressor

from hvd_compress.codecs import Codec, ErrorFeedback
from hvd_compress.codecs.calls import guard_methods
from hvd_compress.codecs.checks import check_number, check_threads
from hvd_compress.codecs.payload import FORMAT_VERSION
from hvd_compress.exchanges.default import AUTO, exchange_for
from hvd_compress.exchanges.routing import (
    DEFAULT_THRESHOLD,
    ENCODABLE,
    CodecLike,
    Route,
    Router,
    route_of,
    warn_of_dtypes,
    warn_of_growth,
    warn_of_nothing,
)
from hvd_compress.exchanges.shards import Shared
from hvd_compress.ranks import names, process_sets
from hvd_compress.ranks.counters import Counters
from hvd_compress.ranks.errors import ExchangeError
from hvd_compress.ranks.launch import say_alone, warn_of_separate_jobs
from hvd_compress.tensorflow.coder import Coder
from hvd_compress.tensorflow.collectives import GraphCollectives
from hvd_compress.tensorflow.exchanges import registry
from hvd_compress.tensorflow.graphs import beginnings_in, graph_of, is_outermost
from hvd_compress.tensorflow.guard import check_who_hashes
from hvd_compress.tensorflow.native import open_cuda
from hvd_compress.tensorflow.placement import HOST, choose, is_gpu
from hvd_compress.tensorflow.slots import GraphSlot
from hvd_compress.tensorflow.sources import SharedTrace, Source, Variables, call_of
from hvd_compress.tensorflow.state import Inheritance, StateOwner, check_restored, inheritance
from hvd_compress.tensorflow.tracing import Tracing
from hvd_compress.tensorflow.use import TensorFlowUse

_UNKNOWN_SIZE = 2**31 - 1
"""Stands for a size that tracing does not know; it is large, so that the gradient is encoded."""


@guard_methods("compress", "decompress", write="compression={}")
class Compressor(tf.Module, HorovodCompressor):
    """Encodes gradients before they are sent; pass one to ``hvd.DistributedGradientTape(compression=...)``.

    Make one for each model and optimizer: it holds the residuals, one for each variable whose gradients it
    receives. Two compressors are never equal.

    Args:
        codec: the encoding of gradients: a codec, a :class:`~hvd_compress.Route` or a codec's name.
        owner_step: None: an owner averages and encodes in one operation, which has no place for a step.
        process_set: the same as for the tape or optimizer; None is all ranks.
        device: the device on which gradients are encoded and residuals kept, for example ``"GPU:0"`` or
            ``"CPU:0"``; None is TensorFlow's first GPU, if there is one and the codecs have kernels for
            it.
        name: the prefix of the names of this compressor's collectives; None numbers compressors in the
            order in which they are made, which must then be the same on every rank.
        options: :class:`~hvd_compress.exchanges.options.SharedOptions`. For ``exclude`` and ``layers``,
            gradients are named ``gradient.0``, ``gradient.1`` and so on, in the order of their first
            exchanges, which is that of the tape's sources; None and sparse gradients do not count. With
            :func:`hvd_compress.keras.DistributedOptimizer`, their names are the variables' paths.

    Raises:
        TypeError, ValueError: an argument is wrong, "expected X, got Y".
        KernelError: gradients are to be encoded on a GPU, but the CUDA library was not built.
        ExchangeError: ``hvd.init()`` was not called.
    """

    def __init__(
        self,
        codec: Codec | Route | str,
        *,
        feedback: ErrorFeedback | None = None,
        exchange: str = AUTO,
        owner_step: None = None,
        threshold: int = DEFAULT_THRESHOLD,
        exclude: Sequence[str] = (),
        layers: Mapping[str, CodecLike] | None = None,
        warmup_steps: int = 0,
        seed: int = 0,
        process_set: Any | None = None,
        threads: int | None = None,
        device: str | None = None,
        name: str | None = None,
    ) -> None:
        if tf.inside_function():
            raise ExchangeError(
                "expected a compressor that is made once, before training, got one within tf.function: "
                "make it outside, and pass it to hvd.DistributedGradientTape(tape, compression=...) inside"
            )
        check_number("Compressor", "warmup_steps", warmup_steps, 0, 2**62, integer=True)
        check_number("Compressor", "seed", seed, 0, 2**32 - 1, integer=True)
        if threads is not None:
            check_threads("Compressor", threads)
        if owner_step is not None:
            raise ValueError(
                f"Compressor.owner_step: expected None in TensorFlow, got {owner_step!r}: an owner "
                f"averages and encodes in one operation, without a step between; hvd_compress.torch, ddp, "
                f"distributed and fsdp have owner steps"
            )
        registry.check_name(exchange)
        registry.check_inner(codec, "Compressor.codec")
        for pattern, given in layers.items() if isinstance(layers, Mapping) else ():
            registry.check_inner(given, f"Compressor.layers[{pattern!r}]")
        route = route_of(codec, exchange, "Compressor.codec")
        if feedback is not None:
            route = replace(route, feedback=feedback)
        process_set = process_sets.registered(hvd, process_set)
        super().__init__(name="hvd_compress")
        auto, exchange = route.exchange == AUTO, route.exchange
        if auto:
            exchange, _ = exchange_for(process_set.size())
        self._router = Router(route, threshold, exclude, layers)
        registry.check(self._router, exchange, process_set.size())
        prefix = names.distinct("hvd_compress" if name is None else name)
        self._device = choose(device, self._router.codecs)
        self._collectives = GraphCollectives(process_set, prefix, on_gpu=is_gpu(self._device))
        self._size = self._collectives.size
        warn_of_separate_jobs(hvd.size())
        if self._size == 1:
            say_alone()
        self._warmup_steps = warmup_steps
        self._seed = seed
        self._coder = Coder(seed, warmup_steps, threads, self._device)
        self._ops, self._ledger = self._coder.operations, self._coder.ledger
        if is_gpu(self._device):
            open_cuda()
        self._tracing = Tracing(self._coder, self._collectives, self._compared)
        # "auto" gathers gradients whose shape tracing does not know.
        self._tracing.set_exchanges([exchange, "allgather"] if auto else [exchange])
        self._warned_of_nothing = False
        self._variables = Variables()
        self._expected: Source | None = None
        self._offset = Counters()
        self._resets = 0
        self.begins_anew = False
        """Whether gradients that are not traced yet begin without saved residuals, since :meth:`reset`."""
        self._restored_slots: frozenset[int] = frozenset()
        self.slots: list[GraphSlot] = []
        owners = self._tracing.exchanges[exchange].owners
        self.owner = self._make_owner(exchange=exchange, owners=owners)
        self._inheritance = Inheritance()
        self.use = TensorFlowUse(f"{type(self).__name__} {route}")
        if self._collectives.included and self._size > 1:
            self.use.suspect()

    def __hash__(self) -> int:
        check_who_hashes()
        return super().__hash__()

    def __repr__(self) -> str:
        return self.counters.shown(type(self).__name__, self._router.route)

    @tf.autograph.experimental.do_not_convert
    def compress(self, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Horovod's entry: starts the exchange of one gradient.

        Returns:
            The tensor that Horovod has to reduce, and the context for :meth:`decompress`.
        """
        self.use.exchanged = True
        graph = graph_of(tensor)
        expected, self._expected = self._expected, None
        call = None if expected else call_of(tensor)
        beginning = self._tracing.begin(graph, call)
        source = call.source(tensor, beginning.count(tensor)) if call else expected
        assert source is not None
        turn = beginning.count(source.variable)
        slot = self._slot(source, turn, tensor, beginnings_in(graph, self._tracing)[0].graph)
        beginning.exchanges([*beginning.slots, slot])
        state = slot.handles
        if source.call and is_outermost(graph):
            if beginning.shared is None:
                beginning.shared = SharedTrace(
                    graph, self._slot_like, partial(self._tracing.exchange_now, beginning)
                )
            state = beginning.shared.handles(source, turn, slot)
        return self._tracing.start(slot, tensor, beginning, state)

    @tf.autograph.experimental.do_not_convert
    def decompress(self, tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Horovod's exit: the reduced gradient, in the shape and dtype of that passed to :meth:`compress`.

        Raises:
            ExchangeError: Horovod's operation is not possible on compressed gradients, or has another
                process set.
        """
        result: tf.Tensor = ctx(tensor)
        return result

    @property
    def counters(self) -> Counters:
        """Counts of this rank's traffic since construction or the last reset."""
        now = self._counted()
        return Counters(**{k: v - getattr(self._offset, k) for k, v in vars(now).items()})

    def reset_counters(self) -> None:
        """Sets :attr:`counters` to zero."""
        self._offset = self._counted()

    def drop_step(self) -> None:
        """Takes back the last exchange, for steps whose results are not used; every rank has to call it.

        Residuals become what they were before that exchange, bit for bit, including those of the parts that
        this rank owns. Without this call, error feedback would bring the discarded gradients into later
        steps. Positions in the noise still advance, and the step counts for the warm-up.

        The last exchange is that of the last call of a tape or optimizer, or of the last run of a
        ``tf.function`` with several. The call may be eager, or follow the exchange in a ``tf.function`` or
        in a branch of ``tf.cond``. Nothing changes where there has been no exchange, or where the last one
        was dropped already: by an earlier call, or on all ranks because of an Inf or a NaN.

        Raises:
            tf.errors.FailedPreconditionError: residuals were restored from a checkpoint, or changed by
                :meth:`load_resized` or :meth:`reset`, since the last exchange.
        """
        with tf.device(HOST):
            self._ops.hvdc_tell(self._ledger, what="drop_step")

    def keep_step(self) -> None:
        """Says that the last exchange's results have been used: :meth:`drop_step` changes nothing then.

        The optimizers of :mod:`hvd_compress.keras` say so at the start of each batch, since a batch may
        exchange nothing. The call may be traced, before the exchange.
        """
        with tf.device(HOST):
            self._ops.hvdc_tell(self._ledger, what="used")

    def reset(self) -> None:
        """Discards what was not sent, for a model that returns to an earlier state; every rank calls it.

        Residuals of this rank's gradients and of the parts that this rank owns are discarded, also those of
        a checkpoint for gradients that are not traced yet. Otherwise, the next steps would add gradients of
        the steps that the model has forgotten. Positions in the noise, the warm-up, routes and
        :attr:`counters` go on. If only some ranks have called this method, the next step raises an error on
        all ranks.

        Raises:
            ExchangeError: it is called within a ``tf.function``, whose gradients are being exchanged.
        """
        if tf.inside_function():
            raise ExchangeError(
                "reset: expected a call between two steps, got one within a tf.function, whose gradients "
                "are being exchanged: call it eagerly, after the function"
            )
        self._resets += 1
        self.begins_anew = True
        for slot in self.slots:
            slot.discard()
        self._replace()

    def routes(self) -> dict[str, Route]:
        """The route of each gradient that has been traced, by name.

        Each route has the exchange that is used. With ``exchange="auto"``, its ``reason`` says why.
        """
        return {slot.label: slot.route for slot in self.slots}

    def expect(self, variable: Any, label: str, place: int = 0) -> None:
        """Names the variable of the next gradient, for callers other than Horovod's own.

        Args:
            variable: a variable of TensorFlow or Keras.
            label: the gradient's name in patterns and messages.
            place: the variable's position among all variables of the caller, the same on every rank.
        """
        self._expected = Source.of(variable, place=place, label=label)

    def begin_step(self, beside: Mapping[str, str]) -> tf.Tensor:
        """Begins a step in the current graph, for callers that exchange other gradients in the same step.

        Args:
            beside: descriptions of what the caller exchanges without this compressor, by name.

        Returns:
            A tensor, shape=(1,), float32, on which that exchange has to depend: it is an error on every
            rank if the ranks describe it in different ways.
        """
        return self._tracing.begin(tf.compat.v1.get_default_graph(), beside=beside).begun

    def check_patterns(self, labels: Sequence[str]) -> None:
        """Raises ``ValueError`` where a pattern of ``exclude`` or ``layers`` matches none of the labels."""
        self._router.check_patterns(labels)

    def residual_norm(self) -> float:
        """The l2 norm of all residuals of this rank taken together."""
        norms = [tf.norm(tf.cast(one, tf.float32)) for slot in self.slots for one in slot.kept]
        return float(tf.norm(norms)) if norms else 0.0

    def metrics(self) -> dict[str, float]:
        """This rank's numbers for TensorBoard or Weights & Biases, by name.

        ``compression/bytes_per_step`` is the mean of ``counters.wire_bytes``, ``compression/ratio`` is
        ``counters.ratio``, and ``compression/residual_norm`` is :meth:`residual_norm`, which reads all
        residuals: call this where the script logs its loss, and not in every step.
        """
        return self.counters.metrics(self.residual_norm())

    def load_resized(self, checkpoints: Sequence[str], name: str = "compressor") -> None:
        """Continues where a job with another number of ranks, or with another exchange, stopped.

        Unsent gradients keep their weight in the ranks' average, though on other ranks
        (:mod:`hvd_compress.ranks.resize`).

        Args:
            checkpoints: the paths of every rank's checkpoint of that job, in any order.
            name: the compressor's name in them: ``"a"`` for ``tf.train.Checkpoint(a=compressor)``.

        Raises:
            ValueError: there is not one checkpoint of each rank, the seed differs, or the checkpoints are
                of different steps or exchanges; nothing has changed then.
        """
        resized = inheritance(checkpoints, name, self.owner)
        self.inherit(resized)
        self._restored_slots = frozenset(range(len(resized.names)))

    def inherit(self, inheritance: Inheritance) -> None:
        """Restores earlier state for all gradients, including those traced from now on.

        Args:
            inheritance: the state for each gradient.
        """
        self._inheritance, self.begins_anew = inheritance, False
        for slot in self.slots:
            self._inherit(slot)
        self._replace()

    def owners_of(self, slot: GraphSlot) -> int:
        """The number of ranks that share out a gradient; 0 where none do."""
        exchange = self._tracing.exchanges.get(slot.route.exchange)
        return exchange.owners if exchange else 0

    def shared(self, slot: GraphSlot) -> Shared | None:
        """The order and the parts in which ranks share out a gradient; None where they do not."""
        exchange = self._tracing.exchanges.get(slot.route.exchange)
        return exchange.shared(slot) if exchange else None

    @property
    def process_set(self) -> Any:
        """The process set whose ranks average their gradients."""
        return self._collectives.process_set

    def _counted(self) -> Counters:
        *counts, encode, decode = self._ops.hvdc_counters(self._ledger).numpy().tolist()
        steps, elements, plain, gathered, distributed, kept, reduced = map(int, counts)
        counters = Counters(
            steps=steps,
            encoded_elements=elements,
            uncompressed_bytes=plain,
            encode_seconds=encode,
            decode_seconds=decode,
        )
        counters.add_allgather(self._size, gathered)
        counters.add_alltoall(distributed, kept)
        counters.add_allreduce(self._size, reduced)
        return counters

    def _replace(self) -> None:
        """Called where other residuals replace those that the last exchange left."""
        self._ops.hvdc_tell(self._ledger, what="replaced")
        self._tracing.step.forget_agreement()

    def _make_owner(self, **settings: Any) -> StateOwner:
        rank, size = self._collectives.rank, self._size
        return StateOwner(rank, size, self._seed, self._describe, self._restored, **settings)

    def _restored(self, saved: dict[str, Any]) -> None:
        """Called when a checkpoint is restored, with what :meth:`_describe` returned."""
        count = len(saved["orders"])
        for slot in self.slots[count:]:  # First exchanged after it.
            slot.begin_anew()
        self.begins_anew, self._restored_slots = False, frozenset(range(count))
        self._replace()

    def _describe(self) -> dict[str, Any]:
        """The content of a checkpoint besides variables, see :class:`StateOwner`."""
        return {"orders": list(map(self._order_of, self.slots))}

    def _order_of(self, slot: GraphSlot) -> dict[str, Any]:
        """The description of a gradient in a checkpoint."""
        found = self.shared(slot)
        cut = {"row": found.row, "transposed": found.transposed} if found else {}
        of = {"key": slot.index, "of": slot.variable_name, "call": slot.call}
        return {**cut, **of, "residual_dtype": slot.residual.dtype.name}

    def _check_restored(self) -> None:
        """Raises ``ValueError`` where a checkpoint's residuals cannot be this rank's or would get lost."""
        for slot in self.slots:
            if slot.index in self._restored_slots:
                check_restored(slot, self.owners_of(slot), self.shared(slot), self.owner.rank)
        self._restored_slots -= {slot.index for slot in self.slots}

    def _inherit(self, slot: GraphSlot) -> None:
        self._inheritance.give(slot, owners=self.owners_of(slot), shared=self.shared(slot))

    def _slot(self, source: Source, turn: int, like: Any, call: int) -> GraphSlot:
        """The slot of a gradient.

        Args:
            source: the variable of the gradient.
            turn: see :meth:`Variables.find`.
            like: the gradient, or an object with its shape and dtype.
            call: :attr:`GraphSlot.call` of a new slot.
        """
        known = self._variables.find(source.variable, turn)
        if known is not None:
            known.check(like)
            return known
        with tf.init_scope():
            if not tf.executing_eagerly():
                raise ExchangeError(
                    "expected TensorFlow 2's eager execution, got a graph of TensorFlow 1"
                )
            position = len(self.slots)
            slot = self._make_slot(position, source.label or f"gradient.{position}", like)
            slot.variable_name = f"{source.name} again" * bool(turn) or source.name
            slot.place, slot.call = source.place, call
            self.owner.check(position, self._order_of(slot))
            self._variables.add(source.variable, turn, slot)
            self.slots.append(slot)
            self._inherit(slot)
            if self.begins_anew:
                slot.discard()
            self._tracing.step.forget_agreement()
        return slot

    def _slot_like(self, source: Source, turn: int, traced: GraphSlot) -> GraphSlot:
        """The slot of a gradient that is exchanged by the trace of another gradient.

        Raises:
            ExchangeError: the two gradients need different routes.
        """
        slot = self._slot(source, turn, traced.spec, self._tracing.calls + 1)
        slot.scale = traced.scale
        if slot.route != traced.route:
            raise ExchangeError(
                f"expected {slot.label} ({slot.variable_name}) to be exchanged as {traced.label} "
                f"({traced.variable_name}) is, which has the same shape and so the same trace, got "
                f"{slot.route} instead of {traced.route}: exchange them in a tf.function that makes the "
                f"tape"
            )
        return slot

    def _make_slot(self, position: int, label: str, gradient: tf.Tensor) -> GraphSlot:
        size = gradient.shape.as_list() if gradient.shape.is_fully_defined() else [_UNKNOWN_SIZE]
        route = self._router.choose(label, tuple(size), gradient.dtype.name)
        route = route.among(self._size, divisible=gradient.shape.is_fully_defined())
        if route.uncompressed and not self._router.wanted(label, tuple(size)).uncompressed:
            warn_of_dtypes({label: gradient.dtype.name})
        slot = GraphSlot(position, gradient.dtype, gradient.shape, route, self._device, label)
        if not route.uncompressed:
            self._tracing.exchanges[route.exchange].check(slot)
            if slot.shape is not None:
                warn_of_growth(label, slot.shape, route, slot.dtype.size)
        return slot

    def _compared(self) -> dict[str, Any]:
        """The configuration, when a step begins: all of the step's gradients have been traced then."""
        if not self._warned_of_nothing and all(slot.route.uncompressed for slot in self.slots):
            encodable = (slot for slot in self.slots if slot.dtype.name in ENCODABLE)
            shapes = {slot.label: slot.shape or () for slot in encodable}
            self._warned_of_nothing = warn_of_nothing(self._asked(), shapes)
        return self._configuration()

    def _asked(self) -> Router:
        """The router of the codecs that the user has asked for."""
        return self._router

    def _configuration(self) -> dict[str, Any]:
        self._check_restored()
        tensors = {
            # Not by labels: Keras numbers layers by how many a rank has made before.
            f"gradient.{s.index}": f"{s.kind} by {s.route}, {s.compared}, exchange {int(s.exchanges)}"
            for s in self.slots
        }
        return {
            "format version": FORMAT_VERSION,
            "ranks": self._size,
            "seed": self._seed,
            "warmup_steps": self._warmup_steps,
            "calls of reset": self._resets,
            "gradient of": tensors,
        }
