"""The contract of errors: configurations and gradients that must be refused."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from hvd_compress.codecs import (
    ECQ,
    Codec,
    NoCompression,
    OneBit,
    PowerSGD,
    Ternary,
)
from tests.contract.beside import Beside
from tests.contract.cases import FULL, NONE, SHAPES, USUAL, Row, gradients
from tests.contract.frontend import Frontend, Job


def what_it_cannot_carry(frontend: Frontend, exchange: str) -> None:
    """Raises an error before anything is sent; the ranks are then as they were."""
    with pytest.raises(ValueError, match=r"exchange: expected one of 'auto', .*got 'mail'"):
        frontend.make("mail", *USUAL[exchange], SHAPES)
    reasons = {
        "integer_sum": "expected a codec of evenly spaced levels around 0",
        "low_rank": r"expected PowerSGD\(\)",
    }
    if exchange in reasons:
        wrong: list[tuple[Row, dict[str, Any], str]] = [
            ((OneBit(), FULL), {}, "a"),
            (USUAL[exchange], {"layers": {frontend.called(SHAPES)["b"]: OneBit()}}, "b"),
        ]
        for row, options, name in wrong:
            reason = reasons[exchange]
            message = f"{frontend.called(SHAPES)[name]}: {reason}"
            with pytest.raises(ValueError, match=message):
                Beside(frontend, exchange, row, **options).step(0)
    if exchange == "low_rank":
        with pytest.raises(ValueError, match=r"expected 'low_rank' for .*, got 'two_shot': write"):
            frontend.make("two_shot", PowerSGD(), FULL, SHAPES)


def gradients_that_are_too_small(frontend: Frontend, exchange: str) -> None:
    """Warns once that nothing is compressed, unless the user asks for that."""
    small = {"a": (20, 1), "b": (1,)}
    every = {"exclude": tuple(frontend.called(small).values())}
    cases: list[tuple[Row, dict[str, Any], int]] = [
        (USUAL[exchange], {}, 1),
        (USUAL[exchange], every, 0),
        (USUAL[exchange], {"threshold": 20}, 0),
        ((NoCompression(), NONE), {}, 0),
    ]
    for row, options, times in cases:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            job = frontend.make(exchange, *row, small, **{"threshold": 1024, **options})
            for step in range(3):
                job.step(gradients(frontend.rank, step, small))
        told = [str(one.message) for one in caught]
        found = [text for text in told if "threshold=1024" in text and "(20, 1)" in text]
        assert len(found) == times, told


def ranks_that_disagree(frontend: Frontend, exchange: str) -> None:
    """Raises an error on every rank that names each rank's setting."""
    usual, called = USUAL[exchange], frontend.called(SHAPES)
    setting = {"integer_sum": ECQ(7), "low_rank": PowerSGD(3)}.get(exchange, OneBit(512))
    another = "two_shot" if exchange != "two_shot" else "allgather"
    cases: list[tuple[str, Row, dict[str, Any], str]] = [
        (exchange, (Ternary(), NONE), {}, r"{a}: .*{codec}.* on rank 0.*Ternary\(.*{last}"),
        (exchange, (setting, usual[1]), {}, r"{a}: .*{codec}.* on rank 0.*{setting}.*{last}"),
        (
            exchange,
            usual,
            {"threshold": 5000},
            r"{b}: .*{codec}.* on rank 0.*NoCompression.*{last}",
        ),
        (exchange, usual, {"seed": 1}, r"seed: 0 on rank 0.*, 1 {last}"),
        (another, usual, {}, r"{a}: .*through {exchange}.* on rank 0.*through {another}.*{last}"),
    ]
    if exchange == "low_rank":  # No other codec has it, nor has this codec another exchange.
        cases = [cases[1], cases[3]]
    elif exchange != "allgather":
        # What ranks compare does not depend on the exchange, but for its name.
        cases = [cases[0], cases[-1]]
    for theirs, row, options, pattern in cases:
        if frontend.rank < frontend.size - 1:
            theirs, row, options = exchange, usual, {}
        message = pattern.format(
            a=called["a"],
            b=called["b"],
            codec=re.escape(repr(usual[0])),
            setting=re.escape(repr(setting)),
            exchange=exchange,
            another=another,
            last=f"on rank {frontend.size - 1}",
        )
        job = frontend.make(theirs, *row, SHAPES, **options)
        with pytest.raises(frontend.errors, match=f"(?s){message}"):
            job.step(gradients(frontend.rank, 0, SHAPES))
        frontend.barrier()  # All of them are still there.


def half_precision_on_one_rank(frontend: Frontend, exchange: str) -> None:
    """Raises an error on every rank that names each rank's dtype, as after ``model.half()`` on one rank."""
    last = frontend.size - 1
    dtype = "float16" if frontend.rank == last else "float32"
    job = frontend.make(exchange, *USUAL[exchange], SHAPES, dtype)
    message = f"(?s){frontend.called(SHAPES)['a']}: .*float32.* on rank 0.*float16.* on rank {last}"
    with pytest.raises(frontend.errors, match=message):
        job.step(gradients(frontend.rank, 0, SHAPES))
    frontend.barrier()


def a_change_of_codec_on_some_ranks(frontend: Frontend, exchange: str) -> None:
    """Raises an error on every rank that says what happened, although messages would differ in length."""

    def change(job: Job) -> None:
        job.compressor.set_codec(_CHANGED[exchange])

    _on_the_last_rank(frontend, exchange, change)


def a_reset_on_some_ranks(frontend: Frontend, exchange: str) -> None:
    """Raises an error on every rank that says what happened: the others would send what it forgot."""
    _on_the_last_rank(frontend, exchange, lambda job: job.compressor.reset())


def _on_the_last_rank(frontend: Frontend, exchange: str, change: Callable[[Job], None]) -> None:
    last = frontend.size - 1
    # Some of it is not encoded; or it is so small that the last rank owns nothing, and that PowerSGD does
    # not encode it.
    cases: list[tuple[int, Mapping[str, tuple[int, ...]]]] = [(0, SHAPES), (8, SHAPES)]
    if exchange != "low_rank":
        cases.append((0, {"tiny": (3,)}))
    for threshold, shapes in cases:
        job = frontend.make(exchange, *USUAL[exchange], shapes, threshold=threshold)
        job.step(gradients(frontend.rank, 0, shapes))
        if frontend.rank == last:
            change(job)
        with pytest.raises(frontend.errors, match=f"on rank {last}"):
            job.step(gradients(frontend.rank, 1, shapes))
        frontend.barrier()  # All of them are still there.


_CHANGED: dict[str, Codec] = {"integer_sum": Ternary(), "low_rank": PowerSGD(5)} | dict.fromkeys(
    ("allgather", "two_shot", "hierarchical"), ECQ()
)
