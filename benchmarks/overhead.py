"""Measures the package's overhead around the codecs under PyTorch, by steps with many small tensors.

``horovodrun --gloo -np 2 python -m benchmarks.overhead --json OUT``, and for DDP
``torchrun --nproc-per-node 2 -m benchmarks.overhead --frontend ddp --json OUT``

All choices make a few steps each, in turns, in one job. The time of each turn is divided by that of the
stock framework in the same round. Processor time is that of the thread that computes. For Horovod, the time
in the compressor's methods is shown, too, without encoding and decoding.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks import compressions, json_files, machine
from benchmarks.command_line import Parser, compression, positive
from benchmarks.compressions import LOCAL, STOCK, Compression
from benchmarks.models import MODELS
from benchmarks.models.torch import build
from benchmarks.models.torch.transformer import Transformer
from benchmarks.turns import measure, row, table
from hvd_compress.exchanges import buckets

SCHEMA = "hvd_compress/overhead/2"
DEFAULT = ["onebit", "int8", "onebit:exchange=two_shot"]
TENSORS, TRANSFORMER = "tensors", "transformer"

_BATCH = 8
_LR = 1e-3


class Tensors(nn.Module):
    """A model of parameters of one size, whose gradients take hardly any time to compute."""

    def __init__(self, count: int = 54, elements: int = 4096) -> None:
        super().__init__()
        self.tensors = nn.ParameterList([torch.zeros(elements) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all parameters' products with ``x``, shape=(elements,)."""
        return torch.stack([(tensor * x).sum() for tensor in self.tensors]).sum()


def _model(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    if name == TENSORS:
        return Tensors(), torch.randn(4096)
    if name == TRANSFORMER:
        return Transformer(), torch.randint(1000, (_BATCH, 64))
    spec = MODELS[name]
    if spec.data == "text":
        return build(name), torch.randint(spec.classes, (_BATCH, *spec.input))
    return build(name), torch.randn(_BATCH, spec.input[-1], *spec.input[:-1])


class Horovod:
    """The frontend for Horovod's optimizer."""

    def __init__(self) -> None:
        import horovod.torch as hvd

        hvd.init()
        self._hvd = hvd
        self.rank, self.size = hvd.rank(), hvd.size()

    def start(self, compression: Compression, model: nn.Module) -> tuple[nn.Module, Any, Any]:
        """The model, its optimizer, and the compressor, or None."""
        import hvd_compress.torch as hvdc

        hvd, text = self._hvd, compression.text
        sgd = torch.optim.SGD(model.parameters(), lr=_LR)
        if text == LOCAL:
            return model, sgd, None
        named = [(f"{text}.{name}", p) for name, p in model.named_parameters()]
        made = None
        if text != STOCK:
            made = compressions.make(
                hvdc, compression.name, named, **{"name": text, **compression.options}
            )
        optimizer = hvd.DistributedOptimizer(
            sgd, named_parameters=named, compression=made or hvd.Compression.none
        )
        return model, optimizer, made

    def barrier(self) -> None:
        """Waits for all ranks."""
        self._hvd.barrier()


class DDP:
    """The frontend for models in DistributedDataParallel."""

    def __init__(self) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.barrier: Callable[[], Any] = dist.barrier

    def start(self, compression: Compression, model: nn.Module) -> tuple[nn.Module, Any, Any]:
        """The model, its optimizer, and the compressor, or None."""
        import hvd_compress.ddp as hvdc

        sgd = torch.optim.SGD(model.parameters(), lr=_LR)
        if compression.text == LOCAL:
            return model, sgd, None
        ddp = nn.parallel.DistributedDataParallel(model)
        made = None
        if compression.text != STOCK:
            made = compressions.make(hvdc, compression.name, ddp, **compression.options)
            ddp.register_comm_hook(made, hvdc.hook)
        return ddp, sgd, made


def main(command_line: list[str] | None = None) -> int:
    """Measures on every rank; the first one prints and writes the results."""
    args = _parse(command_line)
    torch.set_num_threads(args.threads)
    buckets.LIMIT = args.bucket
    frontend = Horovod() if args.frontend == "torch" else DDP()
    names = list(dict.fromkeys([STOCK, LOCAL, *args.compression]))
    last = MODELS[args.model].last_layer if args.model in MODELS else "none"
    sides, compressors = {}, {}
    for name in names:
        model, x = _model(args.model)
        chosen = compressions.parse(name, {}, last)
        model, optimizer, compressors[name] = frontend.start(chosen, model)
        sides[name] = model, optimizer, x
    clocks = {name: _Clock(compressors[name]) for name in names}
    beside: dict[str, list[float]] = {name: [] for name in names}

    def turn(name: str, steps: int) -> tuple[float, float]:
        frontend.barrier()
        _steps(*sides[name], 1)
        before = clocks[name].beside_kernels()
        wall, cpu = time.perf_counter(), time.thread_time()
        _steps(*sides[name], steps)
        wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
        beside[name].append((clocks[name].beside_kernels() - before) / steps)
        return wall / steps, cpu / steps

    seconds = measure(turn, names, args.rounds, args.block)
    rows = {name: row(one, seconds[0]) for name, one in zip(names, seconds, strict=True)}
    if args.frontend == "torch":
        for name in args.compression:
            of_rounds = beside[name][-args.rounds :]
            rows[name]["beside_kernels"] = np.quantile(of_rounds, [0.5, 0.25, 0.75]).tolist()
    record = {
        "schema": SCHEMA,
        "frontend": args.frontend,
        "model": args.model,
        "ranks": frontend.size,
        "threads": args.threads,
        "bucket": args.bucket,
        "steps_a_turn": args.block,
        "versions": machine.versions(),
        "machine": machine.description(),
        "rows": rows,
    }
    if frontend.rank == 0:
        json_files.write(args.json, record)
        shown = table(rows)
        print(shown.markdown() if args.markdown else shown.text())
        for name, one in rows.items():
            if "beside_kernels" in one:
                middle, low, high = (1e3 * part for part in one["beside_kernels"])
                print(f"{name}: {middle:.2f} ms beside the kernels ({low:.2f} to {high:.2f})")
    frontend.barrier()
    return 0


class _Clock:
    """A clock for the calling thread's processor time in the methods that Horovod calls.

    Args:
        compressor: the compressor, whose methods are wrapped. None and the state of a hook have none.
    """

    def __init__(self, compressor: Any | None) -> None:
        self._compressor = compressor
        self._seconds = 0.0
        for method in ("compress", "decompress"):
            if hasattr(compressor, method):
                setattr(compressor, method, self._timed(getattr(compressor, method)))

    def beside_kernels(self) -> float:
        """The seconds so far, without those in the kernels."""
        if self._compressor is None:
            return 0.0
        counters = self._compressor.counters
        return self._seconds - counters.encode_seconds - counters.decode_seconds

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            begin = time.thread_time()
            result = method(*args)
            self._seconds += time.thread_time() - begin
            return result

        return timed


def _steps(model: nn.Module, optimizer: Any, x: torch.Tensor, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def _parse(command_line: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m benchmarks.overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--json", type=Path, required=True, metavar="OUT")
    add("--frontend", choices=("torch", "ddp"), default="torch")
    add("--model", choices=(TENSORS, TRANSFORMER, *MODELS), default=TENSORS)
    add("--threads", type=positive, default=1, help="threads a rank; default: 1")
    add(
        "--bucket",
        type=positive,
        default=buckets.LIMIT,
        metavar="ELEMENTS",
        help=f"the largest bucket; has no effect under DDP; default: {buckets.LIMIT}",
    )
    add("--compression", nargs="+", type=compression, default=DEFAULT, metavar="NAME[:key=value,...]",
        help=f"besides {STOCK}; default: {' '.join(DEFAULT)}")  # fmt: skip
    add(
        "--block", type=positive, default=20, help="timed steps of a choice in a round; default: 20"
    )
    add("--rounds", type=positive, default=9, help="default: 9")
    add("--markdown", action="store_true", help="print the table as Markdown")
    return parser.parse_args(command_line)


if __name__ == "__main__":
    sys.exit(main())
