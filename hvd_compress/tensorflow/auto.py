"""The compressor that measures and decides by itself, before TensorFlow traces anything."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.tensorflow.mpi_ops import _basics

from hvd_compress.codecs import NoCompression
from hvd_compress.codecs.calls import guard
from hvd_compress.exchanges.routing import (
    UNCOMPRESSED_ROUTE,
    CodecLike,
    Route,
    Router,
)
from hvd_compress.kernels.batch import Entry
from hvd_compress.kernels.cpu_batch import CpuBatch
from hvd_compress.planner.choices import DEFAULT_CODECS, allowed, tensor_of
from hvd_compress.planner.explain import explain
from hvd_compress.planner.planner import Planner
from hvd_compress.planner.plans import PlannedTensor
from hvd_compress.planner.probing import Prober
from hvd_compress.ranks.counters import Counters
from hvd_compress.ranks.errors import ExchangeError
from hvd_compress.tensorflow.collectives import GraphCollectives
from hvd_compress.tensorflow.compressor import Compressor
from hvd_compress.tensorflow.exchanges import registry
from hvd_compress.tensorflow.placement import HOST
from hvd_compress.tensorflow.slots import GraphSlot

_log = logging.getLogger(__name__)

_Kind = tuple[tuple[int, ...], str]
"""A gradient's shape and dtype. Gradients that have both in common travel in the same way."""


@guard
class Auto(Compressor):
    """Measures network and codecs, and sends each gradient in the way that is predicted to be fastest.

    A few short messages and encodings are timed once, before anything is traced. The cost of every plan is
    predicted from these times and the gradients' shapes (:mod:`hvd_compress.planner`). All ranks decide the
    same. Where no codec is predicted to pay, all gradients travel uncompressed.

    If the ranks pass variables, all of them make this compressor at the same time, since it measures then.
    The optimizer of :mod:`hvd_compress.keras` passes its gradients itself, in its first update. A
    checkpoint keeps the plan.

    Gradients on a GPU are encoded on the host.

    Args:
        variables: the tape's sources, as ``model.trainable_variables``; None leaves it to :meth:`plan`.
        codecs: the encodings to choose from, besides none: codecs, :class:`~hvd_compress.Route` objects or
            names of codecs.
        exchanges: the exchanges to choose from.
        options: ``threshold``, ``exclude``, ``warmup_steps``, ``seed``, ``process_set``, ``threads`` and
            ``name``, as for :class:`Compressor`.

    Raises:
        TypeError, ValueError: an argument is wrong, "expected X, got Y".
        ExchangeError: ``hvd.init()`` was not called; or any reason for which :meth:`plan` raises it.
    """

    chosen: ClassVar[tuple[str, ...]] = ("feedback", "exchange", "layers", "owner_step", "device")

    def __init__(
        self,
        variables: Sequence[Any] | None = None,
        *,
        codecs: Sequence[CodecLike] = DEFAULT_CODECS,
        exchanges: Sequence[str] = registry.NAMES,
        **options: Any,
    ) -> None:
        for given in codecs if isinstance(codecs, Sequence) else ():
            registry.check_inner(given, "Auto.codecs")
        routes = allowed(codecs, exchanges, registry.check_planned)
        # On the host, where the codecs are measured.
        super().__init__(NoCompression(), device=HOST, **options)
        self._allowed = tuple(routes)
        ranks = self._collectives
        # A process set's ranks may be anywhere, so each counts as a host of its own.
        equal = ranks.size == hvd.size() and bool(_basics.is_homogeneous())
        self._local = hvd.local_size() if equal else 1
        self._tracing.set_exchanges(
            dict.fromkeys(route.exchange for route in routes if not route.uncompressed)
        )
        self.owner = self._make_owner(exchange="auto")
        self._probes = _Probes(ranks)
        self._why = "nothing is known yet: the gradients are not"
        self._plan: Mapping[_Kind, Route] | None = None
        if ranks.size == 1 or not ranks.included:
            self._decide([])
        if variables is not None:
            self.plan(variables)

    @property
    def settled(self) -> bool:
        """Whether a plan has been decided on, or there is nothing to decide; the same on every rank."""
        return self._plan is not None

    def explain(self) -> str:
        """The reasons why gradients travel as they do.

        They are the measurements and the predicted cost of every plan. The text is the same on every rank,
        but is not meant to be parsed.
        """
        return self._why

    def plan(self, variables: Sequence[Any], labels: Sequence[str] = ()) -> None:
        """Measures, and decides how gradients travel. Does nothing where that has been decided.

        Waits for all ranks, which have to call this method at the same time.

        Args:
            variables: the tape's sources, or the gradients: all that have a shape and a dtype.
            labels: the gradients' names in patterns and messages; empty for those of their positions.

        Raises:
            ExchangeError: a rank has other gradients or settings, or does not plan; raised on every rank.
        """
        if self._plan is not None:
            return
        with tf.init_scope():  # Keras plans while it traces.
            labels = labels or [f"gradient.{i}" for i in range(len(variables))]
            tensors = [self._tensor(*named) for named in zip(labels, variables, strict=True)]
            self._agree(tensors)
            self._decide(tensors)
        if self._collectives.rank == 0:
            _log.info("%s", self._why)

    def _decide(self, tensors: Sequence[PlannedTensor]) -> None:
        ranks = self._collectives
        counts = [tensor.count for tensor in tensors if len(tensor.choices) > 1]
        planner = Planner(
            tensors,
            rank=ranks.rank,
            size=ranks.size,
            local=self._local,
            sum_over_ranks=lambda numbers, name: self._probes.run(
                "all_reduce", np.array(numbers, np.float64), name
            ).tolist(),
            prober=Prober(
                ranks.size,
                counts,
                array=_array,
                batch=lambda *tensor: CpuBatch([Entry(*tensor)], self._coder.threads),
                collective=self._probes.run,
            ),
        )
        routes = planner.predict()
        plan: dict[_Kind, Route] = {}
        for tensor, route in zip(tensors, routes, strict=True):
            if len(tensor.choices) > 1:
                plan.setdefault((tensor.shape, tensor.dtype), route)
        # Not a dictionary, which TensorFlow would take for a part of checkpoints.
        self._plan = MappingProxyType(plan)
        self._why = explain(planner)

    def _make_slot(self, position: int, label: str, gradient: tf.Tensor) -> GraphSlot:
        if self._plan is None:
            raise ExchangeError(
                "expected Auto to know the gradients before the first one is traced, got none: pass the "
                "tape's sources, Auto(model.trainable_variables)"
            )
        shape, dtype = gradient.shape, gradient.dtype
        route = UNCOMPRESSED_ROUTE
        if shape.is_fully_defined():
            route = self._plan.get((tuple(shape.as_list()), dtype.name), UNCOMPRESSED_ROUTE)
        if not route.uncompressed:  # It may be excluded by its name.
            router = self._router.with_route(route)
            route = router.choose(label, tuple(shape.as_list()), dtype.name)
        return GraphSlot(position, dtype, shape, route, label=label)

    def _tensor(self, label: str, variable: Any) -> PlannedTensor:
        """A gradient with the routes that are open to it."""
        dtype, shape = tf.as_dtype(variable.dtype), tf.TensorShape(variable.shape)
        if not shape.is_fully_defined():
            return PlannedTensor(label, (), dtype.size, dtype=dtype.name)

        def check(route: Route) -> None:
            group = self._tracing.exchanges[route.exchange].group
            route.check(label, tuple(shape.as_list()), dtype.size, group)

        return tensor_of(
            label,
            tuple(shape.as_list()),
            dtype.name,
            dtype.size,
            routes=self._allowed,
            router=self._router,
            check=check,
        )

    def _agree(self, tensors: Sequence[PlannedTensor]) -> None:
        described = {one.name: f"{one.dtype} {list(one.shape)}" for one in tensors}
        settings = {**self._configuration(), "variables": described}
        self._collectives.compare_now(settings, "plan", "make Auto, or to plan,")

    def _counted(self) -> Counters:
        counters = super()._counted()
        counters.add(self._probes.counters)
        return counters

    def _asked(self) -> Router:
        coded = (route for route in self._allowed if not route.uncompressed)
        return self._router.with_route(next(coded, UNCOMPRESSED_ROUTE))

    def _configuration(self) -> dict[str, Any]:
        return {**super()._configuration(), "allowed": [str(route) for route in self._allowed]}

    def _describe(self) -> dict[str, Any]:
        plan = None
        if self._plan is not None:
            plan = [
                {"shape": shape, "dtype": dtype, "route": str(route)}
                for (shape, dtype), route in self._plan.items()
            ]
        owners = [self.owners_of(slot) for slot in self.slots]
        return {**super()._describe(), "owners": owners, "plan": plan}

    def _restored(self, saved: dict[str, Any]) -> None:
        super()._restored(saved)
        if saved["plan"] is None:
            return
        known = {str(route): route for route in (UNCOMPRESSED_ROUTE, *self._allowed)}
        others = {one["route"] for one in saved["plan"]} - known.keys()
        if others:
            raise ValueError(
                f"restore: expected a plan of routes that are allowed now, got {sorted(others)}; another "
                f"plan needs the checkpoints of all ranks: load_resized()"
            )
        plan = {(tuple(one["shape"]), one["dtype"]): known[one["route"]] for one in saved["plan"]}
        if self.slots and plan != self._plan:
            raise ValueError(
                "restore: expected the plan by which gradients have been traced already, got another: "
                "restore before the first step"
            )
        self._plan = MappingProxyType(plan)
        self._why = "goes on with the plan of a checkpoint"


class _Probes:
    """The collectives of the planner, outside of any graph.

    Args:
        ranks: the collectives among the ranks.

    Attributes:
        counters: counts of their traffic.
    """

    def __init__(self, ranks: GraphCollectives) -> None:
        self._ranks = ranks
        self.counters = Counters()

    def run(self, kind: str, message: np.ndarray, name: str) -> np.ndarray:
        """Runs one collective and returns what this rank receives."""
        ranks, size = self._ranks, self._ranks.size
        with tf.device("cpu"):
            values = tf.constant(message)
        if kind == "all_gather":
            self.counters.add_allgather(size, message.nbytes)
            return ranks.all_gather(values, name).numpy()
        if kind == "all_to_all":
            self.counters.add_alltoall(message.nbytes, message.nbytes // size)
            return ranks.all_to_all(values, [len(message) // size] * size, name).numpy()
        self.counters.add_allreduce(size, message.nbytes)
        return ranks.all_reduce(values, name).numpy()


def _array(count: int, dtype: str) -> np.ndarray:
    if dtype == "uint8":
        return np.zeros(count, np.uint8)
    return np.random.default_rng(0).standard_normal(count, np.float32).astype(dtype)
