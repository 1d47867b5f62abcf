"""After a fault of a rank, the others end with an error, or training continues with the right gradients.

These tests try each fault and each exchange, but not every combination; ``python -m tests.faults`` does.
"""

from __future__ import annotations

import itertools
import random

import pytest

from tests.contract.cases import ROWS
from tests.contract.frontends import FRONTENDS as OF_CONTRACT
from tests.faults.cases import FAULTS, STOCK, Case, exchanges_of
from tests.faults.frontends import FRONTENDS
from tests.faults.run import Ending, Outcome, run

SIGNALS = [name for name, fault in FAULTS.items() if fault.signal]
OTHERS = [name for name, fault in FAULTS.items() if not fault.signal]
EXCHANGES = list(ROWS)

BUILT_ON_OTHERS = [
    Case("keras", "two_shot", "kill"),
    Case("keras", "allgather", "slow"),
    Case("fsdp", "integer_sum", "kill"),
    Case("fsdp", "two_shot", "full disk"),
    Case("diloco", "hierarchical", "kill"),
    Case("diloco", "allgather", "slow"),
]
"""Cases of frontends that exchange as others do: for each, one in which ranks end, and one that goes on."""


def _cases() -> list[Case]:
    """Cases of signals for every frontend, and of each other fault for one frontend."""
    # Waiting for the timeout takes longest: once under Horovod, and once with a process group.
    signals = [
        (frontend, fault)
        for frontend, fault in itertools.product(OF_CONTRACT, SIGNALS)
        if fault != "hang" or frontend in ("torch", "ddp")
    ]
    pairs = [*signals, *zip(itertools.cycle(OF_CONTRACT), OTHERS, strict=False)]
    turns = itertools.cycle(EXCHANGES)
    cases = []
    for frontend, fault in pairs:
        exchange = next(one for one in turns if one in exchanges_of(frontend))
        cases.append(Case(frontend, exchange, fault))
    return cases + BUILT_ON_OTHERS


def _marks(frontend: str) -> pytest.MarkDecorator:
    others = {"distributed": "ddp", "fsdp": "ddp", "diloco": "ddp", "keras": "tensorflow"}
    return getattr(pytest.mark, others.get(frontend, frontend))


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
    assert {case.frontend for case in cases} == set(FRONTENDS)
    assert {case.fault for case in cases} == set(FAULTS)
    assert all(case.exchange in exchanges_of(case.frontend) for case in cases)
    for fault in SIGNALS:
        assert len({case.exchange for case in cases if case.fault == fault}) > 1, fault


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
