"""The compressor that measures, and decides by itself."""

from __future__ import annotations

import dataclasses
import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import horovod.torch as hvd
import torch

from hvd_compress.codecs import (
    SCHEMES,
    Codec,
    ErrorFeedback,
    NoCompression,
    codec_from_config,
)
from hvd_compress.codecs.base import check_choice
from hvd_compress.codecs.registry import OFF, scheme_of
from hvd_compress.exchange.errors import ExchangeError
from hvd_compress.exchange.routing import DEFAULT_THRESHOLD, DENSE, EXCHANGES, Route
from hvd_compress.perfmodel import exchanges as model
from hvd_compress.perfmodel.machines import CodecSpeed
from hvd_compress.planner.explain import explain
from hvd_compress.planner.measured import KINDS, Probe
from hvd_compress.planner.planner import Need, Planner, Report
from hvd_compress.planner.plans import Plan, Tensor
from hvd_compress.torch.collectives import equal_hosts
from hvd_compress.torch.compressor import Compressor
from hvd_compress.torch.probing import Prober
from hvd_compress.torch_common.slots import NamedParameters, Slot

DEFAULT_CODECS = ("fp16", "int8", "onebit")
"""A cast, eight bits, and one bit whose error is sent later."""

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
        routes = _routes(codecs, exchanges)
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
        self._tensors = [
            Tensor(slot.name, slot.shape, _element_bytes(slot), self._choices(slot, routes))
            for slot in self._planned
        ]
        self._allowed = [str(route) for route in routes]
        choices = {route for tensor in self._tensors for route in tensor.choices[1:]}
        self._codings = [
            coding
            for coding in dict.fromkeys((route.codec, route.feedback) for route in routes)
            if any(coding == (route.codec, route.feedback) for route in choices)
        ]
        self._prober: Prober | None = None
        self._planning = bool(choices) and self._collectives.size > 1
        self._first = self._last = self._encoded_before = 0.0
        self._under_way = 0
        self._timed: list[float] = []
        self._windows: list[float] = []
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
        if self._collectives.size == 1:
            return "nothing to choose: there is one rank"
        return (
            "nothing to choose: no tensor is large enough for a codec, or of a dtype that has one"
        )

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
        state = self._planner.state()
        plan = {
            tensor.name: _config(route)
            for tensor, route in zip(self._tensors, state["plan"], strict=True)
        }
        return {**super().state_dict(), "planner": {**state, "plan": plan}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As :meth:`Compressor.load_state_dict`; a plan that had been decided on is gone on with.

        The state may be that of another compressor: then all is measured anew.
        """
        super().load_state_dict(state)
        self._begin_anew()
        saved = state.get("planner")
        if saved is not None and self._planning:
            plan = [
                _route(saved["plan"][tensor.name]) if tensor.name in saved["plan"] else DENSE
                for tensor in self._tensors
            ]
            if self._planner.restore({**saved, "plan": plan}):
                self._apply(self._planner.plan)

    def load_resized(self, states: Any) -> None:
        """As :meth:`Compressor.load_resized`; another number of ranks needs another plan."""
        self._begin_anew()
        super().load_resized(states)

    def _configuration(self) -> dict[str, Any]:
        return {**super()._configuration(), "allowed": self._allowed}

    def _choices(self, slot: Slot, routes: Sequence[Route]) -> tuple[Route, ...]:
        chosen = [DENSE]
        for route in routes:
            if not (route.dense or self._exchanges[route.exchange].usable):
                continue
            dtype = str(slot.parameter.dtype).removeprefix("torch.")
            try:
                taken = self._router.with_route(route).choose(slot.name, slot.shape, dtype)
                if not taken.dense:
                    self._check_route(slot, taken)
            except (TypeError, ValueError):
                continue  # This tensor cannot go that way.
            if taken.dense and slot.parameter.dtype != torch.float32:
                continue  # Nothing is cast.
            if taken not in chosen:
                chosen.append(taken)
        return tuple(chosen)

    def _begin_anew(self) -> None:
        # A process set's ranks may be anywhere, so each counts as a host of its own.
        local = hvd.local_size() if self._collectives.everywhere and equal_hosts() else 1
        self._planner = Planner(self._tensors, self._collectives.size // local, local)
        self._mark: float | None = None
        self._timed.clear()
        self._windows.clear()
        if self._planning:
            self._apply(self._planner.plan)

    def _warming_up(self) -> bool:
        return max(slot.exchanges for slot in self._slots) <= self._warmup_steps

    @torch.no_grad()
    def _end_step(self) -> None:
        """At a place that all ranks come to, with no gradient on its way."""
        now = time.perf_counter()
        if self._mark is not None:
            self._timed.append(now - self._mark)
            encoding = self.counters.encode_seconds - self._encoded_before
            self._windows.append(max(0.0, self._last - self._first - encoding))
        need = self._planner.need()
        if need is not Need.NOTHING:
            report = self._report(need)
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

    def _report(self, need: Need) -> Report | None:
        """What all ranks have measured; None where some have joined, with whom nothing can be agreed."""
        timed, windows = self._timed or [0.0], self._windows or [0.0]
        shared = self._share([statistics.median(timed), statistics.median(windows)], "step")
        if shared is None:
            return None
        self._timed.clear()
        self._windows.clear()
        seconds, window = shared[:, 0].max().item(), shared[:, 1].min().item()
        if need is Need.SECONDS:
            return Report(seconds, window)
        kinds = KINDS if need is Need.ALL else KINDS[:1]
        codings = self._codings if need is Need.ALL else []
        prober = self._prober = self._prober or self._make_prober()
        started = time.perf_counter()
        numbers = prober.links(kinds)
        for encode, decode in prober.speeds(codings):
            numbers += [encode, decode]
        numbers.append(time.perf_counter() - started)
        measured = self._share(numbers, f"probe of {len(numbers)}")
        if measured is None:
            return None
        small, *slowest, overhead = measured.amax(0).tolist()
        links, coding = slowest[: len(kinds)], slowest[len(kinds) :]
        probe = Probe(prober.sent, small, dict(zip(kinds, links, strict=True)))
        speeds = map(CodecSpeed, coding[::2], coding[1::2])
        return Report(seconds, window, probe, dict(zip(codings, speeds, strict=True)), overhead)

    def _make_prober(self) -> Prober:
        pairs = zip(self._planned, self._tensors, strict=True)
        slots = [slot for slot, tensor in pairs if len(tensor.choices) > 1]
        largest = max(slots, key=lambda slot: slot.count)
        device = largest.parameter.device
        return Prober(
            self._collectives, self._kernels, largest.count, device, lambda: self.counters
        )

    def _share(self, numbers: Sequence[float], what: str) -> torch.Tensor | None:
        """All ranks' numbers, shape=(ranks, n), float64; None if a rank has joined.

        A sum, and no gather, because a rank that has joined adds zeros to sums.
        """
        rank, size = self._collectives.rank, self._collectives.size
        table = torch.zeros(size, len(numbers) + 1, dtype=torch.float64)
        table[rank] = torch.tensor([*numbers, 1.0], dtype=torch.float64)
        self.counters.add_allreduce(size, table.numel() * table.element_size())
        handle = self._collectives.sum(table, f"planner {what}")
        if not self._collectives.done(handle, _PATIENCE):
            raise ExchangeError(
                f"expected all {size} ranks to share measurements after the same step, got some that never "
                f"do: ranks have made different numbers of steps; make a new Auto after hvd.join()"
            )
        table = self._collectives.wait(handle)
        return table[:, :-1] if bool((table[:, -1] == 1).all()) else None

    def _routes_now(self) -> Plan:
        return tuple(slot.route for slot in self._planned)

    def _apply(self, plan: Plan) -> None:
        for slot, route in zip(self._planned, plan, strict=True):
            slot.route = route
        self._forget_agreement()


def _routes(codecs: Sequence[Any], exchanges: Sequence[str]) -> list[Route]:
    """Every allowed way, those without a codec first."""
    if isinstance(codecs, str) or not isinstance(codecs, Sequence):
        raise TypeError(
            f"Auto.codecs: expected a sequence of codecs or their names, got {codecs!r}"
        )
    if isinstance(exchanges, str) or not isinstance(exchanges, Sequence):
        raise TypeError(f"Auto.exchanges: expected a sequence of names, got {exchanges!r}")
    for exchange in exchanges:
        check_choice("Auto", "exchanges", exchange, EXCHANGES)
    routes = []
    for codec, feedback in map(_coding, codecs):
        one = Route(codec, feedback)
        if one.dense:
            routes.append(one)
        else:
            # Where no model can say what an exchange costs, it cannot be planned with.
            known = (exchange for exchange in exchanges if exchange in model.EXCHANGES)
            routes += [dataclasses.replace(one, exchange=exchange) for exchange in known]
    return sorted(dict.fromkeys(routes), key=lambda route: not route.dense)


def _coding(given: Any) -> tuple[Codec, ErrorFeedback]:
    if isinstance(given, str):
        check_choice("Auto", "codecs", given, tuple(SCHEMES))
        return SCHEMES[given].codec(), SCHEMES[given].feedback
    if isinstance(given, Codec):
        return given, scheme_of(given).feedback
    if isinstance(given, tuple) and list(map(type, given))[1:] == [ErrorFeedback]:
        codec, feedback = given
        if isinstance(codec, Codec):
            return codec, feedback
    raise TypeError(
        f"Auto.codecs: expected names, codecs, or pairs of a codec and ErrorFeedback, got {given!r}"
    )


def _element_bytes(slot: Slot) -> int:
    dtype = slot.parameter.dtype
    return 4 if dtype == torch.bfloat16 else dtype.itemsize  # Horovod has no bfloat16.


def _config(route: Route) -> dict[str, Any]:
    feedback = {"alpha": route.feedback.alpha, "beta": route.feedback.beta}
    return {"codec": route.codec.to_config(), **feedback, "exchange": route.exchange}


def _route(config: Mapping[str, Any]) -> Route:
    feedback = ErrorFeedback(config["alpha"], config["beta"])
    return Route(codec_from_config(dict(config["codec"])), feedback, config["exchange"])
