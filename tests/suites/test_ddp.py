"""With a compressor, models pass the tests of PyTorch's DDP suite that stock DDP passes on CPUs."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.jobs import ROOT

LOSSLESS, LOSSY = ("none",), ("int8", "int8 two_shot")
MODES = LOSSLESS + LOSSY

_OWN_HOOK = (
    "PyTorch runs the optimizer in backward by a hook of its own, and takes one hook a model"
)

EXPECTED: dict[str, tuple[tuple[str, ...], str]] = {
    "test_ddp_apply_optim_in_backward": (MODES, _OWN_HOOK),
    "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false": (MODES, _OWN_HOOK),
    "test_ddp_apply_optim_in_backward_ignored_params": (MODES, _OWN_HOOK),
    "test_ddp_comm_hook_logging": (MODES, "expects a model without a hook to log none"),
    "test_ddp_grad_div_uneven_inputs": (
        MODES,
        "join(divide_by_initial_world_size=False) does not reach hooks, PyTorch's own neither",
    ),
    "test_ddp_profiling_torch_profiler": (
        LOSSY,
        "counts all-reduces in the profile; payloads travel by other collectives",
    ),
    "test_ddp_sink_noclone": (
        MODES,
        "forbids copies; to notice gradients that a script discards, a compressor copies a parameter",
    ),
    "test_skip_all_reduce_unused_parameters": (
        MODES,
        "skip_all_reduce_unused_params=True is refused: DDP may leave out the last bucket",
    ),
}
"""The tests that stock DDP passes and compressors do not, with the modes and the reason."""

STOCK = 73
"""The smallest number of tests that stock DDP passes; fewer show that the suite does not run here."""

COMPRESSED = 50
"""The smallest number of passed tests with a compressor; the others compute no gradients."""


Outcomes = dict[str, dict[str, Any]]


def outcomes(mode: str, *pattern: str) -> Outcomes:
    """Runs tests in a mode, by default all of them, and returns their outcomes by name."""
    command = [sys.executable, "-m", "tests.suites.ddp", mode, *pattern]
    ended = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return {one["test"]: one for one in map(json.loads, ended.stdout.splitlines())}


@functools.cache
def of_stock() -> Outcomes:
    """The outcomes of all tests without a compressor."""
    return outcomes("stock")


def stock() -> list[str]:
    """The tests that pass without a compressor."""
    return [test for test, one in of_stock().items() if one["result"] == "pass"]


@functools.cache
def of_modes() -> dict[str, Future[Outcomes]]:
    """For each mode, the outcomes of the tests that pass without a compressor; two modes run at a time."""
    pattern = f"^({'|'.join(stock())})$"
    with ThreadPoolExecutor(2) as threads:
        return {mode: threads.submit(outcomes, mode, pattern) for mode in MODES}


def test_the_suite_runs_here() -> None:
    """Otherwise, the tests below show nothing."""
    missing = {test: one["cause"] for test, one in of_stock().items() if one["cause"]}
    assert len(stock()) >= STOCK, missing


@pytest.mark.parametrize("mode", MODES)
def test_what_stock_passes(mode: str) -> None:
    """It passes with a compressor, too, except for the tests of the table, which fail."""
    found = of_modes()[mode].result()
    ours = {test: found[test] for test in stock()}
    failed = {test: one["cause"] for test, one in ours.items() if one["result"] != "pass"}
    expected = {test for test, (modes, _) in EXPECTED.items() if mode in modes}
    differ = failed.keys() ^ expected
    assert not differ, {test: failed.get(test, "passes") for test in differ}
    passed = [one for one in ours.values() if one["result"] == "pass"]
    assert sum(one["compressors"] > 0 for one in passed) >= COMPRESSED
