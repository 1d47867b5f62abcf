"""The contract of results: all gradients get the reference's bits, in whatever way they come."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hvd_compress import Route
from hvd_compress.codecs import BF16, ECQ, Int8, OneBit, PowerSGD, Ternary
from hvd_compress.ranks.counters import sent_bytes
from tests.contract.beside import Beside, assert_mean
from tests.contract.cases import FULL, NONE, ROWS, SHAPES, USUAL, WEAK, Row
from tests.contract.frontend import Frontend


def every_codec(frontend: Frontend, exchange: str) -> None:
    """Averages and residuals are the reference's, and so the same on all ranks."""
    for row in ROWS[exchange]:
        if row[0].varies and not frontend.varies:
            continue
        Beside(frontend, exchange, row, seed=7).steps(0, 1, 2)


def the_default_exchange(frontend: Frontend, exchange: str) -> None:
    """The default is the exchange that sends the fewest bytes among so many ranks; routes say why."""
    for row in (USUAL[exchange], (Int8(), NONE)):
        beside = Beside(frontend, exchange, row, asked="auto", **frontend.one_bucket)
        beside.steps(0, 1, 2)
        route = beside.job.compressor.routes()[frontend.called(SHAPES)["a"]]
        assert (route.exchange, route.reason) == (exchange, f"auto, {frontend.size} ranks")
    elements = sum(map(math.prod, SHAPES.values()))
    fp16 = sent_bytes("all_reduce", frontend.size, 2 * elements)
    assert beside.job.counters.wire_bytes < 3 * fp16  # In the steps above, with Int8.


def payloads_of_any_length(frontend: Frontend, exchange: str) -> None:
    """One rank's payloads become long from one step to the next; plain codes would take more bytes."""
    jobs = [
        Beside(frontend, exchange, (ECQ(bucket=4096, coding=c), WEAK)) for c in ("plain", "entropy")
    ]

    def thin_out(everybodys: list[dict[str, np.ndarray]]) -> None:
        for rank, one in enumerate(everybodys):
            for name in SHAPES:
                if rank != 1 or step % 4 < 2:
                    one[name].reshape(-1)[rank % 2 :: 8] *= 100  # Most levels are 0 then.

    for step in range(6):
        for beside in jobs:
            beside.step(step, change=thin_out)
        if step == 4:
            jobs[1].job.load(jobs[1].job.save())
            jobs[1].job.compressor.set_codec(Route(*USUAL[exchange]))
            jobs[1].job.compressor.set_codec(Route(jobs[1].codec, jobs[1].feedback))
    for beside in jobs:
        beside.assert_kept()
    plain, coded = (beside.job.counters for beside in jobs)
    assert coded.wire_bytes - coded.local_bytes < plain.wire_bytes - plain.local_bytes
    assert coded.encoded_elements == plain.encoded_elements


def every_form(frontend: Frontend, exchange: str) -> None:
    """Tries every way to use the frontend."""
    for form in frontend.forms:
        if exchange in form.lacks:
            continue
        beside = Beside(frontend, exchange, **form.options)
        beside.steps(0, 1, factor=frontend.size if form.sums else 1.0)


def half_precision(frontend: Frontend, exchange: str) -> None:
    """Averages are rounded once, to the gradient's type."""
    for dtype in ("float16", "bfloat16"):
        Beside(frontend, exchange, dtype=dtype).steps(0, 1)


def other_defaults(frontend: Frontend, exchange: str) -> None:
    """The package's tensors do not follow the framework's default dtype and device, which users may set."""
    unbiased = [row for row in ROWS[exchange] if row[1] == NONE]
    for defaults in frontend.defaults:
        for row in (USUAL[exchange], unbiased[0]):
            with defaults():
                beside = Beside(frontend, exchange, row)
                beside.steps(0, 1)
            beside.go_on_with_another_job()


def long_messages(frontend: Frontend, exchange: str) -> None:
    """Messages of one length are gathered as a sum between two ranks; results must not show this."""
    for count in (2**19 + 7, 2**20):
        shapes = {"long": (count,), "short": (3000,)}
        Beside(frontend, exchange, (Int8(), NONE), shapes=shapes).step(0)


def some_of_the_ranks(frontend: Frontend, exchange: str) -> None:
    """Ranks 0 and 2 exchange, and rank 1 keeps its gradients."""
    group = frontend.group_of(0, 2)
    if frontend.outsiders or frontend.rank != 1:
        beside = Beside(frontend, exchange, ranks=(0, 2), **group)
        beside.steps(0, 1, 2)
        assert beside.job.counters.steps == (0 if beside.place is None else 3)


def gradients_in_another_order_on_each_rank(frontend: Frontend, exchange: str) -> None:
    """Hooks fire in another order on each rank; a gradient's result does not depend on it."""
    beside, names = Beside(frontend, exchange), list(SHAPES)
    for step in range(len(names)):
        turn = (step + frontend.rank) % len(names)
        beside.step(step, used=names[turn:] + names[:turn])
    beside.assert_kept()


def parameters_that_are_not_used(frontend: Frontend, exchange: str) -> None:
    """A rank that does not use one sends zeros and its residual's rest; if no rank does, see the row."""
    absent: list[set[str]] = [{"a"}, {"b", "c"}, {"c"}, set()][: frontend.size]
    for view in frontend.views:
        beside = Beside(frontend, exchange, **frontend.with_unused, **view)
        for step in range(5):
            lacking = [absent[(rank + step) % frontend.size] for rank in beside.ranks]
            if step == 4:
                lacking = [{"b"} for _ in beside.ranks]

            def leave_out(
                everybodys: list[dict[str, np.ndarray]],
                lacking: list[set[str]] = lacking,
                sent: bool = frontend.sends_unused,
            ) -> None:
                for one, names in zip(everybodys, lacking, strict=True):
                    for name in names:
                        one.update({name: np.zeros_like(one[name])})
                        if not sent:
                            del one[name]

            used = [name for name in SHAPES if name not in lacking[frontend.rank]]
            beside.step(step, used=used, change=leave_out)
        beside.assert_kept()


def zeros(frontend: Frontend, exchange: str) -> None:
    """The gradient of one tensor is zero on one rank, and that of others on all ranks."""
    beside = Beside(frontend, exchange)

    def clear(everybodys: list[dict[str, np.ndarray]]) -> None:
        everybodys[0]["a"][...] = 0
        for one in everybodys:
            one["b"][...] = one["tiny"][...] = 0

    beside.step(0, change=clear)
    beside.steps(1)


def uncompressed_at_first(frontend: Frontend, exchange: str) -> None:
    """Warm-up steps are a plain sum, and the codec begins behind them."""
    beside = Beside(frontend, exchange, warmup_steps=2)
    for step in range(2):
        everybodys = beside.everybodys(step)
        got = beside.job.step(everybodys[frontend.rank])
        for name in SHAPES:
            assert_mean(got[name], [one[name] for one in everybodys])
    beside.steps(2, 3)


def owner_steps_from_a_cold_start(frontend: Frontend, exchange: str) -> None:
    """The first averages are not encoded; a checkpoint and an Inf in the cold start change nothing."""
    option, simulated = frontend.adagrad()
    for codec in (OneBit(), OneBit("column")):
        beside = Beside(
            frontend,
            exchange,
            (codec, FULL),
            simulated={"owner_step": simulated, "warmup_steps": 2},
            owner_step=option,
            warmup_steps=2,
        )

        def overflow(everybodys: list[dict[str, np.ndarray]]) -> None:
            everybodys[-1]["b"][17] = np.inf

        beside.step(0)
        beside.step(1, change=overflow)
        beside.go_on_with_another_job()
        beside.steps(2, 3)
        beside.step(4, change=overflow)
        beside.steps(5)
    with pytest.raises(ValueError, match="a: expected a codec under which the ranks own the parts"):
        beside.job.compressor.set_codec(OneBit())
    beside.steps(6)
    with pytest.raises(ValueError, match="owner_step: expected exchange='two_shot'"):
        frontend.make("allgather", OneBit(), FULL, SHAPES, owner_step=option)


def each_tensor_its_own_route(frontend: Frontend, exchange: str) -> None:
    """One tensor has another codec, and Horovod or DDP adds up some tensors as they are."""
    others: dict[str, Row] = {"integer_sum": (Ternary(), NONE), "low_rank": (PowerSGD(1), FULL)}
    other = others.get(exchange, (Int8("linear"), NONE))
    inner = BF16() if exchange == "hierarchical" else None
    called = frontend.called(SHAPES)
    beside = Beside(
        frontend,
        exchange,
        threshold=2,
        exclude=[called["b"]],
        layers={called["c"]: Route(*other, inner=inner), called["tiny"]: None},
    )
    simulations = {
        "a": frontend.simulation(exchange, *USUAL[exchange], SHAPES),
        "c": frontend.simulation(exchange, *other, SHAPES, inner=inner),
    }
    for step in range(3):
        everybodys = beside.everybodys(step)
        got = beside.job.step(everybodys[frontend.rank])
        for name in SHAPES:
            if name in simulations:
                expected = simulations[name].average(everybodys)[name]
                beside.assert_same({name: got[name]}, {name: expected})
            else:
                assert_mean(got[name], [one[name] for one in everybodys])
    routes = beside.job.compressor.routes()
    assert {name for name in SHAPES if routes[called[name]].uncompressed} == {"b", "tiny", "scalar"}
    assert routes[called["c"]].codec == other[0] and routes[called["c"]].exchange == exchange
