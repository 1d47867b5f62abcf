"""Runs tests of FSDP2 from PyTorch's repository on four CPU ranks, two replicas of two shards.

``python -m tests.suites.fsdp2 MODE FILE [PATTERN]`` prints a line of JSON for each test of a file, such as
``test/distributed/_composable/fsdp/test_fully_shard_training.py``. The mode ``stock`` runs tests unchanged;
with a compressor, modules that a test shards over all ranks are sharded within the replicas instead.
"""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.testing._internal import common_fsdp

import hvd_compress.fsdp as hvdc
from tests.suites import running

RANKS = 4

ON_CPU = (
    (r"FSDPTestMultiThread", "FSDPTest"),
    (r"\btest_compiled_fsdp\b", "compiled_fsdp_test"),
    (r"torch\.cuda\.device_count\(\)", str(RANKS)),
    (r"\bnot TEST_CUDA\b", "False"),
    (r'torch\.device\("cuda",[^()]*(\(\))?\)', 'torch.device("cpu")'),
    (r"pin_memory=True", "pin_memory=False"),
    (r"CPUOffloadPolicy\(\)", "CPUOffloadPolicy(pin_memory=False)"),
    # Delays have no effect on CPUs, and fewer steps are enough.
    (r'("delay_\w+"): \[False, True\]', r"\1: [False]"),
    (r"in range\(10\)", "in range(4)"),
    (r'"mlp_dim": \[3, 16, 17\]', '"mlp_dim": [3, 17]'),
    # The numbers of collectives are not compared.
    (r"\bCommDebugMode\(\)", "_Uncounted()"),
    (r"self\.assertEqual\((?=\s*(?:len\()?\w+(?:counts|_count)\b)", "_uncompared("),
)
"""Further replacements in the tests' source, in addition to those of :mod:`tests.suites.running`."""


class _Uncounted(contextlib.nullcontext[Any]):
    def __enter__(self) -> _Uncounted:
        return self

    def get_comm_counts(self) -> dict[Any, int]:
        return defaultdict(int)


def compress(options: dict[str, Any]) -> None:
    """Makes FSDP2 shard within replicas, and makes a compressor before a model's first forward pass."""
    stock, lazy_init = fsdp.fully_shard, FSDPState._lazy_init
    ours = "_sharded_by_a_test_of_hvd_compress"
    grid: list[DeviceMesh] = []

    def replicas() -> DeviceMesh:
        if not grid:
            shape = (2, dist.get_world_size() // 2)
            grid.append(init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")))
        return grid[0]

    def fully_shard(module: Any, *, mesh: DeviceMesh | None = None, **named: Any) -> Any:
        if mesh is not None and (mesh.ndim > 2 or mesh.size() != dist.get_world_size()):
            return stock(module, mesh=mesh, **named)  # Combined with other kinds of parallelism.
        own = replicas()["shard"]
        after = named.get("reshard_after_forward")
        if type(after) is int and after >= own.size():
            named["reshard_after_forward"] = True
        made = stock(module, mesh=own, **named)
        for one in module if isinstance(module, (list, tuple)) else [module]:
            setattr(one._get_fsdp_state(), ours, True)
        return made

    def compressed_lazy_init(self: Any) -> None:
        ours_too = getattr(self, ours, False) and any(True for _ in self._modules[0].parameters())
        if self._is_root is None and ours_too:
            hvdc.Compressor(self._modules[0], mesh=replicas(), threshold=1, **options)
            running.count_compressor()
        lazy_init(self)

    fully_shard.state = stock.state  # type: ignore[attr-defined]
    fsdp.fully_shard = common_fsdp.fully_shard = fully_shard
    FSDPState._lazy_init = compressed_lazy_init  # type: ignore[method-assign]


def _main(mode: str, file: str, pattern: str = ".") -> None:
    options = running.prepare(mode, seconds=240)
    if options is not None:
        compress(options)
    # FSDPTest's own method asks for GPUs.
    common_fsdp.FSDPTest._run = classmethod(common_fsdp.FSDPTestMixin._run.__func__)
    module = running.load(Path(file), (*ON_CPU, *running.ON_CPU))
    vars(module).update(_Uncounted=_Uncounted, _uncompared=lambda *_: None)
    running.run(running.tests_of(module), pattern)


if __name__ == "__main__":
    _main(*sys.argv[1:])
