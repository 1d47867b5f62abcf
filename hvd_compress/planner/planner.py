"""The planner: probe links and codecs, predict, time the best plans, choose, watch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvd_compress.exchanges.routing import UNCOMPRESSED_ROUTE
from hvd_compress.perfmodel.machines import CodecSpeed
from hvd_compress.planner.measured import KINDS, Coding, Measured
from hvd_compress.planner.plans import (
    Candidate,
    PlannedTensor,
    RoutePlan,
    predicted_best,
    price_of,
    propose,
    routes_of,
    smallest,
    uniform,
)
from hvd_compress.planner.probing import Prober
from hvd_compress.planner.trials import Trials

Sum = Callable[[list[float], str], Sequence[float]]
"""The sum of all ranks' vectors in float64, by a collective of the given name."""

_FIRST, _BURSTS, _ENOUGH = 4, 3, 2.0
"""The step after which ranks probe, since the first ones negotiate names and show a step's time. How often,
and in how many steps' time at most: where a burst takes long, disturbances count for little."""

_DISTURBED = 0.1
"""Seconds: a burst that is shorter may be long because of a disturbance alone, whatever a step takes."""

_WATCHING = 1e-3
"""Part of the time that looks at the network may take."""

_SHORTEST, _LONGEST, _AGAIN = 32, 1024, 4
"""Steps from one look to the next, at least and at most, and after a look that found a change."""

_CHANGE, _LOOKS = 1.6, 3
"""By which factor the bandwidth has to change to count, and in how many looks in a row."""

_QUIET = 64
"""Steps from a plan to the next but the second, doubled with each plan up to :data:`_LONGEST`."""

_MATTERS = 0.03
"""Part of a step that another plan has to be better for a change of the links to matter."""


class Planner:
    """Decides how each gradient travels, the same on every rank.

    At the end of each step, at a place that all ranks reach with no gradient on its way, a frontend calls
    :meth:`end_step`, and makes the next step with :attr:`plan`. A frontend that has to decide before its
    first step calls :meth:`predict` instead.

    Args:
        tensors: the gradients of a step.
        rank, size, local: this rank, how many ranks there are, and how many on each host.
        sum_over_ranks: a collective of all ranks.
        prober: measures on this rank.

    Attributes:
        plan, reason: a route for each tensor, and why.
        step, plans: how many steps are over, and how many plans have been decided on.
        has_choice: whether there are several ranks, and a tensor that may travel in several ways.
        settled: whether a plan is decided on, or there is no choice.
        measured, candidates, trials: what the plan rests on, as far as it has come.
    """

    def __init__(
        self,
        tensors: Sequence[PlannedTensor],
        *,
        rank: int,
        size: int,
        local: int,
        sum_over_ranks: Sum,
        prober: Prober,
    ) -> None:
        self.tensors = tuple(tensors)
        self._rank, self._size, self._hosts, self._local = rank, size, size // local, local
        self._sum, self._prober = sum_over_ranks, prober
        coded = [route for route in routes_of(tensors) if route != UNCOMPRESSED_ROUTE]
        self._codings = list(dict.fromkeys((route.codec, route.feedback) for route in coded))
        self.has_choice = bool(coded) and size > 1
        self.plan: RoutePlan = uniform(self.tensors, UNCOMPRESSED_ROUTE)
        if self.has_choice:
            self.plan = smallest(self.tensors, self._hosts, local)
        self.reason, self.settled = "nothing is measured yet", not self.has_choice
        self.step = self.plans = 0
        self.measured: Measured | None = None
        self.candidates: Sequence[Candidate] = ()
        self.trials: Trials | None = None
        self._steps: list[float] = []
        self._due, self._planned_at = _FIRST, 0
        self._bandwidth = 0.0  # What looks compare with.
        self._change, self._looks = "", 0  # What the last look found, and how many in a row have.

    def end_step(self, seconds: float | None) -> bool:
        """Counts a step, and measures, shares and decides what is due; whether the plan has changed.

        ``seconds`` is how long the step took on this rank, if that is known.
        """
        self.step += 1
        if not self.has_choice:
            return False
        self._steps += [] if seconds is None else [seconds]
        if self.step < self._due:
            return False
        before, self._due = self.plan, self.step + 1
        slowest = self._share_step()
        if self.settled:
            self._look(slowest)
        elif self.trials is None:
            bursts = self._probe(max(_ENOUGH * slowest, _DISTURBED))
            self.trials = Trials(self.candidates, sum(burst[-1] for burst in bursts))
            self.plan, self.reason = self.trials.plan, "is tried for a few steps"
        else:
            self.trials.record(slowest)
            self.plan = self.trials.plan
            if self.trials.done:
                self._settle(self.trials.verdict)
        return self.plan != before

    def predict(self) -> RoutePlan:
        """Decides at once, from probes and the performance model alone; all ranks call it together."""
        if not self.settled:
            bursts = [self._read(burst) for burst in self._probe(math.inf)]
            assert self.measured is not None
            self.plan = predicted_best(self.tensors, self.measured, bursts).plan
            self._settle("is predicted to be the fastest")
        return self.plan

    def state(self) -> dict[str, Any]:
        """What a later job needs to go on with the plan, in what JSON can say."""
        names = {one.name: str(route) for one, route in zip(self.tensors, self.plan, strict=True)}
        return {"plan": names, "settled": self.settled, "bandwidth": self._bandwidth}

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Goes on with a plan of :meth:`state`, and looks at the network soon.

        Returns whether the plan was decided on and is among today's choices; if not, planning begins anew.
        """
        names = [state["plan"].get(tensor.name, str(UNCOMPRESSED_ROUTE)) for tensor in self.tensors]
        pairs = zip(self.tensors, names, strict=True)
        plan = tuple(route for one, name in pairs for route in one.choices if str(route) == name)
        if len(plan) < len(names) or not (state["settled"] and state["bandwidth"]):
            return False
        self.plan, self.reason = plan, "goes on with the plan of a saved state"
        self._bandwidth, self.settled = state["bandwidth"], True
        self._due = self.step + _AGAIN
        return True

    def _settle(self, reason: str) -> None:
        assert self.measured is not None
        self.settled, self.plans, self.reason = True, self.plans + 1, reason
        self._bandwidth = self.measured.bandwidth()
        self._planned_at, self._due = self.step, self.step + _SHORTEST

    def _look(self, seconds: float) -> None:
        """Compares the links with what they were when the plan was made; a step takes so many seconds."""
        burst = self._burst(KINDS[:1], [])
        bandwidth = self._read(burst).bandwidth()
        ratio, change = bandwidth / self._bandwidth, ""
        if not 1 / _CHANGE <= ratio <= _CHANGE:
            change = f"the bandwidth {'rose' if ratio > 1 else 'fell'}"
        self._looks = self._looks + 1 if change == self._change else 1
        self._change = change
        if change and self._looks < _LOOKS:
            self._due = self.step + _AGAIN
            return
        pause = min(_QUIET << self.plans, _LONGEST) if self.plans > 1 else 0
        if change and not self._matters(bandwidth, seconds):
            self._bandwidth = bandwidth
        elif change and self.step >= self._planned_at + pause:
            self.settled, self.trials, self.reason = False, None, f"is measured anew: {change}"
            return
        period = math.ceil(burst[-1] / max(_WATCHING * seconds, 1e-9))
        self._due = self.step + min(max(period, _SHORTEST), _LONGEST)

    def _matters(self, bandwidth: float, seconds: float) -> bool:
        """Whether another plan is predicted to be better with all links so much faster or slower."""
        if self.measured is None:
            return True
        now = self.measured.with_links(bandwidth / self.measured.bandwidth())
        best = propose(self.tensors, now)[0].seconds
        return price_of(self.tensors, self.plan, now).total - best > _MATTERS * seconds

    def _probe(self, most: float) -> list[list[float]]:
        """Measures, again unless that takes so many seconds, and predicts; returns the bursts.

        Each part counts at its fastest: a disturbance only ever makes it longer.
        """
        bursts: list[list[float]] = []
        while len(bursts) < _BURSTS and sum(burst[-1] for burst in bursts) < most:
            bursts.append(self._burst(KINDS, self._codings))
        self.measured = self._read([min(part) for part in zip(*bursts, strict=True)])
        self.candidates = propose(self.tensors, self.measured)
        return bursts

    def _burst(self, kinds: Sequence[str], codings: Sequence[Coding]) -> list[float]:
        """What :meth:`Prober.measure` returns, each part as slow as on the slowest rank."""
        numbers = self._prober.measure(kinds, codings)
        return [*map(max, zip(*self._share(numbers, f"probe of {len(numbers)}"), strict=True))]

    def _read(self, burst: Sequence[float]) -> Measured:
        """What the numbers of a burst say."""
        small, *rest, _ = burst
        times = rest[len(KINDS) :]
        speeds = map(CodecSpeed, times[::3], times[1::3])
        bits = zip(self._codings, times[2::3], strict=False)
        return Measured(
            self._hosts,
            self._local,
            self._prober.sent,
            small,
            dict(zip(KINDS, rest, strict=False)),
            dict(zip(self._codings, speeds, strict=False)),
            {coding: some for coding, some in bits if some},
        )

    def _share_step(self) -> float:
        """A step's median time on the slowest rank."""
        rows = self._share([statistics.median(self._steps or [1e-9])], "step")
        self._steps.clear()
        return max(row[0] for row in rows)

    def _share(self, numbers: Sequence[float], what: str) -> list[Sequence[float]]:
        """All ranks' numbers, a row each, by a sum."""
        width = len(numbers)
        table = [0.0] * (width * self._size)
        table[width * self._rank : width * (self._rank + 1)] = numbers
        table = list(self._sum(table, f"planner {what}"))
        return [table[width * rank : width * (rank + 1)] for rank in range(self._size)]


def check_state(who: str, state: Any) -> None:
    """Raises unless :meth:`Planner.restore` can take a state.

    Args:
        who: what the message begins with.
        state: what :meth:`Planner.state` returned.

    Raises:
        TypeError, ValueError: it cannot.
    """
    kinds: dict[str, Any] = {"plan": Mapping, "settled": bool, "bandwidth": (int, float)}
    for field, kind in kinds.items():
        got = state.get(field) if isinstance(state, Mapping) else state
        if not isinstance(got, kind):
            raise TypeError(
                f"{who}: planner.{field}: expected what state_dict() returned, got {got!r}"
            )
    if not 0 <= state["bandwidth"] < math.inf:
        raise ValueError(
            f"{who}: planner.bandwidth: expected a finite number >= 0, got {state['bandwidth']}"
        )
