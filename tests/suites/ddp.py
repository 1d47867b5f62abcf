"""Runs PyTorch's own DDP tests on two CPU ranks, with a compressor in each model that has no other hook.

The tests are those of ``torch.testing._internal.distributed.distributed_test``, which PyTorch's wheel
contains. Most of them want GPUs: names of devices are replaced in their source, and what remains of CUDA's
interface does nothing. ``python -m tests.suites.ddp MODE [PATTERN]`` prints a line of JSON for each test.
"""

from __future__ import annotations

import contextlib
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
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal import common_distributed, common_utils

import hvd_compress.ddp as hvdc
from hvd_compress import Int8, NoCompression

SUITE = "torch.testing._internal.distributed.distributed_test"
SELECTED = "(?i)ddp|dataparallel|post_localSGD|no_sync|static_graph|across_ranks?|unused|sync_bn"
TIMEOUT = 60
"""Seconds for a test; half of it for a collective."""

MODES: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "none": {"codec": NoCompression()},
    "int8": {"codec": Int8()},
    "int8 two_shot": {"codec": Int8(), "exchange": "two_shot"},
}

LOSSY = 0.1
"""How far int8's tensors may be from the expected ones, relative to their norm."""

ON_CPU = (
    (r"dim = 1000\b", "dim = 40"),
    (r"""(["'])cuda(:\d)?\1""", '"cpu"'),
    (r'f"cuda:\{[^}]*\}"', '"cpu"'),
    (r"\.cuda\([\w.\[\]]*\)", ".cpu()"),
    (r"\bdevice=(0|(self\.)?rank)\b", 'device="cpu"'),
    (r"\bdevice = self\.rank\b", 'device = "cpu"'),
    (r"\bdevice_id=(self\.)?rank\b", "device_id=None"),
    (r"device_ids=\[[^\]]*\]", "device_ids=None"),
    (r'torch\.device\("cuda:" \+ str\(\w+\)\)', 'torch.device("cpu")'),
    (r"torch\.cuda\.current_device\(\)", "0"),
    (r'BACKEND != "nccl"', "False"),
)
"""What is replaced in the tests' source: devices, the width of a slow model, and "NCCL only"."""

_FORK = multiprocessing.get_context("fork")
_MADE = _FORK.Value("i", 0)


def load() -> types.ModuleType:
    """The suite's module, for CPUs."""
    spec = find_spec(SUITE)
    assert spec is not None and spec.origin is not None, f"expected {SUITE} in PyTorch's wheel"
    text = Path(spec.origin).read_text(encoding="utf-8")
    for pattern, replacement in ON_CPU:
        text = re.sub(pattern, replacement, text)
    module = types.ModuleType("distributed_test")
    module.__file__ = spec.origin
    sys.modules[module.__name__] = module
    exec(compile(text, spec.origin, "exec", dont_inherit=True), module.__dict__)
    return module


def suite() -> type[unittest.TestCase]:
    """The suite's tests, as a class."""
    module = load()

    class Suite(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(_FORK.Process)

    Suite.__module__ = module.__name__
    return Suite


def pretend_to_have_gpus() -> None:
    """Makes this process pass the suite's checks for GPUs, with CPUs behind them."""

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
    init = DistributedDataParallel.__init__

    def init_on_cpu(self: Any, module: nn.Module, *_: object, **options: Any) -> None:
        init(self, module, **{**options, "device_ids": None, "output_device": None})

    DistributedDataParallel.__init__ = init_on_cpu  # type: ignore[method-assign]
    for name in ("set_device", "synchronize", "_sleep"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    torch.cuda.device = lambda *_, **__: contextlib.nullcontext()  # type: ignore[assignment, misc]
    stream = types.SimpleNamespace(wait_stream=lambda _: None)
    for name, value in (
        ("current_accelerator", torch.device("cpu")),
        ("current_device_index", 0),
        ("current_stream", stream),
        ("set_device_index", None),
        ("synchronize", None),
    ):
        setattr(torch.accelerator, name, lambda *_, value=value, **__: value)
    common_utils.get_cycles_per_ms = lambda: 0.0


def _to_cpu(to: Any) -> Any:
    def moved(self: Any, *arguments: Any, **options: Any) -> Any:
        if arguments and isinstance(arguments[0], int):
            arguments = arguments[1:]
        if isinstance(options.get("device"), int):
            del options["device"]
        return to(self, *arguments, **options) if arguments or options else self

    return moved


def end_soon() -> None:
    """Shortens the timeouts of tests and process groups."""
    init = dist.init_process_group

    def init_process_group(*arguments: Any, **options: Any) -> None:
        init(*arguments, **{**options, "timeout": timedelta(seconds=TIMEOUT // 2)})

    dist.init_process_group = dist.distributed_c10d.init_process_group = init_process_group
    common_distributed.get_timeout = lambda _: TIMEOUT


def compress(options: dict[str, Any]) -> None:
    """Registers a compressor in each DDP model that has no hook when it first computes gradients."""
    model = DistributedDataParallel
    forward, join, register = model.forward, model.join, model.register_comm_hook
    registered = "_registered_by_a_test_of_hvd_compress"

    def attach(self: Any) -> None:
        if self.__dict__.get(registered) or getattr(self, "_delay_all_reduce_all_params", False):
            return
        register_comm_hook(self, hvdc.Compressor(self, threshold=1, **options), hvdc.hook)
        with _MADE.get_lock():
            _MADE.value += 1

    def register_comm_hook(self: Any, state: object, hook: Any) -> None:
        self.__dict__[registered] = True
        register(self, state, hook)

    def compressed_forward(self: Any, *arguments: Any, **named: Any) -> Any:
        if torch.is_grad_enabled():
            attach(self)
        return forward(self, *arguments, **named)

    def compressed_join(self: Any, *arguments: Any, **named: Any) -> Any:
        attach(self)  # A rank without input has no forward pass.
        return join(self, *arguments, **named)

    model.forward, model.join = compressed_forward, compressed_join  # type: ignore[method-assign]
    model.register_comm_hook = register_comm_hook  # type: ignore[method-assign]


def compare_loosely() -> None:
    """Lets ``assertEqual`` accept tensors, and losses, within :data:`LOSSY` of the expected ones."""
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


def outcome(test: unittest.TestCase) -> dict[str, object]:
    """Runs a test on fresh ranks: ``result`` is pass, fail or skip, ``cause`` the error's line."""
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


def _main(mode: str, pattern: str = SELECTED) -> None:
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(BACKEND="gloo", WORLD_SIZE="2", TEMP_DIR=folder, CUDA_VISIBLE_DEVICES="")
        pretend_to_have_gpus()
        end_soon()
        options = MODES[mode]
        if options is not None:
            compress(options)
            if not isinstance(options["codec"], NoCompression):
                compare_loosely()
        cases = suite()
        # What tests and their ranks print goes to standard error.
        with os.fdopen(os.dup(1), "w") as report:
            os.dup2(2, 1)
            for name in unittest.defaultTestLoader.getTestCaseNames(cases):
                if re.search(pattern, name):
                    report.write(json.dumps({"test": name, **outcome(cases(name))}) + "\n")
                    report.flush()


if __name__ == "__main__":
    _main(*sys.argv[1:])
