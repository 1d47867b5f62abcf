"""Loads files of PyTorch's tests for CPUs, and runs each test on fresh ranks.

Most of the tests need GPUs: names of devices are replaced in their source, and the other functions of
CUDA's interface that they call do nothing.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import multiprocessing
import os
import re
import sys
import tempfile
import time
import types
import unittest
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal import common_distributed, common_utils

from hvd_compress import Int8, NoCompression

MODES: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "none": {"codec": NoCompression()},
    "int8": {"codec": Int8()},
    "int8 two_shot": {"codec": Int8(), "exchange": "two_shot"},
}

LOSSY = 0.1
"""The permitted distance of int8's tensors to the expected ones, relative to their norm."""

ON_CPU = (
    (r"""(["'])cuda(:\d)?\1""", '"cpu"'),
    (r"""f(["'])cuda:\{[^}]*\}\1""", '"cpu"'),
    (r"\.cuda\([\w.\[\]]*\)", ".cpu()"),
    (r"\bdevice=(0|(self\.)?rank)\b", 'device="cpu"'),
    (r"\bdevice = self\.rank\b", 'device = "cpu"'),
    (r"\bdevice_id=(self\.)?rank\b", "device_id=None"),
    (r"device_ids=\[[^\]]*\]", "device_ids=None"),
    (r'torch\.device\("cuda:" \+ str\(\w+\)\)', 'torch.device("cpu")'),
    (r"torch\.cuda\.current_device\(\)", "0"),
    (r'BACKEND != "nccl"', "False"),
)
"""The replacements in the source of PyTorch's tests: devices, and "NCCL only"."""

Replacements = Iterable[tuple[str, str]]

_FORK = multiprocessing.get_context("fork")
_MADE = _FORK.Value("i", 0)


def count_compressor() -> None:
    """Counts a compressor, for the report of the test; ranks call this."""
    with _MADE.get_lock():
        _MADE.value += 1


def load(path: Path, replacements: Replacements = (), package: str = "") -> types.ModuleType:
    """Loads a file of tests as a module, and the test files beside it that it imports.

    Args:
        path: the path of the file.
        replacements: patterns in the source, and their replacements.
        package: the beginning of the module's name.
    """
    text = path.read_text(encoding="utf-8")
    for name in re.findall(r"^(?:import|from) (test_\w+)", text, re.MULTILINE):
        if name not in sys.modules:
            load(path.with_name(f"{name}.py"), replacements)
    for pattern, replacement in replacements:
        text = re.sub(pattern, replacement, text)
    module = types.ModuleType(f"{package}{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    exec(compile(text, str(path), "exec", dont_inherit=True), module.__dict__)
    return module


def tests_of(module: types.ModuleType) -> list[unittest.TestCase]:
    """The tests that a module defines."""
    classes = [
        one
        for one in vars(module).values()
        if isinstance(one, type)
        and issubclass(one, unittest.TestCase)
        and one.__module__ == module.__name__
    ]
    names = unittest.defaultTestLoader.getTestCaseNames
    return [one(name) for one in classes for name in names(one)]


def pretend_to_have_gpus() -> None:
    """Makes this process pass the suites' checks for GPUs, and lets tests run on CPUs."""

    def always(*_: object, **__: object) -> Any:
        return lambda function: function

    for name in ("skip_if_lt_x_gpu", "require_n_gpus_for_nccl_backend", "nccl_skip_if_lt_x_gpu"):
        setattr(common_distributed, name, always)
    for name in ("skip_if_no_gpu", "skip_if_rocm_multiprocess"):
        setattr(common_distributed, name, lambda function: function)
    common_distributed.requires_nccl_version = always
    common_distributed.init_multigpu_helper = lambda size, backend: {r: [r] for r in range(size)}
    features = common_distributed.DistTestCases.backend_feature
    features["cpu"] = features["cuda"]
    for kind in (torch.Tensor, nn.Module):
        kind.to = _to_cpu(kind.to)  # type: ignore[method-assign]
    for name in ("set_device", "synchronize", "_sleep"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    torch.cuda.device = lambda *_, **__: contextlib.nullcontext()  # type: ignore[assignment, misc]
    common_utils.get_cycles_per_ms = lambda: 0.0


def _to_cpu(to: Any) -> Any:
    def moved(self: Any, *arguments: Any, **options: Any) -> Any:
        if arguments and isinstance(arguments[0], int):
            arguments = arguments[1:]
        if isinstance(options.get("device"), int):
            del options["device"]
        return to(self, *arguments, **options) if arguments or options else self

    return moved


def end_soon(seconds: int) -> None:
    """Sets the timeout of tests, and half of it for process groups."""
    init = dist.init_process_group

    def init_process_group(*arguments: Any, **options: Any) -> None:
        init(*arguments, **{**options, "timeout": timedelta(seconds=seconds // 2)})

    dist.init_process_group = dist.distributed_c10d.init_process_group = init_process_group
    common_distributed.get_timeout = lambda _: seconds


def fork_ranks() -> None:
    """Makes tests fork their ranks from this process, which has imported everything."""

    def fork(self: Any) -> None:
        self._start_processes(_FORK.Process)

    common_distributed.MultiProcessTestCase._spawn_processes = fork


def compare_loosely() -> None:
    """Makes ``assertEqual`` accept tensors and losses within :data:`LOSSY` of the expected ones."""
    equal = common_utils.TestCase.assertEqual

    def assert_equal(self: Any, x: Any, y: Any, *arguments: Any, **options: Any) -> None:
        try:
            equal(self, x, y, *arguments, **options)
        except AssertionError:
            if isinstance(x, float) and isinstance(y, float):
                x, y = torch.tensor(x), torch.tensor(y)
            tensors = isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)
            if not tensors or not x.is_floating_point() or x.shape != y.shape:
                raise
            x, y = x.detach().double(), y.detach().double()
            if not float((x - y).norm()) <= LOSSY * float(y.norm()):
                raise

    common_utils.TestCase.assertEqual = assert_equal  # type: ignore[method-assign]


def prepare(mode: str, seconds: int) -> dict[str, Any] | None:
    """Prepares this process for tests in a mode.

    Args:
        mode: a key of :data:`MODES`.
        seconds: the time limit of a test.

    Returns:
        The options of a compressor; None for ``stock``.
    """
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    pretend_to_have_gpus()
    end_soon(seconds)
    fork_ranks()
    options = MODES[mode]
    if options is not None and not isinstance(options["codec"], NoCompression):
        compare_loosely()
    return options


def run(tests: Iterable[unittest.TestCase], pattern: str) -> None:
    """Runs the tests whose names match a pattern, and prints a line of JSON for each."""
    # The output of tests and their ranks goes to standard error.
    with tempfile.TemporaryDirectory() as folder, os.fdopen(os.dup(1), "w") as report:
        os.environ["TEMP_DIR"] = folder
        os.dup2(2, 1)
        gc.freeze()  # So that ranks' garbage collections need not traverse imported objects.
        for test in tests:
            name = test.id().rpartition(".")[2]
            if re.search(pattern, name):
                report.write(json.dumps({"test": name, **outcome(test)}) + "\n")
                report.flush()


def outcome(test: unittest.TestCase) -> dict[str, object]:
    """Runs a test on fresh ranks; ``result`` is pass, fail or skip, ``cause`` the line of the error."""
    _MADE.value, begin, result = 0, time.monotonic(), unittest.TestResult()
    unittest.TestSuite([test]).run(result)
    text = "\n".join(trace for _, trace in (*result.failures, *result.errors))
    errors = re.findall(r"^[\w.]*(?:Error|Exception|Timeout)\b.*", text, re.MULTILINE)
    causes = [line for line in errors if not line.startswith("RuntimeError: Process ")] or [text]
    return {
        "result": "fail" if text else "skip" if result.skipped else "pass",
        "cause": causes[0][:300] if text else result.skipped[0][1][:100] if result.skipped else "",
        "compressors": _MADE.value,
        "seconds": round(time.monotonic() - begin, 1),
    }
