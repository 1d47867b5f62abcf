"""The planner, which probes links and codecs, predicts, times the best plans, chooses, and watches."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvd_compress.exchanges.routing import UNCOMPRESSED_ROUTE
from hvd_compress.planner.machines import CodecSpeed
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
"""A function that sums all ranks' vectors in float64 with a collective of the given name."""

_FIRST, _BURSTS, _ENOUGH = 4, 3, 2.0
"""The step after which ranks probe, as the first steps negotiate names and show a step's time; the largest
number of bursts; and the time after which no further burst begins, in steps: in long bursts, disturbances
have little effect."""

_DISTURBED = 0.1
"""The seconds below which a burst's time may be due to a disturbance alone, however long a step takes."""

_WATCHING = 1e-3
"""The fraction of the time that looks at the network may take."""

_SHORTEST, _LONGEST, _AGAIN = 32, 1024, 4
"""The minimum and maximum number of steps from one look to the next, and the number after a look that found
a change."""

_CHANGE, _LOOKS = 1.6, 3
"""The factor by which the bandwidth must change, and the number of consecutive looks that must find it."""

_QUIET = 64
"""The basis of the minimum number of steps between plans, from the third plan on: the number doubles with
each plan, up to :data:`_LONGEST`."""

_MATTERS = 0.03
"""The fraction of a step by which another plan must be better for a change of the links to matter."""


class Planner:
    """Chooses a route for each gradient, the same on every rank.

    At the end of each step, at a point that all ranks reach while no gradient is being sent, a frontend
    calls :meth:`end_step`, and uses :attr:`plan` for the next step. A frontend that must decide before its
    first step calls :meth:`predict` instead.

    Args:
        tensors: the gradients of a step.
        rank, size, local: this rank, the number of ranks, and the number of ranks on each host.
        sum_over_ranks: a collective of all ranks.
        prober: the object that measures on this rank.

    Attributes:
        plan, reason: a route for each tensor, and the reason for the choice.
        step, plans: the number of finished steps, and the number of plans that were chosen.
        has_choice: whether there are several ranks, and a tensor with several possible routes.
        settled: whether a plan is chosen, or there is no choice.
        measured, candidates, trials: the measurements, plans and trials so far that the choice is based on.
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
        self._bandwidth = 0.0  # The bandwidth that looks compare with.
        self._change, self._looks = "", 0  # The last look's finding, and its count in a row.

    @property
    def due(self) -> bool:
        """Whether the ranks measure, or share measurements, at the end of the current step."""
        return self.has_choice and self.step + 1 >= self._due

    def end_step(self, seconds: float | None) -> bool:
        """Counts a step, and does the measurements and decisions that are due.

        Args:
            seconds: the time of the step on this rank, or None if it is not known.

        Returns:
            Whether the plan has changed.
        """
        due = self.due
        self.step += 1
        if self.has_choice and seconds is not None:
            self._steps.append(seconds)
        if not due:
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
        """Chooses a plan at once from probes and the performance model; all ranks call this together."""
        if not self.settled:
            bursts = [self._read(burst) for burst in self._probe(math.inf)]
            assert self.measured is not None
            self.plan = predicted_best(self.tensors, self.measured, bursts).plan
            self._settle("is predicted to be the fastest")
        return self.plan

    def state(self) -> dict[str, Any]:
        """The state that a later job needs to continue with the plan, as JSON types."""
        names = {one.name: str(route) for one, route in zip(self.tensors, self.plan, strict=True)}
        return {"plan": names, "settled": self.settled, "bandwidth": self._bandwidth}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues with the plan of a :meth:`state`, and looks at the network soon.

        Does nothing, so that planning starts anew, unless that plan was settled and has current choices.
        """
        names = [state["plan"].get(tensor.name, str(UNCOMPRESSED_ROUTE)) for tensor in self.tensors]
        pairs = zip(self.tensors, names, strict=True)
        plan = tuple(route for one, name in pairs for route in one.choices if str(route) == name)
        if len(plan) == len(names) and state["settled"] and state["bandwidth"]:
            self.plan, self.reason = plan, "goes on with the plan of a saved state"
            self._bandwidth, self.settled = state["bandwidth"], True
            self._due = self.step + _AGAIN

    def _settle(self, reason: str) -> None:
        assert self.measured is not None
        self.settled, self.plans, self.reason = True, self.plans + 1, reason
        self._bandwidth = self.measured.bandwidth()
        self._planned_at, self._due = self.step, self.step + _SHORTEST

    def _look(self, seconds: float) -> None:
        """Compares the links with those for which the plan was made; a step takes ``seconds``."""
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
        """Whether another plan is predicted to be better by enough at the given bandwidth."""
        if self.measured is None:
            return True
        now = self.measured.with_links(bandwidth / self.measured.bandwidth())
        best = propose(self.tensors, now)[0].seconds
        return price_of(self.tensors, self.plan, now).total - best > _MATTERS * seconds

    def _probe(self, most: float) -> list[list[float]]:
        """Measures repeatedly, for about ``most`` seconds, and predicts; returns the bursts.

        The fastest time of each part counts: disturbances only ever make it longer.
        """
        bursts: list[list[float]] = []
        while len(bursts) < _BURSTS and sum(burst[-1] for burst in bursts) < most:
            bursts.append(self._burst(KINDS, self._codings))
        self.measured = self._read([min(part) for part in zip(*bursts, strict=True)])
        self.candidates = propose(self.tensors, self.measured)
        return bursts

    def _burst(self, kinds: Sequence[str], codings: Sequence[Coding]) -> list[float]:
        """The numbers of :meth:`Prober.measure`, each from the slowest rank."""
        numbers = self._prober.measure(kinds, codings)
        return [*map(max, zip(*self._share(numbers, f"probe of {len(numbers)}"), strict=True))]

    def _read(self, burst: Sequence[float]) -> Measured:
        """The measurements in the numbers of a burst."""
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
        """The median time of a step on the slowest rank."""
        rows = self._share([statistics.median(self._steps or [1e-9])], "step")
        self._steps.clear()
        return max(row[0] for row in rows)

    def _share(self, numbers: Sequence[float], what: str) -> list[Sequence[float]]:
        """All ranks' numbers, one row per rank, shared by a sum."""
        width = len(numbers)
        table = [0.0] * (width * self._size)
        table[width * self._rank : width * (self._rank + 1)] = numbers
        table = list(self._sum(table, f"planner {what}"))
        return [table[width * rank : width * (rank + 1)] for rank in range(self._size)]


def check_state(who: str, state: Any) -> None:
    """Raises unless :meth:`Planner.restore` accepts a state; ``who`` begins the message.

    Raises:
        TypeError, ValueError: the state is not valid.
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
