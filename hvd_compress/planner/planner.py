"""The planner's phases: probe links and codecs, try the best plans, keep the best, watch the network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from hvd_compress.perfmodel.machines import CodecSpeed
from hvd_compress.planner.measured import KINDS, Coding, Measured, Probe, best
from hvd_compress.planner.plans import Plan, Tensor, behind, propose, smallest
from hvd_compress.planner.trials import Trials
from hvd_compress.planner.watch import Watch

_BURSTS = 3
_ENOUGH = 2.0
"""Probes of the links and the codecs, one at the end of each of the first steps: so many at most, and no
more once they have taken as long as so many steps. Where they take long, the network is slow, and
disturbances count for little."""

_WATCHING = 1e-3
"""Part of the time that looks at steps may take, and another that looks at the links may take."""

_SHORTEST, _LONG, _LONGEST = 32, 128, 1024
_AGAIN = 4
"""Steps from one look to the next: at least; at most, where only steps are looked at, and where links are;
and after one that found a change."""

_QUIET = 64
"""Steps without a second look at a plan after it was made, doubled with each plan up to 1,024."""

_WORTH = 100
"""Planning again where the links are as they were has to wait for so many times the steps that it cost: a
machine that is busy now and then makes steps longer, too, and may have it cost 1% at most."""

_MATTERS = 0.03
"""Part of a step that a plan has to lose by a change of the links for another one to be looked for."""


class Need(Enum):
    """What ranks have to measure and share at the end of a step."""

    NOTHING = 0
    SECONDS = 1
    """How long the step took."""
    LINK = 2
    """How fast an allreduce is, too."""
    ALL = 3
    """How fast all kinds of collectives and the codecs are, too."""


@dataclass(frozen=True)
class Report:
    """What the ranks have measured, the same on all of them.

    Attributes:
        seconds: of a step, on the slowest rank; the median since the last report.
        window: seconds of the backward pass in which messages travel, on the fastest rank.
        probe: of the links, where it was needed.
        speeds: of the codecs, where they were needed.
        overhead: seconds that measuring took.
    """

    seconds: float
    window: float = 0.0
    probe: Probe | None = None
    speeds: Mapping[Coding, CodecSpeed] | None = None
    overhead: float = 0.0


class Planner:
    """Decides how each gradient travels; makes the same decisions from the same reports.

    A frontend calls :meth:`need` once at the end of each step, does what it asks for, hands the ranks'
    agreed report to :meth:`take`, and makes the next step with :attr:`plan`. It may leave out steps that
    are :meth:`idle`, and :meth:`skip` them.

    Args:
        tensors: the gradients of a step.
        hosts: how many there are.
        local: ranks on each.
    """

    def __init__(self, tensors: Sequence[Tensor], hosts: int, local: int) -> None:
        self.tensors = tuple(tensors)
        self.hosts, self.local = hosts, local
        self.plan: Plan = smallest(self.tensors, hosts, local)
        self.step = 0
        self.plans = 0
        """How many plans have been made."""
        self.reason = "nothing is measured yet"
        self.measured: Measured | None = None
        self.trials: Trials | None = None
        self.watch: Watch | None = None
        self._probes: list[Report] = []
        self._probing = True
        self._next_look = self._next_probe = 0
        self._planned_at = 0
        self._small = 0.0

    @property
    def settled(self) -> bool:
        """Whether a plan has been decided on."""
        return self.watch is not None

    def need(self) -> Need:
        """Counts a step that is over, and tells what has to be measured at its end."""
        self.step += 1
        if self._probing:
            return Need.NOTHING if self.step == 1 else Need.ALL
        if self.settled:
            if self.step >= self._next_probe:
                return Need.LINK
            return Need.SECONDS if self.step >= self._next_look else Need.NOTHING
        return Need.SECONDS

    def idle(self) -> int:
        """How many of the next steps need nothing: of those, :meth:`need` does not have to be asked."""
        if self._probing:
            return max(0, 1 - self.step)
        if not self.settled:
            return 0
        return max(0, min(self._next_look, self._next_probe) - self.step - 1)

    def skip(self, steps: int) -> None:
        """Counts steps that are over, no more than :meth:`idle`."""
        self.step += steps

    def take(self, report: Report) -> None:
        """Takes what :meth:`need` asked for."""
        if self._probing:
            self._take_probe(report)
        elif self.settled:
            self._look(report)
        else:
            self._take_trial(report)

    def postpone(self) -> None:
        """Called in place of :meth:`take` where not all ranks took part in the step."""
        if self.settled:
            self._next_look = self._next_probe = self.step + _SHORTEST

    def state(self) -> dict[str, Any]:
        """What a later job needs to go on with the plan."""
        return {
            "plan": self.plan,
            "settled": self.settled,
            "bandwidth": None if self.watch is None else self.watch.bandwidth,
        }

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Goes on with a plan of :meth:`state`, and looks at the network soon.

        Returns:
            Whether it was a plan that had been decided on, and that is among today's choices; if not, the
            planner begins anew.
        """
        plan = tuple(state["plan"])
        known = len(plan) == len(self.tensors) and all(
            route in tensor.choices for route, tensor in zip(plan, self.tensors, strict=True)
        )
        if not (known and state["settled"]):
            return False
        self.plan, self._probing, self.trials = plan, False, None
        self.reason = "goes on with the plan of a saved state"
        self.watch = Watch(state["bandwidth"])
        self._next_look = self._next_probe = self.step + _AGAIN
        return True

    def _take_probe(self, report: Report) -> None:
        assert report.probe is not None and report.speeds is not None
        self._probes.append(report)
        overhead = sum(probe.overhead for probe in self._probes)
        if len(self._probes) < _BURSTS and overhead < _ENOUGH * report.seconds:
            return
        self.measured = Measured(
            self.hosts,
            self.local,
            best([probe.probe for probe in self._probes if probe.probe is not None]),
            _fastest([probe.speeds for probe in self._probes if probe.speeds is not None]),
            min(probe.window for probe in self._probes),
        )
        self.trials = Trials(propose(self.tensors, self.measured), overhead)
        self._probing, self._probes = False, []
        self.plan, self.reason = self.trials.plan, "is tried for a few steps"

    def _take_trial(self, report: Report) -> None:
        assert self.trials is not None
        self.trials.record(report.seconds)
        self.plan = self.trials.plan
        if self.trials.done:
            assert self.measured is not None
            self.plans += 1
            self.reason = "its steps were the fastest, or as fast as any"
            self.watch = Watch(self.measured.probe.bandwidth(KINDS[0]), self.trials.best.median)
            self._planned_at = self.step
            self._next_look = self._next_probe = self.step + _SHORTEST

    def _look(self, report: Report) -> None:
        assert self.watch is not None
        probe = report.probe
        bandwidth = None if probe is None else probe.bandwidth(KINDS[0])
        changed = self.watch.changed(report.seconds, bandwidth)
        if changed and bandwidth is not None and not self._matters(bandwidth, report.seconds):
            self.watch.accept(bandwidth)
            changed = False
        if changed and self.step >= self._planned_at + self._quiet():
            self.reason = f"is measured anew: {self.watch.reason}"
            self.watch, self._probing = None, True
            return
        if probe is not None:
            self._next_probe = self.step + _period(report.overhead, report.seconds, _LONGEST)
            self._small = probe.small
        self._next_look = self.step + _period(self._small, report.seconds, _LONG)
        if self.watch.suspicious and not changed:
            self._next_probe = self.step + _AGAIN  # Is it the links?

    def _matters(self, bandwidth: float, step: float) -> bool:
        """Whether another plan is predicted to be better, now that the links are no longer what they were.

        What fast links do is uncertain, and makes no difference.
        """
        assert self.watch is not None
        if self.measured is None or not self.watch.suspects_links:
            return True
        then = self.measured.probe.bandwidth(KINDS[0])
        now = self.measured.with_links(bandwidth / then)
        lost = behind(self.tensors, self.plan, now) - behind(self.tensors, self.plan, self.measured)
        return lost > _MATTERS * step

    def _quiet(self) -> int:
        """Steps from one plan to the next, at least."""
        assert self.watch is not None
        quiet = min(_QUIET << self.plans, _LONGEST) if self.plans > 1 else 0
        if self.watch.suspects_links or self.trials is None:
            return quiet
        spent = self.trials.cost / max(self.trials.best.median, 1e-9)
        return max(quiet, math.ceil(_WORTH * spent))


def _period(cost: float, step: float, longest: int) -> int:
    """Steps from one look to the next, so that looks take no more of the time than they may."""
    return min(max(math.ceil(cost / max(_WATCHING * step, 1e-9)), _SHORTEST), longest)


def _fastest(bursts: Sequence[Mapping[Coding, CodecSpeed]]) -> dict[Coding, CodecSpeed]:
    return {
        coding: CodecSpeed(
            encode=min(burst[coding].encode for burst in bursts),
            decode=min(burst[coding].decode for burst in bursts),
        )
        for coding in bursts[0]
    }
