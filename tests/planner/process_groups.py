"""``Auto`` among several ranks: the same properties for every frontend of PyTorch."""

from __future__ import annotations

import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from hvd_compress import Route
from hvd_compress.codecs import ErrorFeedback, Int8
from hvd_compress.exchanges.routing import UNCOMPRESSED_ROUTE
from tests.planner.budgets import MOST_STEPS, unlimited
from tests.torch_models import DEVICE, Shapes, assert_same_bits, targets

EXACT = ("onebit", Route(Int8("linear"), ErrorFeedback()))
"""Codecs with full error feedback: what they do not send now they send later."""

Tensors = dict[str, torch.Tensor]


class Job(ABC):
    """A model with an ``Auto`` on this rank, whose gradients are known.

    Attributes:
        shapes: the shapes of the gradients; the last one is too small for a codec.
        compressor: the ``Auto``.
        ends_late: whether a step ends where the next one begins.
    """

    shapes: ClassVar[Shapes] = {"a": (40, 170), "b": (3000,), "c": (8, 3, 5, 5), "small": (50,)}
    compressor: Any
    ends_late: ClassVar[bool] = True
    rank: Any = property(lambda self: dist.get_rank())
    size: Any = property(lambda self: dist.get_world_size())

    @abstractmethod
    def step(self, gradients: Mapping[str, torch.Tensor]) -> Tensors:
        """One step with this rank's gradients; returns what they have become."""

    def own(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a gradient."""
        return whole

    def everywhere(self, value: Any) -> list[Any]:
        """Every rank's value."""
        return everywhere(value)


class Balance:
    """Gradients that were computed, and gradients that came back."""

    def __init__(self, job: Job) -> None:
        self._job = job
        zeros = {name: torch.zeros(shape, device=DEVICE) for name, shape in job.shapes.items()}
        self._due = {name: job.own(name, zero).clone() for name, zero in zeros.items()}
        self._sent = copy.deepcopy(self._due)

    def step(self, number: int, scale: float = 1.0) -> Tensors:
        shapes, size = self._job.shapes, self._job.size
        gradients = [targets(shapes, rank, number, scale) for rank in range(size)]
        got = self._job.step(gradients[self._job.rank])
        for name, one in got.items():
            self._due[name] += self._job.own(name, sum(g[name] for g in gradients) / size)
            self._sent[name] += one
        return got

    def check(self, number: int) -> None:
        """Sends what is left, and fails unless all has come back."""
        compressor = self._job.compressor
        compressor._planned.apply((UNCOMPRESSED_ROUTE,) * len(self._job.shapes))
        self.step(number, scale=0.0)
        assert compressor.residual_norm() == 0
        for name, due in self._due.items():
            assert torch.allclose(self._sent[name], due, atol=1e-3), name


def everywhere(value: Any) -> list[Any]:
    """Every rank's value."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def plans_nothing(compressor: Any) -> None:
    """Leaves the plan as it is, whatever is measured."""
    compressor._planned.planner.end_step = lambda seconds: False


@contextmanager
def _logged(compressor: Any) -> Iterator[list[logging.LogRecord]]:
    """Collects the records that the compressor's class logs on this rank."""
    logger, records = logging.getLogger(type(compressor).__module__), []
    handler, level = logging.Handler(), logger.level
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield records
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def every_change_of_route_keeps_every_gradient(job: Job, ways: int = 5) -> None:
    """Codecs with and without exchanges that have owners, in every order."""
    balance, compressor = Balance(job), job.compressor
    balance.step(0)
    plans_nothing(compressor)
    choices = [tensor.choices for tensor in compressor._planned.tensors]
    assert [len(routes) for routes in choices] == [ways] * (len(choices) - 1) + [1]
    orders = (*range(ways), 2, 0, 3, 1, 4, 0)
    for number, turn in enumerate(orders, 1):
        plan = [routes[(turn + i) % len(routes)] for i, routes in enumerate(choices)]
        compressor._planned.apply(tuple(plan))
        balance.step(number)
    assert compressor.residual_norm() > 0
    balance.check(1 + len(orders))


def ranks_agree_on_every_plan(job: Job) -> None:
    """Also where one of them alone resets its counters; and they wait for a device until they decide."""
    balance, compressor = Balance(job), job.compressor
    plans, waits, steps = [], [], 0
    with unlimited(), _logged(compressor) as logged:
        while steps < MOST_STEPS and not (steps and compressor.settled):
            # As on a GPU.
            if compressor._planned is not None:
                compressor._planned.wait_for_device = lambda: waits.append(compressor.settled)
            balance.step(steps)
            plans.append(str(sorted(compressor._planned.planner.state()["plan"].items())))
            if job.rank == 0:
                compressor.reset_counters()
            steps += 1
    assert compressor.settled and len(set(plans)) > 1, compressor.explain()
    texts = job.everywhere([compressor.explain(), plans])
    assert all(text == texts[0] for text in texts)
    assert "decided" in texts[0][0] and "onebit" in texts[0][0]
    own = [texts[0][0]] if job.rank == 0 else []
    assert [record.getMessage() for record in logged] == own
    ended = steps - job.ends_late
    assert waits == [False] * ended, "each step is timed when the device is done"
    balance.check(steps)
    assert len(waits) == ended, "the device runs ahead of the host again"


def a_plan_is_saved(job: Job, later: Job) -> None:
    """And gone on with, bit for bit, whatever the job would choose by itself."""
    compressor = job.compressor
    job.step(targets(job.shapes, job.rank, 0))
    planner = compressor._planned.planner
    planner.plan = tuple(tensor.choices[-1] for tensor in compressor._planned.tensors)
    planner.settled, planner._bandwidth = True, 1.0
    compressor._planned.apply(planner.plan)
    plans_nothing(compressor)
    job.step(targets(job.shapes, job.rank, 1))
    later.compressor.load_state_dict(copy.deepcopy(compressor.state_dict()))
    for number in (2, 3):
        gradients = targets(job.shapes, job.rank, number)
        got = later.step(copy.deepcopy(gradients))
        assert_same_bits(got, job.step(gradients))
    assert later.compressor.settled and later.compressor.routes() == compressor.routes()
    assert "goes on with the plan of a saved state" in later.compressor.explain()
    assert later.compressor.residual_norm() > 0
