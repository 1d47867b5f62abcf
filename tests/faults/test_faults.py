"""Faults of a rank: the others end with an error, or training goes on with the right gradients.

Each fault and each exchange is tried here, but not all of them together: ``python -m tests.faults`` does.
"""

from __future__ import annotations

import itertools
import random

import pytest

from tests.contract.cases import ROWS
from tests.contract.frontends import FRONTENDS
from tests.faults.cases import FAULTS, STOCK, Case
from tests.faults.run import Ending, Outcome, run

SIGNALS = [name for name, fault in FAULTS.items() if fault.signal]
OTHERS = [name for name, fault in FAULTS.items() if not fault.signal]
EXCHANGES = list(ROWS)


def _cases() -> list[Case]:
    """Signals to ranks of every frontend, and what a rank does by itself to one each."""
    pairs = [
        *itertools.product(FRONTENDS, SIGNALS),
        *zip(itertools.cycle(FRONTENDS), OTHERS, strict=False),
    ]
    turns = itertools.cycle(EXCHANGES + EXCHANGES[:1])  # So that no signal has one exchange alone.
    return [
        Case(frontend, exchange, fault)
        for (frontend, fault), exchange in zip(pairs, turns, strict=False)
    ]


def _marks(frontend: str) -> pytest.MarkDecorator:
    return getattr(pytest.mark, {"distributed": "ddp"}.get(frontend, frontend))


@pytest.mark.parametrize(
    "case", [pytest.param(one, marks=_marks(one.frontend), id=str(one)) for one in _cases()]
)
def test_nothing_goes_on_wrong_and_nobody_waits(case: Case) -> None:
    outcome = run(case, random.Random(0))
    assert not outcome.problems(), f"{outcome.problems()}\n{outcome.printed}"
    others = outcome.endings[:-1]
    if FAULTS[case.fault].ends:
        assert all(one.error and one.status == 1 for one in others), others
    if case.fault == "full disk":
        assert "too large" in outcome.refused.lower(), outcome.refused


@pytest.mark.quick
def test_every_exchange_and_every_fault_is_tried() -> None:
    cases = _cases()
    assert {case.exchange for case in cases} == set(ROWS)
    assert {(case.frontend, case.fault) for case in cases} >= set(
        itertools.product(FRONTENDS, SIGNALS)
    )
    assert {case.fault for case in cases} == set(FAULTS)


@pytest.mark.quick
def test_what_is_not_as_promised_is_found() -> None:
    ended = Ending(steps=5, error="E: e", raised=0.1, ended=0.2, status=1)
    wrong = Ending(steps=5, ended=0.2, status=0)
    waits = Ending(steps=5)
    found = Outcome(Case("torch", STOCK, "kill"), [wrong, waits, ended]).problems()
    assert [one.split()[:2] for one in found] == [["rank", "0"], ["rank", "1"]]
    found = Outcome(Case("torch", STOCK, "stop"), [ended, wrong, wrong]).problems()
    assert len(found) == 3
    assert Outcome(Case("torch", STOCK, "stop"), failed="why").problems() == ["why"]
