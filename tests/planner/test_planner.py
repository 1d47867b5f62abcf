"""The planner's phases, on simulated jobs."""

from __future__ import annotations

import copy
import dataclasses

from hvd_compress.exchange.routing import DENSE
from hvd_compress.planner.explain import describe, explain
from hvd_compress.planner.measured import Measured
from hvd_compress.planner.planner import Need, Planner, Report
from hvd_compress.planner.plans import price
from tests.planner.cases import LARGE, SHOTS, SMALL, measured

TENSORS = (LARGE, SMALL)
COMPUTING = 0.5
"""Seconds of a step beside the exchange."""


class Job:
    """Ranks whose steps take what the model predicts."""

    def __init__(self, bandwidth: float) -> None:
        self.bandwidth = bandwidth
        self.computing = COMPUTING
        self.planner = Planner(TENSORS, 4, 1)
        self.needs: list[Need] = []
        self.plans: list[object] = []

    @property
    def truth(self) -> Measured:
        return measured(self.bandwidth)

    def run(self, steps: int) -> Job:
        for _ in range(steps):
            self.plans.append(self.planner.plan)
            prices = [
                price(t, r, self.truth) for t, r in zip(TENSORS, self.planner.plan, strict=True)
            ]
            seconds = self.computing + sum(one.codec + one.wire for one in prices)
            need = self.planner.need()
            self.needs.append(need)
            if need is not Need.NOTHING:
                link = need in (Need.LINK, Need.ALL)
                self.planner.take(
                    Report(
                        seconds,
                        0.0,
                        self.truth.probe if link else None,
                        self.truth.speeds if need is Need.ALL else None,
                        overhead=0.01,
                    )
                )
        return self


def _steps_of(need: Need, job: Job) -> list[int]:
    return [step for step, one in enumerate(job.needs, start=1) if one is need]


def test_probes_then_trials_then_a_plan():
    job = Job(1e8).run(100)

    assert job.needs[0] is Need.NOTHING, "the first step negotiates names and allocates memory"
    assert _steps_of(Need.ALL, job) == [2, 3, 4]
    assert job.plans[0] == (SHOTS, DENSE), "the fewest bytes until more is known"
    assert job.planner.settled and job.planner.plans == 1
    assert job.planner.plan == (SHOTS, DENSE)
    trials = _steps_of(Need.SECONDS, job)
    assert trials[0] == 5 and trials == list(range(5, 5 + len(trials)))


def test_a_fast_network_goes_uncompressed():
    assert Job(1e11).run(100).planner.plan == (DENSE, DENSE)


def test_one_probe_is_enough_where_it_takes_long():
    job = Job(1e8)
    for _ in range(2):
        need = job.planner.need()
    assert need is Need.ALL
    job.planner.take(Report(1.0, 0.0, job.truth.probe, job.truth.speeds, overhead=3.0))
    assert job.planner.need() is Need.SECONDS


def test_looks_become_rare():
    job = Job(1e8).run(3000)
    looks = _steps_of(Need.LINK, job)
    assert looks[0] > 32 and 0.01 * len(looks) < 0.0015 * COMPUTING * 3000, "10 ms each"
    assert len(_steps_of(Need.SECONDS, job)) < 150, "a millisecond each, that cost less"


def test_another_rate_makes_another_plan():
    job = Job(1e8).run(200)
    assert job.planner.plan == (SHOTS, DENSE)

    job.bandwidth = 1e11
    job.run(150)

    assert job.planner.plans == 2 and job.planner.plan == (DENSE, DENSE)
    job.bandwidth = 1e8
    job.run(400)
    assert job.planner.plans == 3 and job.planner.plan == (SHOTS, DENSE)


def test_a_change_of_fast_links_makes_no_difference():
    job = Job(1e11).run(200)
    job.bandwidth = 2e10
    job.run(600)
    assert job.planner.plans == 1 and job.planner.plan == (DENSE, DENSE)
    assert job.planner.watch is not None and job.planner.watch.bandwidth < 3e10

    job.bandwidth = 1e8
    job.run(600)
    assert job.planner.plans == 2 and job.planner.plan == (SHOTS, DENSE)


def test_a_busy_moment_changes_nothing():
    job = Job(1e8).run(200)
    looks = job.needs.count(Need.LINK)
    job.bandwidth = 1e7
    while job.needs.count(Need.LINK) < looks + 2:
        job.run(1)
    job.bandwidth = 1e8
    job.run(200)
    assert job.planner.plans == 1


def test_a_busy_processor_has_nothing_measured_anew_until_it_is_cheap():
    job = Job(1e8).run(200)
    trials = job.planner.trials
    assert trials is not None
    cost = trials.cost / trials.best.median
    assert 1 < cost < 8

    job.computing = 2 * COMPUTING
    job.run(int(100 * cost) - 250)
    assert job.planner.plans == 1
    assert job.needs.count(Need.LINK) < 20, "the links are looked at, and found as they were"
    job.run(200)
    assert job.planner.plans == 2


def test_a_network_that_never_rests_is_not_measured_all_the_time():
    job = Job(1e8)
    for _ in range(40):
        job.bandwidth = 1e8 if job.bandwidth == 1e10 else 1e10
        job.run(50)
    assert job.planner.plans <= 7


def test_the_same_reports_make_the_same_plans():
    one, other = Job(3e9), Job(3e9)
    assert one.run(500).plans == other.run(500).plans


def test_a_step_without_some_ranks_postpones_what_was_due():
    job = Job(1e8).run(3)
    assert job.planner.need() is Need.ALL
    job.planner.postpone()
    job.run(60)
    assert job.planner.settled
    while job.planner.need() is not Need.LINK:
        pass
    job.planner.postpone()
    assert all(job.planner.need() is Need.NOTHING for _ in range(30))


def test_a_saved_plan_goes_on_and_is_watched():
    job = Job(1e8).run(200)
    later = Job(1e8)
    assert later.planner.restore(copy.deepcopy(job.planner.state()))
    assert later.planner.settled and later.planner.plan == job.planner.plan
    later.run(100)
    assert later.planner.plans == 0 and set(later.plans) == {job.planner.plan}

    elsewhere = Job(1e11)
    elsewhere.planner.restore(job.planner.state())
    elsewhere.run(200)
    assert elsewhere.planner.plans == 1 and elsewhere.planner.plan == (DENSE, DENSE)


def test_what_cannot_be_gone_on_with_is_measured_anew():
    undecided = Job(1e8).run(7).planner.state()
    assert not undecided["settled"]
    assert not Planner(TENSORS, 4, 1).restore(undecided)

    decided = Job(1e8).run(200).planner.state()
    others = (dataclasses.replace(LARGE, choices=LARGE.choices[:2]), SMALL)
    planner = Planner(others, 4, 1)
    assert not planner.restore(decided) and planner.need() is Need.NOTHING
    assert planner.need() is Need.ALL


def test_explanations_have_every_choice_with_its_costs():
    job = Job(1e8)
    assert "nothing is measured yet" in explain(job.planner)

    text = explain(job.run(200).planner)

    for name in ("none", "fp16", "int8 allgather", "onebit allgather", "onebit two_shot"):
        assert name in text
    assert "onebit two_shot for 1, none for 1 of the tensors" in text
    assert "Mbit/s that a rank sends: 800 by allreduce" in text
    prices = [price(LARGE, SHOTS, job.truth), price(SMALL, DENSE, job.truth)]
    cost = 1e3 * sum(one.codec + one.wire for one in prices)
    chosen = next(line for line in text.splitlines() if line.startswith("*"))
    cells = chosen.split()
    assert cells[1:3] == ["onebit", "two_shot"]
    assert f"{cost:.2f}" in cells, "the exchange"
    assert cells.count(f"{1e3 * COMPUTING + cost:.2f}") == 2, "the step, predicted and measured"
    slow = next(line for line in text.splitlines() if line.strip().startswith("none "))
    assert "not tried" in slow
    assert any(line.startswith("large") for line in text.splitlines())
    assert "1 tensors have no choice" in text


def test_plans_are_described_in_a_few_words():
    assert describe((SHOTS, DENSE), TENSORS) == "onebit two_shot for 1, none for 1 of the tensors"


def test_idle_steps_need_not_be_asked_about():
    asked, spared = Job(1e7).run(400), Job(1e7)
    steps = 0
    while steps < 400:
        idle = min(spared.planner.idle(), 400 - steps)
        spared.planner.skip(idle)
        spared.needs += [Need.NOTHING] * idle
        spared.plans += [spared.planner.plan] * idle
        steps += idle
        if steps < 400:
            spared.run(1)
            assert spared.needs[-1] is not Need.NOTHING
            steps += 1
    assert spared.needs == asked.needs and spared.plans == asked.plans
    assert spared.planner.step == asked.planner.step == 400
    assert asked.needs.count(Need.NOTHING) > 300
