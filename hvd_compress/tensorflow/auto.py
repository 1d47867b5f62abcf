"""The compressor that measures, and decides by itself, in TensorFlow's graphs."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.tensorflow.mpi_ops import _basics

from hvd_compress.codecs import Codec, ErrorFeedback, NoCompression
from hvd_compress.codecs.base import check_number
from hvd_compress.codecs.registry import OFF
from hvd_compress.exchange import hosts
from hvd_compress.exchange.counters import Counters
from hvd_compress.exchange.hosts import Hosts
from hvd_compress.exchange.routing import DEFAULT_THRESHOLD, DENSE, ENCODABLE, EXCHANGES
from hvd_compress.planner import saved
from hvd_compress.planner.choices import (
    DEFAULT_CODECS,
    allowed,
    codings_of,
    nothing_to_choose,
    tensor_of,
)
from hvd_compress.planner.explain import explain
from hvd_compress.planner.planner import Need, Planner
from hvd_compress.planner.plans import Plan, Tensor
from hvd_compress.planner.reporting import Reporter
from hvd_compress.tensorflow.compressor import Compressor, make_exchange
from hvd_compress.tensorflow.exchanges.base import Exchange
from hvd_compress.tensorflow.graphs import Beginning
from hvd_compress.tensorflow.placement import HOST
from hvd_compress.tensorflow.probing import TensorProber
from hvd_compress.tensorflow.slots import PlannedSlot, Slot
from hvd_compress.tensorflow.state import PlanOwner
from hvd_compress.tensorflow.ways import Underway, Ways

_log = logging.getLogger(__name__)


class Auto(Compressor):
    """Measures the network and the codecs, and sends each gradient in the way that makes steps shortest.

    In the first steps, short messages and encodings are timed, every plan's cost is predicted, and the
    best ones are tried for a few steps each, Horovod's plain allreduce always among them
    (:mod:`hvd_compress.planner`). What was fastest stays, until the network or the time of a step changes.
    All ranks decide the same. Where nothing pays, all gradients go uncompressed.

    Every way that a gradient may take is a branch of the graph, so that a change of plan traces nothing
    anew. It loses no gradient: what an earlier codec has not sent is added to the next one.

    Gradients of a GPU are encoded on the host.

    Args:
        codecs: what gradients may be encoded with, besides going as they are: names of schemes, which have
            their papers' error feedback, codecs, or pairs of a codec and its :class:`ErrorFeedback`.
        exchanges: how payloads may travel; those that cannot be used here are left out.
        threshold: gradients with fewer elements are left to Horovod, which fuses them.
        exclude: patterns (``fnmatch``) of gradients to leave to Horovod, as for :class:`Compressor`.
        warmup_steps: steps at the start that go uncompressed; nothing is measured in them.
        seed: of the stochastic codecs' noise, the same on every rank.
        process_set: as the tape's or optimizer's; None is all ranks.
        threads: kernel threads; None is TensorFlow's number for one operation.
        name: what this compressor's collectives are called by, as for :class:`Compressor`.

    Raises:
        TypeError, ValueError: an argument is wrong, "expected X, got Y".
        ExchangeError: ``hvd.init()`` was not called.
    """

    def __init__(
        self,
        *,
        codecs: Sequence[str | Codec | tuple[Codec, ErrorFeedback]] = DEFAULT_CODECS,
        exchanges: Sequence[str] = EXCHANGES,
        threshold: int = DEFAULT_THRESHOLD,
        exclude: Sequence[str] = (),
        warmup_steps: int = 0,
        seed: int = 0,
        process_set: Any | None = None,
        threads: int | None = None,
        name: str | None = None,
    ) -> None:
        routes = allowed(codecs, exchanges)
        check_number("Auto", "warmup_steps", warmup_steps, 0, 2**62, integer=True)
        super().__init__(
            NoCompression(),
            OFF,
            threshold=threshold,
            exclude=exclude,
            seed=seed,
            process_set=process_set,
            threads=threads,
            name=name,
            device=HOST,  # What changes from way to way has no kernels elsewhere.
        )
        self._allowed = tuple(routes)
        self._cold_steps = warmup_steps
        ranks = self._collectives
        everywhere = ranks.size == hvd.size()
        # A process set's ranks may be anywhere, so each counts as a host of its own.
        equal = everywhere and bool(_basics.is_homogeneous())
        self._local = hvd.local_size() if equal else 1
        hierarchy = everywhere and hosts.usable(ranks.size, hvd.local_size(), equal)
        wanted = dict.fromkeys(route.exchange for route in routes if not route.dense)
        self._ways = Ways(
            self._ops,
            self._ledger,
            ranks,
            self._coder,
            {
                exchange: make_exchange(exchange, ranks, self._coder)
                for exchange in wanted
                if exchange != "hierarchical" or hierarchy
            },
            Hosts(ranks.size, self._local),
        )
        self.owner = PlanOwner(
            ranks.rank, ranks.size, seed, self._local, self._plan_to_save, self._restored
        )
        self._planner: Planner | None = None
        self._reporter: Reporter | None = None
        self._saved = ""
        self._steps_before = 0
        self._cold = False
        self._beside = Counters()

    @property
    def settled(self) -> bool:
        """Whether a plan has been decided on, or there is nothing to decide; the same on every rank."""
        if self._size == 1:
            return True
        return self._planner is not None and (not self._planning or self._planner.settled)

    def explain(self) -> str:
        """Why gradients travel as they do.

        What was measured, the predicted and the measured cost of every plan, and of every choice for each
        gradient; the same on every rank, but not to be parsed.
        """
        if self._planner is None and self._size > 1:
            return "nothing is known yet: gradients are known from the first step on"
        if not self._planning:
            return nothing_to_choose(self._size)
        assert self._planner is not None
        self._count_steps()
        return explain(self._planner)

    @tf.autograph.experimental.do_not_convert
    def decompress(self, tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """See :meth:`Compressor.decompress`."""
        if isinstance(ctx, Underway):
            return self._ways.receive(tensor, ctx)
        return super().decompress(tensor, ctx)

    def load_resized(self, checkpoints: Sequence[str], name: str = "compressor") -> None:
        """As :meth:`Compressor.load_resized`; another number of ranks needs another plan."""
        super().load_resized(checkpoints, name)
        self._planner, self._saved = None, ""

    @property
    def _planning(self) -> bool:
        return self._reporter is not None

    def _make_slot(self, position: int, gradient: tf.Tensor) -> Slot:
        label, dtype, shape = f"gradient.{position}", gradient.dtype, gradient.shape
        tensor = Tensor(label, (), dtype.size)
        if shape.is_fully_defined():
            # What the others can do is known when there is a slot.
            slot = PlannedSlot(position, dtype, shape, tensor)
            tensor = tensor_of(
                label,
                tuple(shape.as_list()),
                dtype.name,
                dtype.size,
                routes=self._allowed,
                router=self._router,
                check=lambda route: self._ways.check(slot, route),
            )
        return PlannedSlot(position, dtype, shape, tensor)

    def _start(
        self, slot: Slot, gradient: tf.Tensor, beginning: Beginning
    ) -> tuple[tf.Tensor, Any]:
        assert isinstance(slot, PlannedSlot)
        if len(slot.tensor.choices) > 1:
            return self._ways.send(slot, gradient, beginning)
        if gradient.dtype.name in ENCODABLE:  # A checkpoint may have brought a residual.
            gradient = self._ways.release(slot, DENSE, gradient, beginning.everybody)
        return self._start_dense(slot, gradient, beginning)

    def _begin(self, graph: int) -> Beginning:
        beginning = super()._begin(graph)
        with tf.control_dependencies([beginning.begun]):  # The first plan may have just been made.
            beginning.ways = self._ways.chosen.read_value()
        if self._takes_part():
            wanted = self._ops.hvdc_step_end(beginning.everybody, self._ledger)
            tf.cond(
                wanted,
                lambda: tf.numpy_function(self._end_step, [], tf.bool),
                lambda: tf.constant(False),
            )
        return beginning

    def _exchanges_in_use(self) -> Sequence[Exchange]:
        return self._ways.exchanges

    def _counted(self) -> Counters:
        counters = super()._counted()
        for name, more in vars(self._beside).items():
            setattr(counters, name, getattr(counters, name) + more)
        return counters

    def _configuration(self) -> dict[str, Any]:
        self._make_planner()
        return {
            **super()._configuration(),
            "warmup_steps": self._cold_steps,
            "allowed": [str(route) for route in self._allowed],
        }

    def _make_planner(self) -> None:
        """Begins to plan for the gradients that have been traced; the same on every rank."""
        tensors = [slot.tensor for slot in self.slots if isinstance(slot, PlannedSlot)]
        if not tensors or (self._planner is not None and self._planner.tensors == tuple(tensors)):
            return
        ranks = self._collectives
        self._planner = Planner(tensors, ranks.size // self._local, self._local)
        codings = codings_of(tensors)
        self._reporter = None
        if codings and ranks.size > 1:
            largest = max(tensor.count for tensor in tensors if len(tensor.choices) > 1)
            self._reporter = Reporter(
                ranks.rank, ranks.size, codings, self._add, lambda: self._prober(largest)
            )
        if self._saved and self._planning:
            saved.restore(self._planner, json.loads(self._saved))
        cold = self._cold_steps - self._steps_before
        self._cold = self._planning and cold > 0
        self._apply((DENSE,) * len(tensors) if self._cold else self._planner.plan)
        steps = cold if self._cold else self._planner.idle() + 1
        self._schedule(steps if self._planning else -1, anew=True)

    def _end_step(self) -> np.bool_:
        """At a place that all ranks come to, with no gradient on its way; may wait for the others."""
        assert self._planner is not None and self._reporter is not None
        planner = self._planner
        if self._cold:
            self._cold = False
            self._apply(planner.plan)
            self._schedule(planner.idle() + 1, anew=True)
            return np.bool_(True)
        self._count_steps(-1)
        seconds, windows, _ = self._pace()
        for pair in zip(seconds, windows, strict=True):
            self._reporter.step(*pair)
        need = planner.need()
        report = None if need is Need.NOTHING else self._reporter.report(need)
        if report is None:
            planner.postpone()
        else:
            settled = planner.settled
            planner.take(report)
            if planner.settled and not settled and self._collectives.rank == 0:
                _log.info("%s", explain(planner))
            if planner.plan != tuple(slot.route for slot in self.slots):
                self._apply(planner.plan)
        self._schedule(planner.idle() + 1)
        return np.bool_(True)

    def _apply(self, plan: Plan) -> None:
        ways = []
        for slot, route in zip(self.slots, plan, strict=True):
            assert isinstance(slot, PlannedSlot)
            slot.route = route
            ways.append(slot.tensor.choices.index(route))
        self._ways.chosen.assign(np.array(ways, np.int32))
        self._step.forget_agreement()

    def _schedule(self, steps: int, anew: bool = False) -> None:
        self._ops.hvdc_schedule(self._ledger, tf.constant(steps, tf.int64), tf.constant(anew))

    def _pace(self) -> tuple[list[float], list[float], int]:
        seconds, windows, steps = self._ops.hvdc_pace(self._ledger)
        return seconds.numpy().tolist(), windows.numpy().tolist(), int(steps)

    def _count_steps(self, more: int = 0) -> int:
        """Tells the planner of steps in which it was not asked; how many there are by now."""
        assert self._planner is not None
        steps = self._pace()[2]
        if not self._cold:
            self._planner.skip(steps + more - self._planner.step)
        return steps

    def _prober(self, largest: int) -> TensorProber:
        return TensorProber(self._collectives, self._coder.threads, largest, lambda: self._beside)

    def _add(self, numbers: Sequence[float], what: str) -> list[float]:
        table = np.array(numbers, np.float64)
        self._beside.add_allreduce(self._size, table.nbytes)
        total: list[float] = self._collectives.sum(tf.constant(table), what).numpy().tolist()
        return total

    def _plan_to_save(self) -> dict[str, Any]:
        planner = None if self._planner is None else saved.state_of(self._planner)
        return {"steps": self._steps_before + self._counted().steps, "planner": planner}

    def _restored(self, plan: Mapping[str, Any]) -> None:
        self._steps_before = plan["steps"] - self._counted().steps
        # As text: TensorFlow would take a dictionary for a part of later checkpoints.
        self._saved = json.dumps(plan["planner"]) if plan["planner"] else ""
        self._planner = None
        self._step.forget_agreement()
        self._make_planner()
