"""Runs PyTorch's own DDP tests on two CPU ranks, with a compressor in each model that has no other hook.

``python -m tests.suites.ddp MODE [PATTERN] [FILE]`` prints a line of JSON for each test. Without a file,
the tests are those of ``torch.testing._internal.distributed.distributed_test`` in PyTorch's wheel; a file
is one of PyTorch's repository, such as ``test/distributed/test_c10d_gloo.py``.
"""

from __future__ import annotations

import os
import sys
import types
import unittest
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hvd_compress.ddp as hvdc
from tests.suites import running

SUITE = "torch.testing._internal.distributed.distributed_test"
SELECTED = "(?i)ddp|dataparallel|post_localSGD|no_sync|static_graph|across_ranks?|unused|sync_bn"

SMALLER = ((r"dim = 1000\b", "dim = 40"),)
"""The replacement of a slow model's width."""


def suite() -> list[unittest.TestCase]:
    """The tests in PyTorch's wheel."""
    spec = find_spec(SUITE)
    assert spec is not None and spec.origin is not None, f"expected {SUITE} in PyTorch's wheel"
    module = running.load(Path(spec.origin), (*SMALLER, *running.ON_CPU))

    class Suite(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        def setUp(self) -> None:
            super().setUp()
            self._spawn_processes()

    Suite.__module__ = module.__name__
    return [Suite(name) for name in unittest.defaultTestLoader.getTestCaseNames(Suite)]


def of_file(path: Path) -> list[unittest.TestCase]:
    """The tests of DDP in a file of PyTorch's repository, which names GPUs by number."""
    on_cpu = ((r"gpus_for_rank\(self\.world_size\)\[self\.rank\](\[:\d\])?", r'["cpu"]'),)
    module = running.load(path, (*on_cpu, *running.ON_CPU))
    tests = running.tests_of(module)
    return [one for one in tests if "DataParallel" in type(one).__name__]


def pretend_to_have_gpus() -> None:
    """Replaces what DDP's tests need of a GPU besides :func:`running.pretend_to_have_gpus`."""
    init = DistributedDataParallel.__init__

    def init_on_cpu(self: Any, module: nn.Module, *_: object, **options: Any) -> None:
        init(self, module, **{**options, "device_ids": None, "output_device": None})

    DistributedDataParallel.__init__ = init_on_cpu  # type: ignore[method-assign]
    stream = types.SimpleNamespace(wait_stream=lambda _: None)
    for name, value in (
        ("current_accelerator", torch.device("cpu")),
        ("current_device_index", 0),
        ("current_stream", stream),
        ("set_device_index", None),
        ("synchronize", None),
    ):
        setattr(torch.accelerator, name, lambda *_, value=value, **__: value)


def compress(options: dict[str, Any]) -> None:
    """Makes each DDP model without a hook register a compressor when it first computes gradients."""
    model = DistributedDataParallel
    forward, join, register = model.forward, model.join, model.register_comm_hook
    registered = "_registered_by_a_test_of_hvd_compress"

    def attach(self: Any) -> None:
        if self.__dict__.get(registered) or getattr(self, "_delay_all_reduce_all_params", False):
            return
        register_comm_hook(self, hvdc.Compressor(self, threshold=1, **options), hvdc.hook)
        running.count_compressor()

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


def _main(mode: str, pattern: str = SELECTED, file: str | None = None) -> None:
    options = running.prepare(mode, seconds=60)
    pretend_to_have_gpus()
    os.environ.update(BACKEND="gloo", WORLD_SIZE="2")
    if options is not None:
        compress(options)
    running.run(suite() if file is None else of_file(Path(file)), pattern)


if __name__ == "__main__":
    _main(*sys.argv[1:])
