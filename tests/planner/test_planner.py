"""The planner's phases, on simulated jobs."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Sequence

from hvd_compress.exchanges.routing import UNCOMPRESSED_ROUTE
from hvd_compress.planner.explain import explain
from hvd_compress.planner.machines import CodecSpeed
from hvd_compress.planner.measured import KINDS, Coding, Measured
from hvd_compress.planner.planner import Planner
from hvd_compress.planner.plans import price_of
from tests.planner.cases import GATHERED, LARGE, SHOTS, SMALL, measured

TENSORS = (LARGE, SMALL)
COMPUTING = 0.5
"""Seconds of a step beside the exchange."""

RANKS = 4


class Job:
    """Ranks that are alike, and whose steps take what the model predicts; its own prober."""

    sent = measured(1.0).sent

    def __init__(self, bandwidth: float, overhead: float = 0.01) -> None:
        self.bandwidth, self.overhead = bandwidth, overhead
        self.computing = COMPUTING
        self.planner = planner(self)
        self.shared: list[list[str]] = []
        """The texts that ranks share at the end of each step."""
        self.plans: list[object] = []
        self._slower = iter(())

    @property
    def truth(self) -> Measured:
        return measured(self.bandwidth)

    def run(self, steps: int) -> Job:
        for _ in range(steps):
            self.plans.append(self.planner.plan)
            self.shared.append([])
            exchange = price_of(TENSORS, self.planner.plan, self.truth).total
            before = self.planner.plan
            changed = self.planner.end_step(self.computing + exchange)
            assert changed == (self.planner.plan != before)
        return self

    def add(self, numbers: list[float], what: str) -> list[float]:
        self.shared[-1].append(what)
        row = numbers[: len(numbers) // RANKS]
        return row * RANKS

    def measure(self, kinds: Sequence[str], codings: Sequence[Coding]) -> list[float]:
        truth, worse = self.truth, next(self._slower, 1.0)
        speeds = [(truth.speeds[coding], truth.bits.get(coding, 0.0)) for coding in codings]
        times = [worse * truth.large[kind] for kind in kinds]
        return [
            truth.small,
            *times,
            *(part for s, bits in speeds for part in (s.encode, s.decode, bits)),
            self.overhead,
        ]

    def steps_with(self, what: str) -> list[int]:
        """The steps at whose end ranks share that."""
        return [step for step, names in enumerate(self.shared, start=1) if what in names]


LOOK = f"planner probe of {2 + len(KINDS[:1])}"


def planner(job: Job, tensors: Sequence = TENSORS, size: int = RANKS) -> Planner:
    return Planner(tensors, rank=0, size=size, local=1, sum_over_ranks=job.add, prober=job)


def test_probes_then_trials_then_a_plan():
    job = Job(1e8).run(100)

    assert job.shared[:3] == [[]] * 3, "the first steps negotiate names and allocate memory"
    assert len(job.shared[3]) == 1 + 3 and len(set(job.shared[3])) == 2, "three bursts"
    assert set(job.plans[:4]) == {(SHOTS, UNCOMPRESSED_ROUTE)}, (
        "the fewest bytes until more is known"
    )
    assert job.planner.settled and job.planner.plans == 1
    assert job.planner.plan == (SHOTS, UNCOMPRESSED_ROUTE)
    trials = [n for n in job.steps_with("planner step") if n > 4 and n not in job.steps_with(LOOK)]
    assert len(trials) > 4 and trials == list(range(5, 5 + len(trials)))


def test_a_fast_network_goes_uncompressed():
    assert Job(1e11).run(100).planner.plan == (UNCOMPRESSED_ROUTE, UNCOMPRESSED_ROUTE)


def test_one_probe_is_enough_where_it_takes_long():
    assert len(Job(1e8, overhead=3.0).run(4).shared[3]) == 1 + 1


def test_the_fastest_burst_counts():
    job = Job(1e8)
    job._slower = iter([7.0, 1.0, 3.0])
    assert job.run(5).planner.measured == job.truth


def test_a_short_probe_is_repeated_however_short_a_step_is():
    job = Job(1e11, overhead=0.08)
    job.computing, job._slower = -0.05, iter([100.0, 1.0, 1.0])  # The exchange takes 57 ms.
    assert job.run(5).planner.measured == job.truth


def test_looks_become_rare():
    job = Job(1e8).run(3000)
    looks = job.steps_with(LOOK)
    assert looks[0] > 32 and 0.01 * len(looks) < 0.0015 * COMPUTING * 3000, "10 ms each"
    rare = Job(1e8, overhead=1.0).run(3000)
    assert len(rare.steps_with(LOOK)) < 0.0015 * COMPUTING * 3000 + 1


def test_another_rate_makes_another_plan():
    job = Job(1e8).run(200)
    assert job.planner.plan == (SHOTS, UNCOMPRESSED_ROUTE)

    job.bandwidth = 1e11
    job.run(150)

    assert job.planner.plans == 2 and job.planner.plan == (UNCOMPRESSED_ROUTE, UNCOMPRESSED_ROUTE)
    job.bandwidth = 1e8
    job.run(400)
    assert job.planner.plans == 3 and job.planner.plan == (SHOTS, UNCOMPRESSED_ROUTE)


def test_a_change_of_fast_links_makes_no_difference():
    job = Job(1e11).run(200)
    job.bandwidth = 2e10
    job.run(600)
    assert job.planner.plans == 1 and job.planner.plan == (UNCOMPRESSED_ROUTE, UNCOMPRESSED_ROUTE)
    assert job.planner.state()["bandwidth"] < 3e10

    job.bandwidth = 1e8
    job.run(600)
    assert job.planner.plans == 2 and job.planner.plan == (SHOTS, UNCOMPRESSED_ROUTE)


def _looks(job: Job, *seen: tuple[float, float]) -> None:
    """Looks at a bandwidth and a computation, one after the other; then as before."""
    before = job.bandwidth, job.computing
    for bandwidth, computing in seen:
        job.bandwidth, job.computing = bandwidth, computing
        count = len(job.steps_with(LOOK))
        while len(job.steps_with(LOOK)) == count:
            job.run(1)
    job.bandwidth, job.computing = before


def test_a_disturbance_changes_nothing():
    job = Job(1e8).run(200)
    _looks(job, *[(1e7, COMPUTING)] * 2)
    job.run(200)
    _looks(job, *[(1e7, COMPUTING), (1e7, COMPUTING), (1e8, COMPUTING)] * 5)
    _looks(job, *[(1.3e8, 1.2 * COMPUTING), (0.8e8, 0.8 * COMPUTING)] * 5)
    assert job.planner.plans == 1 and job.planner.settled


def test_opposite_changes_do_not_add_up():
    job = Job(1e8).run(200)
    _looks(job, *[(1e7, COMPUTING), (1e9, COMPUTING)] * 5)
    assert job.planner.plans == 1 and job.planner.settled


def test_a_change_is_looked_at_again_soon():
    job = Job(1e8).run(200)
    job.bandwidth = 1e11
    first = job.planner._due
    job.run(first + 8 - 200)
    assert [n for n in job.steps_with(LOOK) if n > 200] == [first, first + 4, first + 8]
    assert not job.planner.settled and "measured anew: the bandwidth rose" in explain(job.planner)


def test_a_busy_processor_has_nothing_measured_anew() -> None:
    """Longer steps alone do not say which plan is best."""
    job = Job(1e8).run(200)
    job.computing = 2 * COMPUTING
    job.run(1000)
    assert job.planner.plans == 1 and job.planner.settled
    assert len(job.steps_with(LOOK)) < 40, "the links are looked at, and found as they were"


def test_a_network_that_never_rests_is_not_measured_all_the_time():
    job = Job(1e8)
    for _ in range(40):
        job.bandwidth = 1e8 if job.bandwidth == 1e10 else 1e10
        job.run(50)
    assert job.planner.plans <= 7


def test_the_same_measurements_make_the_same_plans():
    one, other = Job(3e9), Job(3e9)
    assert one.run(500).plans == other.run(500).plans


def test_a_saved_plan_goes_on_and_is_watched():
    job = Job(1e8).run(200)
    state = json.loads(json.dumps(job.planner.state()))
    later = Job(1e8)
    later.planner.restore(copy.deepcopy(state))
    assert later.planner.settled and later.planner.plan == job.planner.plan
    assert later.planner._due <= 4
    later.run(100)
    assert later.planner.plans == 0 and set(later.plans) == {job.planner.plan}

    elsewhere = Job(1e11)
    elsewhere.planner.restore(state)
    elsewhere.run(200)
    assert elsewhere.planner.plans == 1 and elsewhere.planner.plan == (
        UNCOMPRESSED_ROUTE,
        UNCOMPRESSED_ROUTE,
    )


def test_what_cannot_be_gone_on_with_is_measured_anew():
    job = Job(1e8).run(7)
    undecided = job.planner.state()
    assert not undecided["settled"]
    anew = planner(job)
    anew.restore(undecided)
    assert not anew.settled

    decided = job.run(200).planner.state()
    others = (dataclasses.replace(LARGE, choices=LARGE.choices[:2]), SMALL)
    anew = planner(job, others)
    anew.restore(decided)
    assert not anew.settled and anew._due == 4


def test_a_state_from_within_a_second_measurement_is_measured_anew():
    """The first plan is still in use then, but was made for another network."""
    job = Job(1e8).run(200)
    job.bandwidth = 1e11
    while job.planner.settled:
        job.run(1)
    state = job.run(6).planner.state()
    assert job.planner.plans == 1 and job.planner.trials is not None

    anew = Job(1e11)
    anew.planner.restore(json.loads(json.dumps(state)))
    assert not anew.planner.settled
    anew.run(200)
    assert anew.planner.plans == 1 and anew.planner.plan == (UNCOMPRESSED_ROUTE,) * 2


def test_explanations_have_every_plan_with_its_costs():
    job = Job(1e8)
    assert "nothing is measured yet" in explain(job.planner)

    text = explain(job.run(200).planner)

    for name in ("none", "fp16", "int8 allgather", "onebit allgather", "onebit two_shot"):
        assert name in text
    assert "onebit two_shot for 1, none for 1 of the tensors" in text
    assert "Mbit/s that a rank sends: 800 by all_reduce" in text
    cost = 1e3 * price_of(TENSORS, (SHOTS, UNCOMPRESSED_ROUTE), job.truth).total
    chosen = next(line for line in text.splitlines() if line.startswith("*"))
    cells = chosen.split()
    assert cells[1:3] == ["onebit", "two_shot"]
    assert f"{cost:.2f}" in cells, "the exchange"
    assert cells.count(f"{1e3 * COMPUTING + cost:.2f}") == 2, "the step, predicted and measured"
    slow = next(line for line in text.splitlines() if line.strip().startswith("none "))
    assert "not tried" in slow
    assert text.splitlines()[-2:] == ["onebit two_shot: large", "none: small"]


def test_explanations_predict_steps_on_other_links():
    job = Job(1e8).run(200)
    text = explain(job.planner)

    assert f"a step, of which {1e3 * COMPUTING:.2f} ms are not the exchange, predicted" in text
    there = job.truth.with_links(50e6 / 8e8)
    seconds = [
        COMPUTING + price_of(TENSORS, plan, there).total
        for plan in ((UNCOMPRESSED_ROUTE,) * 2, (SHOTS, UNCOMPRESSED_ROUTE))
    ]
    none, best = (f"{1e3 * one:.2f}" for one in seconds)
    row = re.search(r"^ *50 Mbit/s +(.*)$", text, re.MULTILINE)
    assert row and row[1].split()[:2] == [none, best], text
    # Where one collective was faster than another, as in the memory of one machine, a link is one rate.
    large = {kind: (1 + n) * one for n, (kind, one) in enumerate(job.truth.large.items())}
    job.planner.measured = dataclasses.replace(job.truth, large=large)
    assert row[0] in explain(job.planner)
    job = Job(1e8)
    job.shared.append([])
    job.planner.predict()
    assert "the exchange, predicted on other links:" in explain(job.planner)


def test_plans_are_described_in_a_few_words():
    job = Job(1e8)
    job.planner.plan = (SHOTS, UNCOMPRESSED_ROUTE)
    assert explain(job.planner).splitlines()[0] == (
        "step 0, plan 1, not decided yet: onebit two_shot for 1, none for 1 of the tensors"
    )


def test_without_a_choice_nothing_is_measured():
    job = Job(1e8)
    for one in (planner(job, (SMALL,)), planner(job, size=1)):
        one.restore(one.state())
        assert one.settled and not any(one.end_step(1.0) for _ in range(50)) and not job.shared
        assert set(one.plan) == {UNCOMPRESSED_ROUTE} and one.predict() == one.plan
        assert explain(one).startswith("nothing to choose")


def test_a_plan_by_prediction_alone():
    """No step is made; the plan is the one that trials find, too."""
    for bandwidth in (1e7, 1e8, 1e11):
        job = Job(bandwidth)
        job.shared.append([])
        assert job.planner.predict() == Job(bandwidth).run(200).planner.plan
        assert job.planner.settled and job.planner.predict() == job.planner.plan
        assert "predicted to be the fastest" in explain(job.planner)
        assert len(job.shared[0]) == 3 and job.planner.step == 0


def test_a_prediction_that_a_disturbance_explains_is_not_followed():
    """The links are fast, and slow in all bursts but one; and 1-bit is not that much faster."""
    job = Job(1e11)
    job._slower = iter([1000.0, 1000.0, 1.0])
    job.shared.append([])
    assert job.planner.predict() == (UNCOMPRESSED_ROUTE, UNCOMPRESSED_ROUTE)


def test_the_slowest_rank_counts():
    reported = (3.0, 5.0, 4.0, 2.0)

    def add(numbers: list[float], what: str) -> list[float]:
        width = len(numbers) // RANKS
        if what == "planner step":
            return [x for seconds in reported for x in (seconds, 1.0)]
        row = numbers[: width - 1]
        slower = [2 * x for x in row]
        return [x for rank in range(RANKS) for x in (*(slower if rank == 2 else row), 1.0)]

    job = Job(1e8)
    one = Planner(TENSORS, rank=0, size=RANKS, local=1, sum_over_ranks=add, prober=job)
    for _ in range(4):
        one.end_step(3.0)
    assert one.measured is not None
    assert one.measured.small == 2 * job.truth.small
    speed = job.truth.speed(GATHERED)
    assert one.measured.speed(GATHERED) == CodecSpeed(2 * speed.encode, 2 * speed.decode)
    for _ in range(5):
        one.end_step(3.0)
    assert one.trials is not None and {s for t in one.trials.trials for s in t.seconds} == {5.0}
