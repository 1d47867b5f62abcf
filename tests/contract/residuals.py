"""What ranks keep: through dropped steps, checkpoints, changes, and ranks that join."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np

from hvd_compress.codecs import (
    BF16,
    ECQ,
    Codec,
    ErrorFeedback,
    Int8,
    NoCompression,
    OneBit,
    Ternary,
)
from tests.contract.beside import Beside
from tests.contract.cases import FULL, NONE, PARTIAL, ROWS, SHAPES, USUAL, WEAK, Row
from tests.contract.frontend import Arrays, Frontend


def nonfinite_gradients(frontend: Frontend, exchange: str) -> None:
    """They are seen on every rank, the step leaves no residual behind, and the next one is as ever."""
    rows = _NONFINITE.get(exchange, [USUAL[exchange]])
    bads = ((np.inf, "a"), (-np.inf, "b"), (np.nan, "c"))
    for view in frontend.views:
        for place in range(max(len(rows), len(bads))):
            bad, name = bads[place % len(bads)]
            row = rows[place] if place < len(rows) else rows[0]
            _dropped(Beside(frontend, exchange, row, **view), {frontend.size - 1}, name, bad)


_NONFINITE: dict[str, list[Row]] = {
    "allgather": [
        (OneBit(), FULL),
        (OneBit("column"), FULL),
        (OneBit("tensor"), PARTIAL),
        (Int8(), FULL),
        (Int8("linear", "tensor"), FULL),
        (ECQ(), WEAK),
    ],
    "two_shot": [(OneBit(), FULL), (OneBit("tensor"), PARTIAL), (ECQ(), WEAK)],
    "hierarchical": [(OneBit(), FULL), (ECQ(), WEAK)],
    "integer_sum": [(Ternary(64), ErrorFeedback(0.1, 0.9)), (ECQ(), WEAK)],
}


def an_average_that_overflows(frontend: Frontend, exchange: str) -> None:
    """Although no gradient does."""
    _dropped(Beside(frontend, exchange, (BF16(), FULL)), {0, 1}, "a", 3e38)


def _dropped(beside: Beside, ranks: set[int], name: str, bad: float) -> None:
    beside.steps(0, 1)

    def spoil(everybodys: list[dict[str, np.ndarray]]) -> None:
        for rank in ranks:
            everybodys[rank][name].reshape(-1)[17] = bad

    got = beside.step(2, change=spoil)
    assert not np.isfinite(got[name].reshape(-1)[17])
    if beside.frontend.exact:
        beside.steps(3)
    else:
        beside.assert_nearly_kept(2, (name, 17))
        got = beside.job.step(beside.everybodys(3)[beside.frontend.rank])
        assert all(np.isfinite(one).all() for one in got.values())


def a_checkpoint_goes_on_bit_for_bit(frontend: Frontend, exchange: str) -> None:
    """In a job of its own, every other step."""
    for row in ((Ternary(), NONE), USUAL[exchange]):
        beside = Beside(frontend, exchange, row, seed=3)
        for step in range(3):
            beside.steps(2 * step, 2 * step + 1)
            beside.go_on_with_another_job()
        beside.steps(6)


def a_change_of_codec_loses_no_mass(frontend: Frontend, exchange: str) -> None:
    """The last one is none at all: what was not sent is in its gradients, and nothing is left."""
    beside = Beside(frontend, exchange)
    balance = _Balance(exchange)
    for step in range(8):
        if step in (2, 4, 6):
            beside.job.compressor.set_codec(*_CHANGES[exchange][step // 2 - 1])
        everybodys = beside.everybodys(3 * step)
        balance.add(beside.job.step(everybodys[frontend.rank]), everybodys)
    assert beside.job.compressor.residual_norm() == 0
    balance.check()


_CHANGES: dict[str, list[tuple[Codec, ...]]] = {
    name: [(ECQ(),), (OneBit(512),), (NoCompression(),)] for name in ROWS
} | {
    "allgather": [(Int8("linear"), FULL), (OneBit("column"),), (NoCompression(),)],
    "integer_sum": [(ECQ(8, "linf"),), (ECQ(100, "l2", 128),), (NoCompression(),)],
}


class _Balance:
    """What was to be sent, and what has arrived."""

    def __init__(self, exchange: str) -> None:
        # Weak feedback piles up residuals that are large beside what is sent of them.
        self._tolerance = 1e-3 if exchange == "integer_sum" else 1e-4
        self._due = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        self._arrived = copy.deepcopy(self._due)

    def add(self, got: Arrays, everybodys: Sequence[Arrays]) -> None:
        for name in SHAPES:
            self._due[name] += np.mean([one[name] for one in everybodys], axis=0)
            self._arrived[name] += got[name]

    def check(self, unsent: Arrays | None = None) -> None:
        for name in SHAPES:
            arrived = self._arrived[name] + (unsent[name] if unsent else 0)
            np.testing.assert_allclose(arrived, self._due[name], atol=self._tolerance, err_msg=name)


def a_change_of_exchange_loses_no_mass(frontend: Frontend, exchange: str) -> None:
    """By way of the checkpoints of all ranks, to others and back; no exchange keeps what another kept."""
    balance, saved = _Balance(exchange), []
    for number, chosen in enumerate(("two_shot", exchange, "allgather", exchange)):
        beside = Beside(frontend, chosen, USUAL[exchange])
        if saved:
            beside.job.take_over(saved)
        for step in range(2 * number, 2 * number + 2):
            everybodys = beside.everybodys(3 * step)
            balance.add(beside.job.step(everybodys[frontend.rank]), everybodys)
        balance.check(_unsent(beside, chosen))
        saved = frontend.gather(beside.job.save())
    frontend.barrier()


def _unsent(beside: Beside, exchange: str) -> dict[str, np.ndarray]:
    """What all ranks would still add to the average."""
    hosts = beside.frontend.size // beside.frontend.local if exchange == "hierarchical" else 1
    everybodys = beside.frontend.gather(beside.job.kept())
    total = {name: np.zeros(shape).reshape(-1) for name, shape in beside.shapes.items()}
    for rank, (whole, owned) in enumerate(everybodys):
        for name, kept in whole.items():
            if kept.size:
                total[name] += kept / beside.frontend.size
        for name, kept in owned.items():
            if kept.size:
                total[name][beside.simulation.part(name, rank)] += kept / hosts
    return {name: one.reshape(beside.shapes[name]) for name, one in total.items()}


def a_rank_that_joins(frontend: Frontend, exchange: str) -> None:
    """The others go on; afterwards, all go on together from where they were.

    Under Horovod, the others' steps go uncompressed, and what was not sent waits. Under DDP, a rank that
    has joined sends zeros and what is left of its residual.
    """
    for leaver in frontend.leavers:
        _joins(frontend, exchange, leaver, steps=2)


def a_rank_that_joins_at_once(frontend: Frontend, exchange: str) -> None:
    """Before the ranks have agreed on anything."""
    _joins(frontend, exchange, leaver=1, steps=0)


def _joins(frontend: Frontend, exchange: str, leaver: int, steps: int) -> None:
    beside = Beside(frontend, exchange)

    def silent(everybodys: list[dict[str, np.ndarray]], leaver: int = leaver) -> None:
        for gradient in everybodys[leaver].values():
            gradient[...] = 0

    with beside.job.joining():
        for step in range(steps if frontend.rank == leaver else steps + 2):
            if step < steps:
                beside.step(step)
            elif frontend.zeros_after_join:
                beside.step(step, change=silent)
            else:
                everybodys = beside.everybodys(step)
                got = beside.job.step(everybodys[frontend.rank])
                silent(everybodys)
                for name in SHAPES:
                    mean = np.mean([one[name] for one in everybodys], axis=0)
                    np.testing.assert_allclose(got[name], mean, rtol=1e-6, atol=2e-5)
        sent = beside.job.counters.message_bytes
    if frontend.zeros_after_join and frontend.rank == leaver:
        for step in (steps, steps + 1):
            beside.leave_out(step, silent)
    assert frontend.zeros_after_join or beside.job.counters.message_bytes == sent
    if frontend.exact:
        beside.steps(4, 5)
    else:
        beside.assert_nearly_kept(steps)
