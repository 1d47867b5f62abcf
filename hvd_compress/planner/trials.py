"""Trials that compare plans by the time of real steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from hvd_compress.planner.plans import Candidate, RoutePlan

BUDGET, RESERVE = 6.0, 1.0
"""The most that probes and trials may cost, in steps of the best plan: below 1% of 1,000 steps. And the
cost that each plan without a codec may have even if nothing is left: no choice may be slower than these."""

ROUNDS = ((4, 0.25), (4, 0.10), (4, 0.0), (8, 0.0), (8, 0.0), (8, 0.0))
"""For each round, the timed steps of a plan, and the fraction by which it may be slower than the fastest
and still stay, or the noise if that is larger. Late turns are long: a change of plan may cost more than the
steps."""

_LEAST = 2
"""The steps before a plan may be stopped because of its cost: one slow step may be a disturbance."""

_HEARING = sum(steps for steps, _ in ROUNDS[:3])
"""The steps that plans without any loss get regardless of the budget, if they are predicted to be as good
as the fastest plan: those of three turns, as a disturbance may last for one."""

_INDIFFERENCE = 0.02
"""The fraction by which a plan may be slower than the fastest and still count as equally good."""

_DOUBT = 1.5
"""The multiple of the noise by which a plan may be faster than no compression while the latter still counts
as equally good; half of that, if the plan's predicted gain exceeds the noise."""

_HIDDEN = 2.0
"""A multiple of the uncompressed exchange's predicted time: if the noise is as large, no compression counts
as equally good as any plan."""

_CONTENDERS = 4
"""The number of plans with a codec that are tried, besides the best plan of each exchange: predictions are
least certain about the cost of many messages apart from their bytes."""


@dataclass(eq=False)
class Trial:
    """The seconds of a plan's timed steps, and of the first steps after changes to this plan."""

    candidate: Candidate
    seconds: list[float] = field(default_factory=list)
    changes: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The median of the timed steps; infinite if there are none."""
        return statistics.median(self.seconds) if self.seconds else math.inf

    @property
    def typical(self) -> float:
        """The median, or the minimum of up to four steps, as any of these may be disturbed."""
        return self.median if len(self.seconds) > 4 else min(self.seconds, default=math.inf)


class Trials:
    """Runs plans in turns, drops the slow ones, and keeps to a budget in steps of the best plan.

    The first step of a turn does not count as timed: after a change, names are negotiated anew. Turns are
    short, so that a long disturbance affects all plans. ``overhead`` is the cost of the probes in seconds.

    :attr:`plan` is the plan of the next step and, when the trials are :attr:`done`, the best plan.
    """

    def __init__(
        self, candidates: Sequence[Candidate], overhead: float = 0.0, budget: float = BUDGET
    ) -> None:
        self.trials = [Trial(candidate) for candidate in _contenders(candidates)]
        self.done = False
        self._budget, self._overhead = budget, overhead
        self._steps = self._run()
        self.plan: RoutePlan = next(self._steps)

    def record(self, seconds: float) -> None:
        """Records the time of a step with :attr:`plan`; all ranks must record the same time."""
        try:
            self.plan = self._steps.send(seconds)
        except StopIteration:
            self.plan, self.done = self.best.candidate.plan, True

    @property
    def best(self) -> Trial:
        """The fastest plan so far; among equally good plans, the one that changes gradients least."""
        leader = self._leader

        def as_good(trial: Trial) -> bool:
            error, gain = self._error(trial), trial.candidate.seconds - leader.candidate.seconds
            margin = _INDIFFERENCE
            if trial.candidate.loss == 0:
                if _HIDDEN * trial.candidate.seconds <= error * leader.median:
                    return True  # There is less to gain than noise, whatever was measured.
                doubt = _DOUBT if gain <= error * leader.median else _DOUBT / 2
                margin = max(margin, doubt * error)
            return trial.median <= (1 + margin) * leader.median

        return min(filter(as_good, self.trials), key=lambda t: (t.candidate.loss, t.median))

    @property
    def verdict(self) -> str:
        """The reason for the choice of :attr:`best`, with its time and the fastest plan's."""
        best, leader = self.best, self._leader
        if not best.seconds:
            return "was not tried: it is predicted to be as good as any"
        if best.median == leader.median:
            return f"was the fastest of the plans that were tried: {_times(best)}"
        return (
            f"took {_times(best)}; {leader.candidate.label} took {_times(leader)}: too small a difference "
            f"for so few steps and so much noise, so the plan that changes gradients less is chosen"
        )

    @property
    def cost(self) -> float:
        """The seconds that probes, slower plans and changes took beyond the fastest plan's steps."""
        fastest, ran = self._leader.median, [trial for trial in self.trials if trial.seconds]
        steps = [one for t in ran for one in [t.typical] * len(t.seconds) + t.changes]
        return self._overhead + sum(max(0.0, one - fastest) for one in steps)

    def predicted(self, trial: Trial) -> float:
        """The seconds of a step: those of the exchange, and the rest of the best plan's steps."""
        return self.rest + trial.candidate.seconds

    @property
    def rest(self) -> float:
        """The seconds of the best plan's step that its predicted exchange does not explain."""
        best = self.best
        return max(0.0, best.median - best.candidate.seconds) if best.seconds else 0.0

    def _run(self) -> Generator[RoutePlan, float, None]:
        """Yields the plan of each step, and receives the step's seconds."""
        alive, last = self.trials, None
        for steps, tolerance in ROUNDS:
            for trial in alive:
                if trial is not last:
                    if not self._affords(trial, 1 if trial.seconds else 1 + _LEAST):
                        continue
                    trial.changes.append((yield trial.candidate.plan))
                    last = trial
                for _ in range(steps):
                    trial.seconds.append((yield trial.candidate.plan))
                    enough = len(trial.seconds) + len(trial.changes) >= _LEAST
                    if enough and not self._affords(trial, 1):
                        break
            alive = [trial for trial in self.trials if self._stays(trial, tolerance)]
            if len(alive) < 2:
                return

    def _stays(self, trial: Trial, tolerance: float) -> bool:
        if tolerance and self._promises(trial):
            return True  # A disturbance may have met the round.
        return trial.median <= (1 + max(tolerance, self._error(trial))) * self._leader.median

    def _promises(self, trial: Trial) -> bool:
        """Whether a plan is predicted to be as good as the fastest."""
        return self.predicted(trial) <= (1 + _INDIFFERENCE) * self._leader.median

    def _affords(self, trial: Trial, steps: int) -> bool:
        fastest = self._leader.median
        if math.isinf(fastest):
            return True  # The first plan is measured whatever it takes.
        if trial.candidate.loss == 0 and len(trial.seconds) < _HEARING and self._promises(trial):
            return True  # A slow turn may be a disturbance, whatever is left of the budget.
        left = max(0.0, self._budget * fastest - self.cost)
        expected = min([trial.typical, *trial.changes])
        if not trial.seconds:
            expected = self.predicted(trial)
            left = max(left, RESERVE * fastest if trial.candidate.loss < 2 else 0)
        return steps * (expected - fastest) <= left

    @property
    def _leader(self) -> Trial:
        return min(self.trials, key=lambda trial: trial.median)

    def _error(self, trial: Trial) -> float:
        """Twice the standard error of the ratio of a plan's time to the fastest plan's.

        The error is estimated from the median absolute deviation of all plans' steps, as for a normal
        distribution.
        """
        leader, noisy = self._leader, [one for one in self.trials if len(one.seconds) >= 4]
        if trial is leader or not trial.seconds:
            return 0.0
        deviations = [abs(s / one.median - 1) for one in noisy for s in one.seconds]
        noise = 1.25 * 1.4826 * statistics.median(deviations or [0.0])
        return 2 * noise * math.hypot(len(trial.seconds) ** -0.5, len(leader.seconds) ** -0.5)


def _times(trial: Trial) -> str:
    steps = len(trial.seconds)
    return f"{1e3 * trial.median:.2f} ms in {steps} step{'s' * (steps != 1)}"


def _contenders(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The plans without a codec, the best others, and the best of each exchange, the fastest first."""
    chosen: list[Candidate] = []
    for one in candidates:
        codecs = [other for other in chosen if other.loss == 2]
        known = one.exchanges in [other.exchanges for other in codecs]
        if one.loss < 2 or len(codecs) < _CONTENDERS or not known:
            chosen.append(one)
    return chosen
