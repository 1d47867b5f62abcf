"""The routes that a planner chooses while a job trains."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from hvd_compress.codecs import Codec, ErrorFeedback
from hvd_compress.codecs.base import Shape
from hvd_compress.engine.executors import Executors, device_of
from hvd_compress.engine.parameters import Slot
from hvd_compress.engine.ranks import Ranks
from hvd_compress.engine.routes import Routes
from hvd_compress.exchanges.routing import UNCOMPRESSED_ROUTE, Route
from hvd_compress.kernels.batch import Batch, Entry
from hvd_compress.planner import explain
from hvd_compress.planner.choices import tensor_of
from hvd_compress.planner.planner import Planner
from hvd_compress.planner.plans import PlannedTensor, RoutePlan
from hvd_compress.planner.probing import Prober
from hvd_compress.ranks.counters import Counters


class PlannedRoutes:
    """Measures for a planner, and follows its decisions; made when the ranks and the tensors are known.

    Args:
        slots: the tensors.
        ranks: the ranks.
        routes: the routes, which :meth:`apply` sets.
        kernels: the kernels that are timed.
        choices: the routes that the user allows.
        counters: a function that returns the counters of the measurements' traffic.

    Attributes:
        planner: the planner.
        allowed: the choices that can be used here.
        tensors: the tensors that it decides for, in the largest shape on any rank.
        own_choices: the routes that this rank's part of each tensor can take, by name.
        wait_for_device: waits for the tensors' device; None for the CPU, which computes at once.
    """

    def __init__(
        self,
        slots: Iterable[Slot],
        ranks: Ranks,
        routes: Routes,
        kernels: Executors,
        choices: Sequence[Route],
        counters: Callable[[], Counters],
    ) -> None:
        self._slots, self._ranks, self._routes, self._counters = slots, ranks, routes, counters
        self._kernels = kernels
        self._cold = routes.warmup_steps  # The steps in which nothing is measured.
        self._mark: float | None = None
        usable, local = ranks.usable(choices)
        self.allowed = usable
        self.tensors = [self._tensor_of(_largest(slot)) for slot in routes.trained]
        own = (self._tensor_of(slot) for slot in routes.trained)
        self.own_choices = {tensor.name: tensor.choices for tensor in own}
        self._device = device_of(slot.parameter for slot in slots)
        self.wait_for_device = _synchronizing(self._device)
        counts = [tensor.count for tensor in self.tensors if len(tensor.choices) > 1]
        size = ranks.group.size
        self.planner = Planner(
            self.tensors,
            rank=ranks.group.rank,
            size=size,
            local=local,
            sum_over_ranks=self._total,
            prober=Prober(
                size,
                counts,
                array=self._array,
                batch=self._batch,
                collective=self._run,
                wait=self.wait_for_device,
            ),
        )

    def begin(self) -> None:
        """Follows the planner's first plan, or that of a saved state."""
        self.apply(self.planner.plan)
        coded = next((one for one in self.allowed if not one.uncompressed), UNCOMPRESSED_ROUTE)
        self._routes.expect_encoding(self._routes.router.with_route(coded))

    def apply(self, plan: RoutePlan) -> None:
        """Gives each tensor its route; a part that is too small for a route goes uncompressed."""
        plans = zip(self.tensors, plan, strict=True)
        taken = {
            tensor.name: route if route in self.own_choices[tensor.name] else UNCOMPRESSED_ROUTE
            for tensor, route in plans
        }
        self._routes.set((slot, taken[slot.name]) for slot in self._slots if slot.name in taken)

    @torch.no_grad()
    def end_step(self, logger: logging.Logger) -> None:
        """Times the step that has ended, and changes the plan if the planner does; every rank calls it.

        Args:
            logger: receives the explanation of the plan that stays.
        """
        planner = self.planner
        if self._cold:
            self._cold -= 1
            return
        undecided = not planner.settled
        if undecided and self.wait_for_device is not None:
            self.wait_for_device()  # The host runs ahead; without this, it times nothing.
        seconds = None if self._mark is None else time.perf_counter() - self._mark
        if planner.end_step(seconds):
            self.apply(planner.plan)
        if undecided and planner.settled and self._ranks.first:
            logger.info("%s", explain.explain(planner))
        self._mark = time.perf_counter()

    def skip_step(self) -> None:
        """Ignores the step that has ended, and the time until the end of the next one."""
        self._mark = None

    def _tensor_of(self, slot: Slot) -> PlannedTensor:
        return tensor_of(
            slot.name,
            slot.shape,
            slot.dtype,
            slot.parameter.element_size(),
            routes=self.allowed,
            router=self._routes.router,
            check=lambda route: self._routes.check(slot, route),
        )

    def _array(self, count: int, dtype: str) -> torch.Tensor:
        if dtype == "uint8":
            return torch.zeros(count, dtype=torch.uint8, device=self._device)
        # PyTorch's generator is left to the training.
        numbers = np.random.default_rng(0).standard_normal(count, np.float32)
        return torch.from_numpy(numbers).to(self._device, getattr(torch, dtype))

    def _batch(self, codec: Codec, shape: Shape, feedback: ErrorFeedback) -> Batch:
        like = torch.empty(0, dtype=torch.float32, device=self._device)
        return self._kernels.batch([Entry(codec, shape, feedback)], None, like)

    def _total(self, numbers: list[float], name: str) -> list[float]:
        table = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        return self._ranks.slowest(self._run("all_reduce", table, name)).tolist()

    def _run(self, kind: str, message: torch.Tensor, name: str) -> torch.Tensor:
        comm, size = self._routes.batches.comm, self._ranks.group.size
        if kind == "all_to_all":
            collective = comm.all_to_all(message, [len(message) // size] * size)
        else:
            collective = getattr(comm, kind)(message)
        collective.count(self._counters())
        return self._ranks.result_of(collective, name)


def position_of(planned: PlannedRoutes | None) -> dict[str, Any]:
    """The configuration on which a planner's own collectives depend; there may be no planner yet."""
    if planned is None:
        return {"allowed": [], "planner": "no tensors yet"}
    state = "decided" if planned.planner.settled else "not decided yet"
    allowed = [str(route) for route in planned.allowed]
    return {"allowed": allowed, "planner": f"step {planned.planner.step}, {state}"}


def state_of(planned: PlannedRoutes | None, saved: dict[str, Any] | None) -> dict[str, Any] | None:
    """The state of a planner; as long as there is none, that of an earlier one, from which it goes on."""
    return saved if planned is None else planned.planner.state()


def _largest(slot: Slot) -> Slot:
    """A slot with the largest shape of this tensor on any rank that the planner decides for."""
    return Slot(slot.name, slot.index, slot.parameter.new_empty(()).expand(slot.largest))


def _synchronizing(device: torch.device) -> Callable[[], None] | None:
    """A function that waits for a device; None for the CPU, which computes at once."""
    if device.type == "cpu":
        return None
    return partial(torch.get_device_module(device).synchronize, device)
