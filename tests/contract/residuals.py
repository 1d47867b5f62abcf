"""The contract of residuals: through dropped steps, checkpoints, changes, and ranks that join."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hvd_compress import Route
from hvd_compress.codecs import (
    BF16,
    ECQ,
    ErrorFeedback,
    Int8,
    NoCompression,
    OneBit,
    PowerSGD,
    Ternary,
)
from hvd_compress.exchanges.shards import transpose_back
from tests.contract.beside import Beside
from tests.contract.cases import FULL, NONE, PARTIAL, ROWS, SHAPES, USUAL, WEAK, Row
from tests.contract.frontend import Arrays, Frontend

_BY_TWO_CODECS: Row = (OneBit("column"), FULL, Int8())
"""A rank keeps a residual of its gradient, and one of the part that it owns."""


def nonfinite_gradients(frontend: Frontend, exchange: str) -> None:
    """Every rank sees them; the step leaves no residual behind, and the next step is an ordinary one."""
    rows = _NONFINITE.get(exchange, [USUAL[exchange]])
    names = (
        ("a", "c", "a") if exchange == "low_rank" else ("a", "b", "c")
    )  # Vectors have no factors.
    bads = tuple(zip((np.inf, -np.inf, np.nan), names, strict=True))
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
    "two_shot": [
        (OneBit(), FULL),
        (OneBit("column"), FULL),
        (OneBit("tensor"), PARTIAL),
        (ECQ(), WEAK),
    ],
    "hierarchical": [(OneBit(), FULL), (ECQ(), WEAK), (OneBit(), FULL, Int8())],
    "integer_sum": [(Ternary(64), ErrorFeedback(0.1, 0.9)), (ECQ(), WEAK)],
}


def an_average_that_overflows(frontend: Frontend, exchange: str) -> None:
    """The average overflows although no gradient does."""
    _dropped(Beside(frontend, exchange, (BF16(), FULL)), {0, 1}, "a", 3e38)


def a_sum_beyond_half_precision(frontend: Frontend, exchange: str) -> None:
    """No rank has sent an Inf, but scalers of losses skip the step: nothing counts as sent."""
    shapes = {"a": (64, 32)}
    job = frontend.make(exchange, OneBit(), FULL, shapes, "float16")
    half = np.where(np.arange(64 * 32) % 2, np.float32(60000), np.float32(0)).reshape(64, 32)
    job.step({"a": half})
    before = job.kept()
    assert np.abs(before[0]["a"]).max() == 30000
    # With what was left, 90,000 of either sign.
    got = job.step({"a": 2 * half - 60000})
    assert np.isinf(got["a"]).all()
    for kept, now in zip(before, job.kept(), strict=True):
        for name, array in kept.items():
            np.testing.assert_allclose(now[name], array, rtol=1e-6)
    assert np.isfinite(job.step({"a": half / 4})["a"]).all()


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


def a_step_that_the_script_drops(frontend: Frontend, exchange: str) -> None:
    """The step leaves no residual behind, the next ones are ordinary, and a second call changes nothing."""

    def spike(everybodys: list[dict[str, np.ndarray]]) -> None:
        for one in everybodys:
            for gradient in one.values():
                gradient *= 1000

    def overflow(everybodys: list[dict[str, np.ndarray]]) -> None:
        everybodys[-1]["b"][17] = np.inf

    for view in frontend.views:
        for row in _NONFINITE.get(exchange, [USUAL[exchange]]):
            beside = Beside(frontend, exchange, row, seed=3, **view)
            beside.job.compressor.drop_step()  # There was none yet.
            for first, change in ((0, spike), (2, spike), (4, overflow)):
                beside.step(first, change=change)
                beside.drop_step()
                beside.drop_step()
                if first:
                    beside.assert_kept()
                beside.steps(first + 1)


def a_change_of_codec_that_the_script_drops(frontend: Frontend, exchange: str) -> None:
    """The former codec's residual, which was sent in that step, is restored."""
    (codec, feedback), other = USUAL[exchange], _CHANGES[exchange][0]
    beside = Beside(frontend, exchange)
    beside.steps(0, 1)
    for step, changed in ((2, (NoCompression(),)), (3, other), (4, (other[0], NONE))):
        before = beside.job.compressor.residual_norm()
        beside.job.compressor.set_codec(Route(*changed))
        beside.job.step(beside.everybodys(step)[frontend.rank])
        assert beside.job.compressor.residual_norm() != before
        beside.job.compressor.drop_step()
        beside.job.compressor.set_codec(Route(codec, feedback))
        beside.simulation.step += step > 2  # Only gradients that are encoded have noise.
        beside.assert_kept()
    beside.steps(5, 6)


def an_owner_step_that_the_script_drops(frontend: Frontend, exchange: str) -> None:
    """Steps of the cold start can be dropped, too; they count."""
    option, simulated = frontend.adagrad()
    beside = Beside(
        frontend,
        exchange,
        simulated={"owner_step": simulated, "warmup_steps": 3},
        owner_step=option,
        warmup_steps=3,
    )
    for step in range(8):
        beside.step(step)
        if step in (0, 2, 3, 5):
            beside.drop_step()
    beside.assert_kept()


def a_return_to_an_earlier_model(frontend: Frontend, exchange: str) -> None:
    """After ``reset()``, nothing of the forgotten steps comes back; the noise goes on."""
    adagrad = {}
    if exchange == "two_shot" and "an_owner_step_that_the_script_drops" not in frontend.cannot:
        option, simulated = frontend.adagrad()
        adagrad = {"owner_step": option, "simulated": {"owner_step": simulated}}
    drawn = [] if exchange == "low_rank" else [((Ternary(64), ErrorFeedback(0.1, 0.9)), {})]
    for row, options in ((USUAL[exchange], adagrad), *drawn):
        beside = Beside(frontend, exchange, row, seed=3, **options)
        beside.job.compressor.reset()  # There is nothing yet.
        beside.simulation.reset()
        beside.steps(0)
        beside.step(1, change=_explode)
        beside.reset()
        assert beside.job.compressor.residual_norm() == 0
        with pytest.raises(frontend.errors, match=r"drop_step: expected residuals as .*reset\(\)"):
            beside.job.compressor.drop_step()
        beside.steps(2, 3)
        beside.reset()
        beside.go_on_with_another_job()
        beside.steps(4)


def a_return_without_a_reset(frontend: Frontend, exchange: str) -> None:
    """One warning names the call, in the first step whose gradients are far smaller than residuals."""
    for view in frontend.views:
        beside = Beside(frontend, exchange, **view)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step, told in enumerate((0, 0, 0, 0, 1, 1)):
                beside.step(step, change=_explode if step == 3 else lambda _: None)
                advice = [one for one in caught if "call compressor.reset() on" in str(one.message)]
                assert len(advice) == told, (step, advice)


def _explode(everybodys: list[dict[str, np.ndarray]]) -> None:
    for one in everybodys:
        for gradient in one.values():
            gradient *= 1e7


def loaded_residuals_that_the_script_would_drop(frontend: Frontend, exchange: str) -> None:
    """A clear error: what the last exchange left is gone."""
    beside = Beside(frontend, exchange)
    beside.steps(0)
    beside.go_on_with_another_job()
    beside.job.compressor.drop_step()  # It has made no exchange.
    beside.steps(1)
    beside.assert_kept()
    beside.job.load(beside.job.save())
    with pytest.raises(frontend.errors, match="drop_step: expected residuals as the last"):
        beside.job.compressor.drop_step()
    beside.steps(2)
    beside.drop_step()
    beside.steps(3)


def a_checkpoint_goes_on_bit_for_bit(frontend: Frontend, exchange: str) -> None:
    """A new job takes over every other step."""
    drawn = (PowerSGD(1), NONE) if exchange == "low_rank" else (Ternary(), NONE)
    by_two_codecs = [_BY_TWO_CODECS] if exchange == "hierarchical" else []
    for row in (drawn, USUAL[exchange], *by_two_codecs):
        beside = Beside(frontend, exchange, row, seed=3)
        for step in range(3):
            beside.steps(2 * step, 2 * step + 1)
            beside.go_on_with_another_job()
        beside.steps(6)


def residuals_in_bfloat16(frontend: Frontend, exchange: str) -> None:
    """They are the reference's, after steps that are dropped and in another job, too."""
    row = _ROUNDED[exchange]
    _dropped(Beside(frontend, exchange, row, seed=3), {frontend.size - 1}, "a", np.nan)
    beside = Beside(frontend, exchange, row, seed=3)
    beside.steps(0, 1)
    beside.step(2)
    beside.drop_step()
    beside.assert_kept()
    beside.steps(3)
    beside.go_on_with_another_job()
    beside.steps(4, 5)


_HALVES = ErrorFeedback(1.0, 1.0, "bfloat16")
_ROUNDED: dict[str, Row] = {
    "allgather": (OneBit(), _HALVES),
    "two_shot": (OneBit("column"), ErrorFeedback(0.5, 0.75, "bfloat16")),
    "hierarchical": (OneBit(), _HALVES, Int8()),
    "integer_sum": (ECQ(), ErrorFeedback(0.01, 1.0, "bfloat16")),
}


def a_change_of_codec_loses_no_mass(frontend: Frontend, exchange: str) -> None:
    """The last one is none at all: what was not sent is in its gradients, and nothing is left."""
    beside = Beside(frontend, exchange)
    balance = _Balance(exchange)
    for step in range(8):
        if step in (2, 4, 6):
            beside.job.compressor.set_codec(Route(*_CHANGES[exchange][step // 2 - 1]))
        everybodys = beside.everybodys(3 * step)
        balance.add(beside.job.step(everybodys[frontend.rank]), everybodys)
    assert beside.job.compressor.residual_norm() == 0
    balance.check()


_CHANGES: dict[str, list[tuple[Any, ...]]] = {
    name: [(ECQ(), WEAK), (OneBit(512),), (NoCompression(),)] for name in ROWS
} | {
    "allgather": [(Int8("linear"), FULL), (OneBit("column"),), (NoCompression(),)],
    "two_shot": [(OneBit("column"), FULL), (OneBit(512),), (NoCompression(),)],
    "hierarchical": [(ECQ(), WEAK, "", Int8()), (OneBit("column"),), (NoCompression(),)],
    "integer_sum": [(ECQ(8, "linf"), WEAK), (ECQ(100, "l2", 128),), (NoCompression(),)],
    "low_rank": [
        (PowerSGD(5),),
        (OneBit(512), FULL, "two_shot"),
        (NoCompression(), NONE, "allgather"),
    ],
}


class _Balance:
    """The sum of all gradients, and the sum of all averages that have arrived."""

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
    """Each exchange loads the checkpoints of all ranks of another one, which keeps other residuals."""
    balance, saved = _Balance(exchange), []
    usual = _BY_TWO_CODECS if exchange == "hierarchical" else USUAL[exchange]
    others = (OneBit(), FULL) if exchange == "low_rank" else usual[:2]
    for number, chosen in enumerate(("two_shot", exchange, "allgather", exchange)):
        beside = Beside(frontend, chosen, usual if chosen == exchange else others)
        if saved:
            beside.job.take_over(saved)
        for step in range(2 * number, 2 * number + 2):
            everybodys = beside.everybodys(3 * step)
            balance.add(beside.job.step(everybodys[frontend.rank]), everybodys)
        balance.check(_unsent(beside, chosen))
        saved = frontend.gather(beside.job.save())
    frontend.barrier()


def _unsent(beside: Beside, exchange: str) -> dict[str, np.ndarray]:
    """Returns the part of the gradients that all ranks have yet to add to the average."""
    hosts = beside.frontend.size // beside.frontend.local if exchange == "hierarchical" else 1
    everybodys = beside.frontend.gather(beside.job.kept())
    total = {name: np.zeros(shape).reshape(-1) for name, shape in beside.shapes.items()}
    for rank, (whole, owned) in enumerate(everybodys):
        for name, kept in whole.items():
            if kept.size:
                total[name] += kept / beside.frontend.size
        for name, kept in owned.items():
            if kept.size:
                part = np.zeros_like(total[name])
                part[beside.simulation.part(name, rank)] = kept / hosts
                total[name] += transpose_back(part, beside.simulation.shared(name).transposed)
    return {name: one.reshape(beside.shapes[name]) for name, one in total.items()}


def a_rank_that_joins(frontend: Frontend, exchange: str) -> None:
    """A different rank joins in each epoch; the others continue, and afterwards all do so together.

    Under Horovod, the others' steps go uncompressed, and what was not sent waits. Under DDP, a rank that
    has joined sends zeros and what is left of its residual.
    """
    beside = Beside(frontend, exchange)
    for epoch, leaver in enumerate(frontend.leavers):
        _epoch(beside, leaver, first=4 * epoch, until=4 * epoch + 2)
    beside.steps(8, 9)


def a_rank_that_joins_at_once(frontend: Frontend, exchange: str) -> None:
    """The rank joins before the ranks have agreed on anything."""
    beside = Beside(frontend, exchange)
    _epoch(beside, leaver=1, first=0, until=0)
    beside.steps(4, 5)


def a_rank_that_joins_in_the_warm_up(frontend: Frontend, exchange: str) -> None:
    """Steps that some ranks make alone do not count, so that all begin to encode in the same step."""
    beside = Beside(frontend, exchange, warmup_steps=3)
    _uncompressed(beside, 0)
    with beside.job.joining():
        for step in range(1, 1 if frontend.rank == 1 else 5):
            _uncompressed(beside, step, leaver=1)
    _uncompressed(beside, 5)
    _uncompressed(beside, 6)
    beside.steps(7, 8)


def _epoch(beside: Beside, leaver: int, first: int, until: int) -> None:
    """Steps ``first`` to ``first + 3``, which one rank makes until ``until`` only."""
    frontend = beside.frontend
    last = first + 4
    with beside.job.joining():
        for step in range(first, until if frontend.rank == leaver else last):
            if step == until:
                sent = beside.job.counters.message_bytes
            if step < until:
                beside.step(step)
            elif frontend.zeros_after_join:
                beside.step(step, change=lambda everybodys: _silence(everybodys, leaver))
            else:
                _uncompressed(beside, step, leaver)
        if frontend.rank != leaver and not frontend.zeros_after_join:
            steps = last - until
            plain = sum(math.prod(shape) for shape in beside.shapes.values())
            tokens = frontend.token_bytes * sum(map(beside.codec.encodes, beside.shapes.values()))
            assert beside.job.counters.message_bytes - sent == steps * (4 * plain + tokens)
    if frontend.zeros_after_join and frontend.rank == leaver:
        for step in range(until, last):
            beside.leave_out(step, lambda everybodys: _silence(everybodys, leaver))


def _uncompressed(beside: Beside, step: int, leaver: int | None = None) -> None:
    """A step whose results are the ranks' average, without those of one that has joined."""
    everybodys = beside.everybodys(step)
    got = beside.job.step(everybodys[beside.frontend.rank])
    if leaver is not None:
        _silence(everybodys, leaver)
    for name in beside.shapes:
        mean = np.mean([one[name] for one in everybodys], axis=0)
        np.testing.assert_allclose(got[name], mean, rtol=1e-6, atol=2e-5)


def _silence(everybodys: list[dict[str, np.ndarray]], leaver: int) -> None:
    for gradient in everybodys[leaver].values():
        gradient[...] = 0
