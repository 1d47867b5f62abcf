"""The common base of the frontends' ``Auto``, which time steps and follow a planner's decisions."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch

from hvd_compress.engine.compressor import CompressorBase
from hvd_compress.engine.executors import device_of
from hvd_compress.engine.slots import Slot
from hvd_compress.engine.state_checks import expect_state
from hvd_compress.exchanges.comm import Collective
from hvd_compress.exchanges.routing import UNCOMPRESSED_ROUTE, CodecLike, Route
from hvd_compress.planner import explain
from hvd_compress.planner.choices import tensor_of
from hvd_compress.planner.planner import Planner, check_state
from hvd_compress.planner.plans import PlannedTensor, RoutePlan
from hvd_compress.planner.probing import Prober


class Planning(CompressorBase, ABC):
    """The base of a frontend's ``Auto``, listed before the frontend's ``Compressor``.

    In the first steps, a few short messages and encodings are timed, the cost of every plan is predicted,
    and the best plans are tried for a few steps each, no compression always among them
    (:mod:`hvd_compress.planner`). The fastest plan stays, until the network changes. All ranks decide the
    same. A change of plan loses nothing: what an earlier codec has not sent is added to the next gradient.

    The frontend calls :meth:`_plan` when it has joined the ranks and knows its tensors, and
    :meth:`_step_ended` at a place that all ranks reach while no gradient is being exchanged.

    Args:
        codecs: the encodings to choose from, besides none: codecs, :class:`~hvd_compress.Route` objects or
            names of codecs.
        exchanges: the exchanges to choose from; those that cannot be used here are left out.
        options: those of the frontend's ``Compressor``, except for ``chosen``. Nothing is measured in the
            ``warmup_steps``, in which gradients travel uncompressed.

    Attributes:
        chosen: the arguments of the compressor that the planner chooses, and that ``Auto`` does not take.
    """

    chosen: ClassVar[tuple[str, ...]] = ("feedback", "exchange", "layers", "owner_step")

    _planner: Planner | None = None
    """None until the frontend knows its tensors."""
    _saved_plan: dict[str, Any] | None = None
    """The state of an earlier planner, from which the next one goes on."""
    _allowed: Sequence[str] = ()

    @abstractmethod
    def _ways(self) -> tuple[Sequence[Route], int]:
        """The usable routes, and the number of ranks on each host; the same on every rank."""

    @abstractmethod
    def _wait_for(self, collective: Collective, name: str) -> torch.Tensor:
        """Waits for a collective of all ranks to end, and returns its result."""

    @property
    def settled(self) -> bool:
        """Whether the plan has been chosen, or there is nothing to choose; the same on every rank."""
        self._bind()
        return self._planner is not None and self._planner.settled

    def explain(self) -> str:
        """Explains the choice of the gradients' routes.

        The text lists the measurements, the predicted and the measured cost of every plan, and the route of
        each tensor. It is the same on every rank, and is not meant to be parsed.
        """
        self._bind()
        if self._planner is None:
            return "nothing is planned yet: the tensors are not known before the first exchange"
        return explain.explain(self._planner)

    def set_codec(self, codec: CodecLike, layers: str = "*") -> None:
        """Raises ``ValueError``, because the planner chooses codecs."""
        raise ValueError(
            "set_codec: expected a compressor with a codec of its own, got Auto, which chooses among "
            "codecs=(...)"
        )

    def state_dict(self) -> dict[str, Any]:
        """The same as :meth:`Compressor.state_dict`, with the state of the planner."""
        return {**super().state_dict(), "planner": self._plan_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The same as :meth:`Compressor.load_state_dict`; a plan that was already chosen stays in use.

        The state may be that of a compressor without a planner; then everything is measured again.
        """
        self._begin_loading("load_state_dict")
        expect_state("load_state_dict", state)
        planner = state.get("planner")
        if planner is not None:
            check_state("load_state_dict", planner)
        super().load_state_dict(state)
        self._saved_plan = planner
        self._plan()

    def load_resized(self, states: Any) -> None:
        """The same as :meth:`Compressor.load_resized`; then plans anew for the new number of ranks."""
        super().load_resized(states)
        self._saved_plan = None
        self._plan()

    def _plan_state(self) -> dict[str, Any] | None:
        return self._saved_plan if self._planner is None else self._planner.state()

    def _configuration(self, slots: Iterable[Slot] | None = None) -> dict[str, Any]:
        return {**super()._configuration(slots), **self._position()}

    def _position(self) -> dict[str, Any]:
        """The configuration on which the planner's own collectives depend."""
        at = "no tensors yet"
        if self._planner is not None:
            state = "decided" if self._planner.settled else "not decided yet"
            at = f"step {self._planner.step}, {state}"
        return {"allowed": list(self._allowed), "planner": at}

    def _is_first(self) -> bool:
        """Whether this is the first of the ranks that plan together, which logs the plan."""
        return self._ranks.group.rank == 0

    def _slowest(self, table: torch.Tensor) -> torch.Tensor:
        """The sums of the ranks that exchange, or the largest ones if several groups plan together."""
        return table

    def _tensor_of(self, slot: Slot, routes: Sequence[Route]) -> PlannedTensor:
        return tensor_of(
            slot.name,
            slot.shape,
            slot.dtype,
            slot.parameter.element_size(),
            routes=routes,
            router=self._routes.router,
            check=lambda route: self._routes.check(slot, route),
        )

    def _plan(self) -> None:
        """Begins to plan for the present tensors, or goes on with the plan of a saved state."""
        routes, local = self._ways()
        trained = self._routes.trained
        self._tensors = [self._tensor_of(_largest(slot), routes) for slot in trained]
        own = (self._tensor_of(slot, routes) for slot in trained)
        self._own_choices = {tensor.name: tensor.choices for tensor in own}
        self._allowed = [str(route) for route in routes]
        self._warm = 0
        device = device_of(slot.parameter for slot in self._slots)
        self._wait_for_device = _synchronizing(device)
        counts = [tensor.count for tensor in self._tensors if len(tensor.choices) > 1]

        def array(count: int, dtype: str) -> torch.Tensor:
            if dtype == "uint8":
                return torch.zeros(count, dtype=torch.uint8, device=device)
            # PyTorch's generator is left to the training.
            numbers = np.random.default_rng(0).standard_normal(count, np.float32)
            return torch.from_numpy(numbers).to(device, getattr(torch, dtype))

        def total(numbers: list[float], name: str) -> list[float]:
            table = torch.tensor(numbers, dtype=torch.float64, device=device)
            return self._slowest(self._run("all_reduce", table, name)).tolist()

        group = self._ranks.group
        self._planner = Planner(
            self._tensors,
            rank=group.rank,
            size=group.size,
            local=local,
            sum_over_ranks=total,
            prober=Prober(
                group.size,
                max(counts, default=1),
                array=array,
                kernels=self._kernels,
                collective=self._run,
                wait=self._wait_for_device,
            ),
        )
        if self._saved_plan is not None:
            self._planner.restore(self._saved_plan)
            self._saved_plan = None
        self._mark: float | None = None
        self._apply(self._planner.plan)
        coded = next((route for route in routes if not route.uncompressed), UNCOMPRESSED_ROUTE)
        self._routes.expect_encoding(self._routes.router.with_route(coded))

    def _run(self, kind: str, message: torch.Tensor, name: str) -> torch.Tensor:
        comm, size = self._batches.comm, self._ranks.group.size
        if kind == "all_to_all":
            collective = comm.all_to_all(message, [len(message) // size] * size)
        else:
            collective = getattr(comm, kind)(message)
        collective.count(self.counters)
        return self._wait_for(collective, name)

    def _apply(self, plan: RoutePlan) -> None:
        """Gives each tensor its route; a part that is too small for a route goes uncompressed."""
        plans = zip(self._tensors, plan, strict=True)
        taken = {
            tensor.name: route if route in self._own_choices[tensor.name] else UNCOMPRESSED_ROUTE
            for tensor, route in plans
        }
        self._routes.set((slot, taken[slot.name]) for slot in self._slots if slot.name in taken)

    @torch.no_grad()
    def _step_ended(self) -> None:
        planner = self._planner
        assert planner is not None
        if self._warm < self._warmup_steps:
            self._warm += 1
            return
        undecided = not planner.settled
        if undecided and self._wait_for_device is not None:
            self._wait_for_device()  # The host runs ahead; without this, it times nothing.
        seconds = None if self._mark is None else time.perf_counter() - self._mark
        if planner.end_step(seconds):
            self._apply(planner.plan)
        if undecided and planner.settled and self._is_first():
            logging.getLogger(type(self).__module__).info("%s", self.explain())
        self._mark = time.perf_counter()


def _largest(slot: Slot) -> Slot:
    """A slot with the largest shape of this tensor on any rank that the planner decides for."""
    return Slot(slot.name, slot.index, slot.parameter.new_empty(()).expand(slot.largest))


def _synchronizing(device: torch.device) -> Callable[[], None] | None:
    """A function that waits for a device; None for the CPU, which computes at once."""
    if device.type == "cpu":
        return None
    return partial(torch.get_device_module(device).synchronize, device)
