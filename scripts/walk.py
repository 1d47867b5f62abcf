#!/usr/bin/env python3
"""List the files of hvd_compress whose functions run in one training step, with their numbers of calls.

    python scripts/walk.py {horovod,ddp,fsdp,diloco} [--functions]

Two ranks train a small network on the CPU with OneBit and exchange="allgather". The first steps, in which
the ranks agree and make plans, are left out. Calls are counted in one step of the first rank, on Python's
threads and on those in which PyTorch runs callbacks when a collective has ended.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FRONTENDS = ("horovod", "ddp", "fsdp", "diloco")
WARM_STEPS = 5

_PACKAGE = f"{ROOT / 'hvd_compress'}{os.sep}"
_LAUNCHERS = {
    "horovod": ["horovod.runner.launch", "--gloo", "-np", "2", sys.executable],
    "distributed": ["torch.distributed.run", "--standalone", "--nproc-per-node=2"],
}


def main() -> int:
    """Starts the ranks or, on a rank, trains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_AsWritten)
    parser.add_argument("frontend", choices=FRONTENDS)
    parser.add_argument("--functions", action="store_true", help="list every function, too")
    args = parser.parse_args()
    if not {"RANK", "HOROVOD_RANK"} & os.environ.keys():
        launcher = _LAUNCHERS["horovod" if args.frontend == "horovod" else "distributed"]
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-m", *launcher, __file__, *sys.argv[1:]]
        return subprocess.run(command, env=environment, check=False).returncode
    rank, step = _training(args.frontend)
    for _ in range(WARM_STEPS):
        step()
    calls = traced(step)
    step()  # The other rank may still need this one's answers.
    if rank == 0:
        print(report(args.frontend, calls, functions=args.functions), flush=True)
    return 0


def traced(step: Callable[[], None]) -> Counter[tuple[str, str]]:
    """Runs a step and counts the calls of this package's functions by file and qualified name."""
    import torch

    calls: Counter[tuple[str, str]] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_PACKAGE):
            calls[code.co_filename.removeprefix(_PACKAGE), code.co_qualname] += 1

    def noting(call: Callable[..., Any]) -> Callable[..., Any]:
        # Each call from a thread of PyTorch's into Python gets a new thread state, without the profiler.
        def noted(*arguments: Any) -> Any:
            before = sys.getprofile()
            sys.setprofile(note)
            try:
                return call(*arguments)
            finally:
                sys.setprofile(before)

        return noted

    class Adding:
        """Replaces a method of PyTorch's futures by one whose callbacks are counted."""

        def __init__(self, name: str) -> None:
            self._plain = getattr(torch._C.Future, name)
            self._name = name

        def __enter__(self) -> None:
            plain = self._plain
            setattr(torch._C.Future, self._name, lambda future, call: plain(future, noting(call)))

        def __exit__(self, *error: object) -> None:
            setattr(torch._C.Future, self._name, self._plain)

    with Adding("add_done_callback"), Adding("then"):
        threading.setprofile(note)
        noting(step)()
        threading.setprofile(None)
    return calls


def report(frontend: str, calls: Counter[tuple[str, str]], *, functions: bool = False) -> str:
    """The files in alphabetical order, each with its number of calls, as text."""
    by_file: dict[str, Counter[str]] = defaultdict(Counter)
    for (file, function), count in calls.items():
        by_file[file][function] += count
    lines = []
    for file, counts in sorted(by_file.items()):
        lines.append(f"{sum(counts.values()):6d}  {file}")
        if functions:
            lines += [f"        {count:6d}  {name}" for name, count in counts.most_common()]
    return "\n".join([*lines, f"{frontend}: {len(by_file)} files, {calls.total()} calls"])


def _training(frontend: str) -> tuple[int, Callable[[], None]]:
    """Returns this rank's number and a function that runs one training step."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    rank, model, optimizer, after = _PREPARED[frontend](model)
    inputs, labels = torch.randn(8, 64), torch.randint(10, (8,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        after()

    return rank, step


def _horovod(model: Any) -> tuple[int, Any, Any, Callable[[], object]]:
    import horovod.torch as hvd
    import torch

    import hvd_compress.torch as hvdc

    hvd.init()
    compressor = hvdc.OneBit(model, exchange="allgather")
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        named_parameters=model.named_parameters(),
        compression=compressor,
    )
    return hvd.rank(), model, optimizer, _nothing


def _ddp(model: Any) -> tuple[int, Any, Any, Callable[[], object]]:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import hvd_compress.ddp as hvdc

    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(model)
    hvdc.register(ddp, "onebit", exchange="allgather")
    return dist.get_rank(), ddp, torch.optim.SGD(ddp.parameters(), lr=0.01), _nothing


def _fsdp(model: Any) -> tuple[int, Any, Any, Callable[[], object]]:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import hvd_compress.fsdp as hvdc

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh["shard"])
    hvdc.Compressor(model, "onebit", mesh=mesh, exchange="allgather")
    return dist.get_rank(), model, torch.optim.SGD(model.parameters(), lr=0.01), _nothing


def _diloco(model: Any) -> tuple[int, Any, Any, Callable[[], object]]:
    import torch
    import torch.distributed as dist

    import hvd_compress.distributed as hvdc
    from hvd_compress.diloco import DiLoCo

    dist.init_process_group("gloo")
    compressor = hvdc.Compressor("onebit", exchange="allgather")
    diloco = DiLoCo(model, compressor, sync_every=1)
    return dist.get_rank(), model, torch.optim.SGD(model.parameters(), lr=0.01), diloco.step


def _nothing() -> None:
    return


_PREPARED = {"horovod": _horovod, "ddp": _ddp, "fsdp": _fsdp, "diloco": _diloco}


class _AsWritten(argparse.RawDescriptionHelpFormatter):
    """A formatter of help that keeps the description's line breaks."""


if __name__ == "__main__":
    sys.exit(main())
