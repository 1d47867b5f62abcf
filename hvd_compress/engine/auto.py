"""The common base of the frontends' ``Auto``, which time steps and follow a planner's decisions."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from hvd_compress.engine.comm import Collective
from hvd_compress.engine.compressor import CompressorBase
from hvd_compress.engine.slots import Slot
from hvd_compress.engine.state_checks import expect_state
from hvd_compress.exchanges.routing import CodecLike, Route
from hvd_compress.planner import explain
from hvd_compress.planner.choices import tensor_of
from hvd_compress.planner.planner import Planner, check_state
from hvd_compress.planner.plans import RoutePlan
from hvd_compress.planner.probing import Prober


class Planning(CompressorBase, ABC):
    """The base of a frontend's ``Auto``, listed before the frontend's ``Compressor``.

    The frontend calls :meth:`_plan_among` when it has joined the ranks, and :meth:`_step_ended` at a place
    that all ranks reach while no gradient is being exchanged.

    Attributes:
        chosen: the arguments of the compressor that the planner chooses, and that ``Auto`` does not take.
    """

    chosen: ClassVar[tuple[str, ...]] = ("feedback", "exchange", "layers", "owner_step")

    _saved_plan: dict[str, Any] | None = None
    """The planner's state in a copy of a compressor, until the copy has joined ranks."""

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        planner = state.pop("_planner", None)
        for name in ("_planned", "_tensors", "_allowed", "_local", "_mark"):
            state.pop(name, None)
        return {**state, "_saved_plan": planner.state() if planner else self._saved_plan}

    def _plan_among(self, routes: Sequence[Route], local: int) -> None:
        """Begins to plan among the usable routes; ``local`` is the number of ranks on each host."""
        self._planned = [slot for slot in self._slots if slot.parameter.requires_grad]
        self._tensors = [
            tensor_of(
                slot.name,
                slot.shape,
                str(slot.parameter.dtype).removeprefix("torch."),
                slot.parameter.element_size(),
                routes=routes,
                router=self._router,
                check=lambda route, slot=slot: self._check_route(slot, route),  # type: ignore[misc]
            )
            for slot in self._planned
        ]
        self._allowed, self._local = [str(route) for route in routes], local
        self._warm = 0
        self._begin_anew(self._saved_plan)
        self._saved_plan = None

    @abstractmethod
    def _wait_for(self, collective: Collective, name: str) -> torch.Tensor:
        """Waits for a collective of all ranks to end, and returns its result."""

    @property
    def settled(self) -> bool:
        """Whether the plan has been chosen, or there is nothing to choose; the same on every rank."""
        self._bind()
        return self._planner.settled

    def explain(self) -> str:
        """Explains the choice of the gradients' routes.

        The text lists the measurements, the predicted and the measured cost of every plan, and the route of
        each tensor. It is the same on every rank, and is not meant to be parsed.
        """
        self._bind()
        return explain.explain(self._planner)

    def set_codec(self, codec: CodecLike, layers: str = "*") -> None:
        """Raises ``ValueError``, because the planner chooses codecs."""
        raise ValueError(
            "set_codec: expected a compressor with a codec of its own, got Auto, which chooses among "
            "codecs=(...)"
        )

    def state_dict(self) -> dict[str, Any]:
        """The same as :meth:`Compressor.state_dict`, with the state of the planner."""
        return {**super().state_dict(), "planner": self._planner.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The same as :meth:`Compressor.load_state_dict`; a plan that was already chosen stays in use.

        The state may be that of a compressor without a planner; then everything is measured again.
        """
        expect_state("load_state_dict", state)
        planner = state.get("planner")
        if planner is not None:
            check_state("load_state_dict", planner)
        super().load_state_dict(state)
        self._begin_anew(planner)

    def load_resized(self, states: Any) -> None:
        """The same as :meth:`Compressor.load_resized`; then plans anew for the new number of ranks."""
        super().load_resized(states)
        self._begin_anew()

    def _configuration(self, slots: Iterable[Slot] | None = None) -> dict[str, Any]:
        return {**super()._configuration(slots), "allowed": self._allowed}

    def _begin_anew(self, state: dict[str, Any] | None = None) -> None:
        device = self._planned[0].parameter.device
        self._wait_for_device = _synchronizing(device)
        counts = [tensor.count for tensor in self._tensors if len(tensor.choices) > 1]

        def array(count: int, dtype: str) -> torch.Tensor:
            if dtype == "uint8":
                return torch.zeros(count, dtype=torch.uint8, device=device)
            # A generator of its own leaves that of the training alone.
            numbers = torch.randn(
                count,
                generator=torch.Generator().manual_seed(0),
                dtype=torch.float32,
                device="cpu",
            )
            return numbers.to(device, getattr(torch, dtype))

        def total(numbers: list[float], name: str) -> list[float]:
            table = torch.tensor(numbers, dtype=torch.float64, device=device)
            return self._run("all_reduce", table, name).tolist()

        self._planner = Planner(
            self._tensors,
            rank=self._rank,
            size=self._size,
            local=self._local,
            sum_over_ranks=total,
            prober=Prober(
                self._size,
                max(counts, default=1),
                array=array,
                kernels=self._kernels,
                collective=self._run,
                wait=self._wait_for_device,
            ),
        )
        if state is not None:
            self._planner.restore(state)
        self._mark: float | None = None
        self._apply(self._planner.plan)

    def _run(self, kind: str, message: torch.Tensor, name: str) -> torch.Tensor:
        comm = self._batches.comm
        if kind == "all_to_all":
            collective = comm.all_to_all(message, [len(message) // self._size] * self._size)
        else:
            collective = getattr(comm, kind)(message)
        collective.count(self.counters)
        return self._wait_for(collective, name)

    def _apply(self, plan: RoutePlan) -> None:
        self._set_routes(zip(self._planned, plan, strict=True))

    @torch.no_grad()
    def _step_ended(self) -> None:
        if self._warm < self._warmup_steps:
            self._warm += 1
            return
        undecided = not self._planner.settled
        if undecided and self._wait_for_device is not None:
            self._wait_for_device()  # The host is ahead of the device, and has no time of a step.
        seconds = None if self._mark is None else time.perf_counter() - self._mark
        if self._planner.end_step(seconds):
            self._apply(self._planner.plan)
        if undecided and self._planner.settled and self._rank == 0:
            logging.getLogger(type(self).__module__).info("%s", self.explain())
        self._mark = time.perf_counter()


def _synchronizing(device: torch.device) -> Callable[[], None] | None:
    """A function that waits for a device; None for the CPU, which computes at once."""
    if device.type == "cpu":
        return None
    return partial(torch.get_device_module(device).synchronize, device)
