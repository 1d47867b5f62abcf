"""Counts a bucket's launches on a GPU, and measures the host's time for each tensor.

``python -m benchmarks.launches --json OUT`` needs no GPU: it replaces the CUDA library by one whose calls
do nothing, and device memory by host memory, so that times include no launches. ``--device cuda`` uses the
CUDA library and a GPU.

A single rank runs its part of an exchange. In place of the other ranks' messages, it receives copies of its
own, or zeros for averages of other parts. Making these is not counted.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import json_files
from benchmarks.command_line import Parser, positive
from hvd_compress.codecs import codec_class, codec_names
from hvd_compress.engine.batch import judge
from hvd_compress.engine.batches import Batches
from hvd_compress.engine.executors import Executors
from hvd_compress.engine.parameters import slots_of
from hvd_compress.engine.plan import Common
from hvd_compress.engine.run import Run
from hvd_compress.exchanges.comm import Collective, Group
from hvd_compress.exchanges.hosts import Hosts
from hvd_compress.exchanges.routing import Route
from hvd_compress.kernels import cuda_library
from hvd_compress.kernels.cuda import CudaKernels, Device
from hvd_compress.ranks.counters import Counters

SCHEMA = "hvd_compress/launches/1"
EXCHANGES = ("allgather", "two_shot", "hierarchical")
SHAPES = ((16, 16, 3, 3), (16,), (64, 16), (64,)) * 10
"""The shapes of a bucket, as of a small residual network: copies of larger tensors, which a GPU makes,
would take the host's time."""

_LAUNCHING = ("cudaLaunch", "cuLaunch", "cudaMemcpy", "cudaMemset")
_LOCAL = 4


class HostDevice(Device):
    """The host's memory as a device."""

    type = "cpu"

    def guard(self, index: int) -> AbstractContextManager[object]:
        """A context that does nothing."""
        return nullcontext()

    def stream(self, index: int) -> int:
        """The number of the only stream."""
        return 0

    def empty(self, size: int, index: int) -> torch.Tensor:
        """Aligned host memory."""
        memory = torch.empty(size + 256, dtype=torch.uint8)
        return memory[-memory.data_ptr() % 256 :][:size]

    def pinned(self, size: int) -> torch.Tensor:
        """Host memory."""
        return torch.zeros(size, dtype=torch.uint8)


class _NoLibrary:
    """A stand-in for the CUDA library, whose calls do nothing."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *arguments: 256 if name.endswith("bytes") else 0


class OnHost(Executors):
    """Executors that take every tensor, of host memory, for one on the device of the given kernels."""

    def __init__(self, kernels: CudaKernels) -> None:
        super().__init__(1)
        self.cuda = kernels

    def deferred(self, tensor: torch.Tensor) -> CudaKernels | None:
        """The given kernels, for any tensor."""
        return self.cuda


def without_a_device() -> Executors:
    """Executors whose CUDA kernels do nothing."""
    with mock.patch.object(cuda_library, "load", lambda path: _NoLibrary()):
        return OnHost(CudaKernels(HostDevice()))


class Operations(TorchDispatchMode):
    """A counter of PyTorch's operations that would launch kernels: all but views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        infos = [one.alias_info for one in func._schema.arguments]
        views = any(info is not None and not info.is_write for info in infos)
        self.count += not views and not func._schema.name.startswith(
            ("aten::empty", "aten::new_empty")
        )
        return func(*args, **(kwargs or {}))


class Steps:
    """The steps of one rank with one bucket.

    Args:
        kernels: the kernels.
        exchange: the name of the exchange.
        ranks: the number of ranks, all but one of which are simulated.
        codec: the name of the codec.
        shapes: the tensors' shapes.
        device: the device of the tensors.

    Attributes:
        seconds: the seconds of the last step in calls of the kernels.
    """

    def __init__(
        self,
        kernels: Executors,
        exchange: str,
        ranks: int,
        codec: str = "onebit",
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        device: str = "cpu",
    ) -> None:
        torch.manual_seed(0)
        parameters = [torch.zeros(shape, device=device) for shape in shapes]
        self._slots = slots_of([(str(n), p) for n, p in enumerate(parameters)])
        for slot in self._slots:
            slot.route = Route(codec_class("launches", "codec", codec)(), exchange=exchange)
        self._gradients = [torch.randn_like(p) for p in parameters]
        hosts = Hosts(ranks, min(_LOCAL, ranks // 2))
        self._cache = Batches(Common(kernels, Group(0, ranks, hosts)))
        self._exchange = exchange
        self.seconds = 0.0

    def run(self, stage: Callable[[str], AbstractContextManager[None]]) -> None:
        """Makes a step.

        Args:
            stage: a function from a stage's name to a context, entered around the rank's own work.
        """
        self._cache.common.last.begin()
        gradients = [one.clone() for one in self._gradients]
        with stage("encode"):
            batch, exchanging = self._cache.make(self._slots, gradients)
            run = Run(exchanging, batch, name="bucket")
        while run.request is not None:
            received = self._received(run.request)
            with stage("between"):
                run.resume(received)
        if run.error is not None:
            raise run.error
        with stage("decode"):
            batch.write(1.0)
        if batch.word is not None:
            batch.word.zero_()  # Zeros are not valid payloads, which would drop the step.
        with stage("settle"):
            batch.settle(judge([batch]))
        counters = Counters()
        batch.count(counters)
        self.seconds = counters.encode_seconds + counters.decode_seconds

    def _received(self, collective: Collective) -> torch.Tensor:
        message = collective.message
        if collective.kind == "all_to_all":
            begin = sum(collective.sizes[: collective.rank])
            message = message[begin : begin + collective.sizes[collective.rank]]
        rows = message.repeat(collective.ranks, 1)
        of_owners = self._exchange != "allgather" and collective.scope != "cross"
        if collective.kind == "all_gather" and of_owners:
            rows[: collective.rank] = rows[collective.rank + 1 :] = 0
        return rows


def launches(steps: Steps, device: str) -> dict[str, int]:
    """The largest number of launches in each stage, by name; without a GPU, of PyTorch's operations."""
    most: dict[str, int] = {}
    if device == "cpu":

        @contextmanager
        def counted(name: str) -> Iterator[None]:
            with Operations() as operations:
                yield
            most[name] = max(most.get(name, 0), operations.count)

        steps.run(counted)
        return most
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        steps.run(lambda name: torch.profiler.record_function(f"stage {name}"))
        torch.cuda.synchronize()
    events = list(profile.events())
    for outer in events:
        if outer.name.startswith("stage ") and outer.device_type.name == "CPU":
            inside = [
                event.name
                for event in events
                if event.name.startswith(_LAUNCHING)
                and outer.time_range.start <= event.time_range.start <= outer.time_range.end
            ]
            name = outer.name.removeprefix("stage ")
            most[name] = max(most.get(name, 0), len(inside))
    return most


def host_times(steps: Steps, device: str, repeats: int) -> tuple[float, float]:
    """The host's seconds in a step, and in calls of the kernels: minima, because others use the host."""
    whole, kernels = [], []
    for _ in range(repeats):
        spent = [0.0]

        @contextmanager
        def timed(name: str, spent: list[float] = spent) -> Iterator[None]:
            started = time.perf_counter()
            yield
            spent[0] += time.perf_counter() - started

        steps.run(timed)
        if device == "cuda":
            torch.cuda.synchronize()
        whole.append(spent[0])
        kernels.append(steps.seconds)
    return min(whole), min(kernels)


def main(command_line: list[str] | None = None) -> int:
    """Measures, prints a table and writes the record."""
    args = _parse(command_line)
    torch.set_num_threads(1)
    shapes = (SHAPES * math.ceil(args.tensors / len(SHAPES)))[: args.tensors]
    rows = []
    for exchange in EXCHANGES:
        for ranks in args.ranks:
            kernels = Executors(1) if args.device == "cuda" else without_a_device()
            steps = Steps(kernels, exchange, ranks, args.codec, shapes, args.device)
            host_times(steps, args.device, 3)
            counts = launches(steps, args.device)
            whole, calls = host_times(steps, args.device, args.repeats)
            row = {
                "exchange": exchange,
                "ranks": ranks,
                "launches": counts,
                "us_per_tensor": 1e6 * whole / len(shapes),
                "kernel_calls_us_per_tensor": 1e6 * calls / len(shapes),
            }
            rows.append(row)
            print(
                f"{exchange:13} {ranks:3} ranks: {row['us_per_tensor']:7.2f} us a tensor, "
                f"{row['kernel_calls_us_per_tensor']:6.2f} of them in calls of kernels; "
                + ", ".join(f"{name} {count}" for name, count in counts.items()),
                flush=True,
            )
    name = torch.cuda.get_device_name() if args.device == "cuda" else "none"
    record = {
        "schema": SCHEMA,
        "device": name,
        "codec": args.codec,
        "tensors": len(shapes),
        "elements": sum(math.prod(shape) for shape in shapes),
        "rows": rows,
    }
    if args.json is not None:
        json_files.write(args.json, record)
    return 0


def _parse(command_line: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m benchmarks.launches", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--codec", choices=codec_names(), default="onebit")
    parser.add_argument("--ranks", type=positive, nargs="+", default=[8, 64])
    parser.add_argument("--tensors", type=positive, default=len(SHAPES))
    parser.add_argument("--repeats", type=positive, default=50)
    parser.add_argument("--json", type=Path, help="the file for the record")
    return parser.parse_args(command_line)


if __name__ == "__main__":
    sys.exit(main())
