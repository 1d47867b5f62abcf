"""The compressor that measures, and decides by itself."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import horovod.torch as hvd
import torch

from hvd_compress.codecs import Codec, ErrorFeedback, NoCompression
from hvd_compress.codecs.registry import OFF
from hvd_compress.exchange.errors import ExchangeError
from hvd_compress.exchange.routing import DEFAULT_THRESHOLD, EXCHANGES, Route
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
from hvd_compress.torch.collectives import equal_hosts
from hvd_compress.torch.compressor import Compressor
from hvd_compress.torch.probing import TorchProber
from hvd_compress.torch_common.slots import NamedParameters, Slot

_log = logging.getLogger(__name__)

_PATIENCE = 60.0
"""Seconds for ranks that have ended the same step."""


class Auto(Compressor):
    """Measures the network and the codecs, and sends each gradient in the way that makes steps shortest.

    In the first steps, short messages and encodings are timed, every plan's cost is predicted, and the
    best ones are tried for a few steps each, Horovod's plain allreduce always among them
    (:mod:`hvd_compress.planner`). What was fastest stays, until the network or the time of a step changes.
    All ranks decide the same. Where nothing pays, all gradients go uncompressed.

    A change of plan loses no gradient: what an earlier codec has not sent is added to the next one.

    Args:
        named_parameters: as for :class:`Compressor`.
        codecs: what gradients may be encoded with, besides going as they are: names of schemes, which have
            their papers' error feedback, codecs, or pairs of a codec and its :class:`ErrorFeedback`.
        exchanges: how payloads may travel; those that cannot be used here are left out.
        threshold: tensors with fewer elements are left to Horovod, which fuses them.
        exclude: name patterns (``fnmatch``) of parameters to leave to Horovod.
        warmup_steps: steps at the start that go uncompressed; nothing is measured in them.
        seed: of the stochastic codecs' noise, the same on every rank.
        process_set: as the optimizer's; None is all ranks.
        grad_scaler: as for :class:`Compressor`.
        threads: kernel threads; None is ``torch.get_num_threads()``.
        name: what this compressor's collectives are called by.

    Raises:
        TypeError, ValueError: an argument is wrong, "expected X, got Y".
        ExchangeError: ``hvd.init()`` was not called.
    """

    def __init__(
        self,
        named_parameters: NamedParameters,
        *,
        codecs: Sequence[str | Codec | tuple[Codec, ErrorFeedback]] = DEFAULT_CODECS,
        exchanges: Sequence[str] = EXCHANGES,
        threshold: int = DEFAULT_THRESHOLD,
        exclude: Sequence[str] = (),
        warmup_steps: int = 0,
        seed: int = 0,
        process_set: Any | None = None,
        grad_scaler: Any | None = None,
        threads: int | None = None,
        name: str = "hvd_compress",
    ) -> None:
        routes = allowed(codecs, exchanges)
        super().__init__(
            named_parameters,
            NoCompression(),
            OFF,
            threshold=threshold,
            exclude=exclude,
            warmup_steps=warmup_steps,
            seed=seed,
            process_set=process_set,
            grad_scaler=grad_scaler,
            threads=threads,
            name=name,
        )
        self._planned = [slot for slot in self._slots if slot.parameter.requires_grad]
        self._tensors = [self._tensor_of(slot, routes) for slot in self._planned]
        self._allowed = [str(route) for route in routes]
        codings = codings_of(self._tensors)
        ranks = self._collectives
        self._reporter = Reporter(ranks.rank, ranks.size, codings, self._add, self._prober)
        self._planning = bool(codings) and ranks.size > 1
        self._first = self._last = self._encoded_before = 0.0
        self._under_way = 0
        self._begin_anew()

    @property
    def settled(self) -> bool:
        """Whether a plan has been decided on, or there is nothing to decide; the same on every rank."""
        return not self._planning or self._planner.settled

    def explain(self) -> str:
        """Why gradients travel as they do.

        What was measured, the predicted and the measured cost of every plan, and of every choice for each
        tensor; the same on every rank, but not to be parsed.
        """
        if self._planning:
            return explain(self._planner)
        return nothing_to_choose(self._collectives.size)

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """See :meth:`Compressor.compress`."""
        if not self._under_way:
            self._first = time.perf_counter()
            self._encoded_before = self.counters.encode_seconds
        sent = super().compress(tensor)
        self._under_way += 1
        self._last = time.perf_counter()
        return sent

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """See :meth:`Compressor.decompress`; the last gradient of a step has the planner do its work."""
        gradient = super().decompress(tensor, ctx)
        self._under_way -= 1
        if self._under_way == 0 and self._planning and not self._warming_up():
            self._end_step()
        return gradient

    def set_codec(
        self, codec: Codec, feedback: ErrorFeedback | None = None, layers: str = "*"
    ) -> None:
        """Refused: the planner chooses.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "set_codec: expected a compressor with a codec of its own, got Auto, which chooses among "
            "codecs=(...)"
        )

    def state_dict(self) -> dict[str, Any]:
        """As :meth:`Compressor.state_dict`, with the plan."""
        return {**super().state_dict(), "planner": saved.state_of(self._planner)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As :meth:`Compressor.load_state_dict`; a plan that had been decided on is gone on with.

        The state may be that of another compressor: then all is measured anew.
        """
        super().load_state_dict(state)
        self._begin_anew()
        plan = state.get("planner")
        if plan is not None and self._planning and saved.restore(self._planner, plan):
            self._apply(self._planner.plan)

    def load_resized(self, states: Any) -> None:
        """As :meth:`Compressor.load_resized`; another number of ranks needs another plan."""
        self._begin_anew()
        super().load_resized(states)

    def _configuration(self) -> dict[str, Any]:
        return {**super()._configuration(), "allowed": self._allowed}

    def _tensor_of(self, slot: Slot, routes: Sequence[Route]) -> Tensor:
        def check(route: Route) -> None:
            if not self._exchanges[route.exchange].usable:
                raise ValueError(f"{slot.name}: expected another exchange, got {route.exchange}")
            self._check_route(slot, route)

        dtype = slot.parameter.dtype
        return tensor_of(
            slot.name,
            slot.shape,
            str(dtype).removeprefix("torch."),
            dtype.itemsize,
            routes=routes,
            router=self._router,
            check=check,
        )

    def _begin_anew(self) -> None:
        # A process set's ranks may be anywhere, so each counts as a host of its own.
        local = hvd.local_size() if self._collectives.everywhere and equal_hosts() else 1
        self._planner = Planner(self._tensors, self._collectives.size // local, local)
        self._mark: float | None = None
        self._reporter.forget()
        if self._planning:
            self._apply(self._planner.plan)

    def _warming_up(self) -> bool:
        return max(slot.exchanges for slot in self._slots) <= self._warmup_steps

    @torch.no_grad()
    def _end_step(self) -> None:
        """At a place that all ranks come to, with no gradient on its way."""
        now = time.perf_counter()
        if self._mark is not None:
            encoding = self.counters.encode_seconds - self._encoded_before
            self._reporter.step(now - self._mark, self._last - self._first - encoding)
        need = self._planner.need()
        if need is not Need.NOTHING:
            report = self._reporter.report(need)
            if report is None:
                self._planner.postpone()
            else:
                settled = self._planner.settled
                self._planner.take(report)
                if self._planner.settled and not settled and self._collectives.rank == 0:
                    _log.info("%s", self.explain())
                if self._planner.plan != self._routes_now():
                    self._apply(self._planner.plan)
        self._mark = time.perf_counter()

    def _prober(self) -> TorchProber:
        pairs = zip(self._planned, self._tensors, strict=True)
        slots = [slot for slot, tensor in pairs if len(tensor.choices) > 1]
        largest = max(slots, key=lambda slot: slot.count)
        device = largest.parameter.device
        return TorchProber(
            self._collectives, self._kernels, largest.count, device, lambda: self.counters
        )

    def _add(self, numbers: Sequence[float], what: str) -> list[float]:
        size = self._collectives.size
        table = torch.tensor(numbers, dtype=torch.float64)
        self.counters.add_allreduce(size, table.numel() * table.element_size())
        handle = self._collectives.sum(table, what)
        if not self._collectives.done(handle, _PATIENCE):
            raise ExchangeError(
                f"expected all {size} ranks to share measurements after the same step, got some that never "
                f"do: ranks have made different numbers of steps; make a new Auto after hvd.join()"
            )
        total: list[float] = self._collectives.wait(handle).tolist()
        return total

    def _routes_now(self) -> Plan:
        return tuple(slot.route for slot in self._planned)

    def _apply(self, plan: Plan) -> None:
        for slot, route in zip(self._planned, plan, strict=True):
            slot.route = route
        self._forget_agreement()
