"""Plans against each other, by the time of real steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from hvd_compress.planner.plans import Candidate, Plan

BUDGET = 6.0
"""What trials, and the probes before them, may cost, in steps of the best plan; below 1% of 1,000."""

RESERVE = 1.0
"""What each plan without a codec may cost, whatever has been spent: nothing may be slower than these."""

_SAMPLES = 4
"""Timed steps of a plan in a round."""

_LEAST = 2
"""Steps before a plan is stopped because it costs too much: one slow step may have met a busy moment."""

_TOLERANCES = (0.25, 0.10)
"""How much slower than the best a plan may be after each round and still be in the next."""

_ROUNDS = 1 + len(_TOLERANCES)

_DECIDING = 8
_DECIDERS = 3
"""Timed steps of a plan in each of more rounds, and how many of them there are at most, between plans whose
order noise still hides. Their turns are longer, since a change of plan may cost more than the steps."""

_INDIFFERENCE = 0.02, 0.03
"""Plans so close to the fastest are as good, at least and at most; in between, those that are no further
from it than noise may take them. Of such plans, the one that changes gradients least is chosen."""

_CONTENDERS = 4
"""Plans that are tried, beside those without a codec: those with the best predictions, and the best of each
exchange. What many messages cost beside their bytes is what predictions know least about."""


@dataclass(eq=False)
class Trial:
    """One plan's record.

    Attributes:
        candidate: the plan.
        seconds: of its timed steps.
        changes: of steps right after a change to it.
    """

    candidate: Candidate
    seconds: list[float] = field(default_factory=list)
    changes: list[float] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """How many have been made."""
        return len(self.seconds) + len(self.changes)

    @property
    def median(self) -> float:
        """Of the timed steps; infinite without any."""
        return statistics.median(self.seconds) if self.seconds else math.inf

    @property
    def typical(self) -> float:
        """What a step takes: the least of a few, any of which may have been disturbed, or the median."""
        return self.median if len(self.seconds) > _SAMPLES else min(self.seconds, default=math.inf)


class Trials:
    """Runs plans in turns, drops the slow ones, and keeps to a budget.

    A prediction may be wrong, and the time of a step is what counts. In a round, each plan runs for a few
    steps; the first is not timed, because names are negotiated anew after a change. Plans take turns, so
    that what disturbs the machine for a while disturbs all.

    Uncompressed plans are always among those that are tried, as far as the budget allows: where they are
    predicted to take many times as long as the best plan, even a few steps would cost more than they can
    tell, and a plan that turns out to be slow is stopped at once.

    Args:
        candidates: the best prediction first, at least one.
        overhead: seconds that measurements have cost already.
        budget: in steps of the best plan.
    """

    def __init__(
        self, candidates: Sequence[Candidate], overhead: float = 0.0, budget: float = BUDGET
    ) -> None:
        self.trials = _contenders(candidates)
        self._budget = budget
        self._overhead = overhead
        self._round = 0
        self._queue: list[Trial] = []
        self._current, self._settling, self._left = self.trials[0], True, _SAMPLES
        self._start_round(self.trials[1:])

    @property
    def plan(self) -> Plan:
        """What the next step has to be made with."""
        return self._current.candidate.plan

    @property
    def done(self) -> bool:
        """Whether the best is known, as far as it can be; then it is :attr:`plan`."""
        return self._round < 0

    @property
    def best(self) -> Trial:
        """The fastest so far; of plans that are as good, the one that changes gradients least."""
        least, most = _INDIFFERENCE
        good = [
            trial
            for trial in self.trials
            if trial.median <= (1 + min(max(self._error(trial), least), most)) * self._leader.median
        ]
        return min(good, key=lambda t: (t.candidate.loss, t.median))

    def predicted(self, trial: Trial) -> float:
        """Seconds of a step: the exchange's, and those of everything else as the best plan's steps show."""
        base = 0.0
        if self.best.seconds:
            base = max(0.0, self.best.median - self.best.candidate.seconds)
        return base + trial.candidate.seconds

    @property
    def cost(self) -> float:
        """Seconds that all this has taken beyond as many steps of the best plan.

        A plan's steps count as a typical one, and what a change takes beyond that as in the middle of all
        changes: a disturbance is not the plan's fault.
        """
        fastest, ran = self._fastest(), [trial for trial in self.trials if trial.seconds]
        slower = sum(trial.steps * max(0.0, trial.typical - fastest) for trial in ran)
        changes = [one - trial.typical for trial in ran for one in trial.changes]
        change = max(0.0, statistics.median(changes)) if changes else 0.0
        return self._overhead + slower + len(changes) * change

    def record(self, seconds: float) -> None:
        """Takes the time of a step that was made with :attr:`plan`, as all ranks agree on it."""
        assert not self.done
        if self._settling:
            self._current.changes.append(seconds)
            self._settling = False
            return
        self._current.seconds.append(seconds)
        self._left -= 1
        enough = self._current.steps >= _LEAST
        if self._left == 0 or (enough and not self._affords(self._current, 1)):
            self._next()

    def _next(self) -> None:
        while True:
            while self._queue:
                trial = self._queue.pop(0)
                least = 1 if trial.seconds else 1 + _LEAST
                if trial is self._current or self._affords(trial, least):
                    self._enter(trial, settling=trial is not self._current)
                    return
            if not self._start_round(self._survivors()):
                self._current, self._round = self.best, -1
                return

    def _start_round(self, trials: list[Trial]) -> bool:
        self._round += 1
        self._queue = list(trials)
        return self._round == 1 or (self._round <= _ROUNDS + _DECIDERS and len(trials) > 1)

    def _survivors(self) -> list[Trial]:
        """The plans of the next round."""
        if self._round >= _ROUNDS:
            return [trial for trial in self._undecided() if self._affords(trial, 1 + _DECIDING)]
        fastest = self._fastest()
        tolerance = _TOLERANCES[self._round - 1]

        def second_chance(trial: Trial) -> bool:
            # A round may have met a busy moment, and nothing may be slower than these plans.
            expected = self.predicted(trial) <= (1 + _INDIFFERENCE[1]) * fastest
            return trial.candidate.loss < 2 and expected

        return [t for t in self.trials if t.median <= (1 + tolerance) * fastest or second_chance(t)]

    def _enter(self, trial: Trial, settling: bool) -> None:
        steps = _SAMPLES if self._round <= _ROUNDS else _DECIDING
        self._current, self._settling, self._left = trial, settling, steps

    def _affords(self, trial: Trial, steps: int) -> bool:
        fastest = self._fastest()
        if not fastest:
            return True  # The first plan is measured whatever it takes.
        left = self._budget * fastest - self.cost
        expected = min([trial.typical, *trial.changes])
        if not trial.seconds:
            expected = self.predicted(trial)
            if trial.candidate.loss < 2:
                left = max(left, RESERVE * fastest)
        return expected <= fastest or steps * (expected - fastest) <= left

    @property
    def _leader(self) -> Trial:
        return min(self.trials, key=lambda trial: trial.median)

    def _undecided(self) -> list[Trial]:
        """Plans of which any may still be the fastest, and be so by more than makes no difference."""
        least, _ = _INDIFFERENCE
        fastest = self._fastest()
        errors = {trial: self._error(trial) for trial in self.trials if trial.seconds}
        return [
            trial
            for trial, error in errors.items()
            if trial.median == fastest or (least < error and trial.median <= (1 + error) * fastest)
        ]

    def _error(self, trial: Trial) -> float:
        """Twice the standard error of a plan's time over the fastest plan's."""
        if trial is self._leader or not trial.seconds:
            return 0.0
        inverse = (1 / math.sqrt(len(one.seconds)) for one in (trial, self._leader))
        return 2 * self._noise() * math.hypot(*inverse)

    def _noise(self) -> float:
        """The standard error of a median, times the root of the number of steps, relative to it.

        From the steps' median absolute deviation, as of a normal distribution; all plans are about as
        noisy.
        """
        deviations = [
            abs(seconds / trial.median - 1)
            for trial in self.trials
            if len(trial.seconds) >= _SAMPLES
            for seconds in trial.seconds
        ]
        return 1.25 * 1.4826 * statistics.median(deviations) if deviations else 0.0

    def _fastest(self) -> float:
        """Seconds of the fastest plan's steps; 0 before there is one."""
        return min((t.median for t in self.trials if t.seconds), default=0.0)


def _contenders(candidates: Sequence[Candidate]) -> list[Trial]:
    """Those without a codec, and the best of the others, in the order of their predictions.

    So those that may be best are tried while there is a budget, and who is far behind takes what is left.
    """
    codecs = [candidate for candidate in candidates if candidate.loss == 2]
    chosen = codecs[:_CONTENDERS]
    for candidate in codecs[_CONTENDERS:]:
        if all(candidate.exchanges != other.exchanges for other in chosen):
            chosen.append(candidate)
    return [Trial(one) for one in candidates if one.loss < 2 or one in chosen]
