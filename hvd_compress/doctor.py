"""``hvd-compress doctor``, which reports the installation, and the choice of ``Auto`` for the ranks.

When started with horovodrun or torchrun, as in ``horovodrun -np 2 -H ... hvd-compress doctor``, the command
measures links and codecs. Without a launcher, it reports only the installation.
"""

from __future__ import annotations

import argparse
import ast
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from typing import Any

from hvd_compress import doctor_script

_PACKAGES = ("numpy", "torch", "tensorflow", "keras", "horovod", "lightning", "transformers")
_VARIABLES = {
    "Horovod": ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE"),
    "torch.distributed": ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
}
_LIBRARIES = ("gloo", "mpi", "nccl")
_TENSOR = 1_000_000
"""The number of elements in each tensor of the test model."""


def add_to(commands: Any) -> None:
    """Adds the command to ``hvd-compress``."""
    parser = commands.add_parser(
        "doctor",
        help="look at an installation, and at the links between ranks",
        description="Says what is installed. On the ranks of horovodrun or torchrun, also measures the "
        "links and the codecs, and says what Auto would choose if training did nothing but exchange. "
        "With a PyTorch script, trains with it for some dozen steps, and says what Auto would choose for "
        "it, here and on other links.",
        epilog="On ranks: horovodrun -np 2 -H host1:1,host2:1 hvd-compress doctor; or, on each host, "
        "torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint host1:29500 "
        "-m hvd_compress doctor; with a script: torchrun ... -m hvd_compress doctor -- train.py --epochs 1",
    )
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, help="a training script with its arguments, after --"
    )
    parser.add_argument(
        "--elements",
        type=_positive,
        default=25_000_000,
        metavar="N",
        help="how many parameters the model has; default: %(default)s",
    )
    parser.add_argument(
        "--seconds",
        type=_positive,
        default=60,
        metavar="N",
        help="when to stop measuring, at most; default: %(default)s",
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    launcher, rank, size, local = _place()
    said = (
        "links:                  not measured; start this on ranks: horovodrun -np 2 hvd-compress doctor, "
        "or torchrun --nproc-per-node 2 -m hvd_compress doctor"
    )
    script = args.script[1:] if args.script[:1] == ["--"] else args.script
    if script and size == 1:
        raise ValueError(
            f"expected several ranks for a script, got one: torchrun --nproc-per-node 2 -m hvd_compress "
            f"doctor -- {' '.join(script)}"
        )
    try:
        if size > 1:
            chosen = doctor_script.measure(script, launcher) if script else _measure(launcher, args)
            ranks = f"{size} ranks of {launcher}, {local} of them on the first host"
            what = " ".join(script) or f"{args.elements:,} parameters"
            said = f"\n{ranks}; {what}\n{chosen}"
    finally:  # Looking takes seconds, in which the other ranks would wait for this one.
        if rank == 0:
            for what, found in installation():
                print(f"{what + ':':<24}{found}", flush=True)
    if rank == 0:
        print(said, flush=True)
    return 0


def _measure(launcher: str, args: argparse.Namespace) -> str:
    if _version("torch") == "not installed":
        raise ValueError(
            "expected PyTorch, by which links are measured, got none: pip install torch"
        )
    return _under_horovod(args) if launcher == "Horovod" else _under_ddp(args)


def installation() -> Iterator[tuple[str, str]]:
    """The installed parts with their versions or builds; reports missing parts, and never raises."""
    yield "hvd_compress", metadata.version("hvd_compress")
    yield "Python", f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    for package in _PACKAGES:
        yield package, _version(package)
    yield "CPU kernels", _said(_instruction_set)
    yield "CUDA kernels", _said(_cuda_library)
    for framework in ("torch", "tensorflow"):
        yield f"Horovod for {framework}", _said(partial(_operations, framework))


def _place() -> tuple[str, int, int, int]:
    """The launcher, this rank, the number of ranks, and how many of them are on this host."""
    for launcher, names in _VARIABLES.items():
        if all(name in os.environ for name in names):
            rank, size, local = (int(os.environ[name]) for name in names)
            return launcher, rank, size, local
    return "", 0, 1, 1


def _said(look: Callable[[], str]) -> str:
    try:
        return look()
    except Exception as error:  # Whatever is wrong with an installation is what is asked for.
        return f"{type(error).__name__}: {error}"


def _version(package: str) -> str:
    # Builds of TensorFlow for some processors have names of their own.
    for name in (package, f"{package}-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "not installed"


def _instruction_set() -> str:
    from hvd_compress.kernels import cpu_library

    return cpu_library.load().hvdc_isa().decode()


def _cuda_library() -> str:
    from hvd_compress.kernels.native import FOLDER

    return "built" if (FOLDER / "libhvdc_cuda.so").exists() else "not built"


def _operations(framework: str) -> str:
    if _version("horovod") == "not installed" or _version(framework) == "not installed":
        return "not installed"
    # In a process of its own: ranks hang in hvd.init() where one has imported both of Horovod's libraries.
    built = f"[name for name in {_LIBRARIES} if getattr(horovod, name + '_built')()]"
    code = f"import horovod.{framework} as horovod; print({built})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    return ", ".join(ast.literal_eval(done.stdout)) or "no operations"


def _under_horovod(args: argparse.Namespace) -> str:
    import horovod.torch as hvd
    import torch

    import hvd_compress.torch as hvdc

    hvd.init()
    model = _model(args.elements)
    auto = hvdc.Auto(model)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0),
        named_parameters=model.named_parameters(),
        compression=auto,
    )
    add = partial(hvd.allreduce_, op=hvd.Sum)
    return _train(model, auto, optimizer.step, args.seconds, add)


def _under_ddp(args: argparse.Namespace) -> str:
    import torch
    import torch.distributed as dist

    import hvd_compress.ddp as hvdc

    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(_model(args.elements))
    auto = hvdc.Auto(model)
    model.register_comm_hook(auto, hvdc.hook)
    # The step ends an exchange: without one, gradients would seem to be thrown away.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    chosen = _train(model, auto, optimizer.step, args.seconds, dist.all_reduce)
    dist.destroy_process_group()
    return chosen


def _train(
    model: Any, auto: Any, step: Callable[[], Any], seconds: float, add: Callable[[Any], Any]
) -> str:
    """Trains until ``auto`` has decided, or some rank's ``seconds`` are over; ``add`` sums over ranks."""
    import torch

    end, late = time.monotonic() + seconds, torch.zeros((), dtype=torch.float32, device="cpu")
    while not auto.settled:
        late.fill_(time.monotonic() > end)
        add(late)
        if late:
            break
        model.zero_grad()
        model().backward()
        step()
    return auto.explain()


def _model(elements: int) -> Any:
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = [_TENSOR] * (elements // _TENSOR)
            sizes += [elements % _TENSOR] * bool(elements % _TENSOR)
            self.tensors = torch.nn.ParameterList(
                [torch.randn(size, dtype=torch.float32, device="cpu") for size in sizes]
            )

        def forward(self) -> torch.Tensor:
            return torch.stack([tensor.square().sum() for tensor in self.tensors]).sum()

    torch.manual_seed(0)
    return Model()


def _positive(text: str) -> int:
    if not text.replace("_", "").isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return int(text)
