"""A device of PyTorch in host memory, on which the code for CUDA devices runs without a GPU.

Operators and kernels are complete when they return; streams and events keep a log of who waits for
whom, and calls of the memory that they use. PyTorch's own parts see a device of a type of its own: the
dispatcher, futures, DDP's reducer, FSDP2's streams, and the process group, which has a backend for it.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import subprocess
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hvd_compress.engine.executors import CUDA_KERNELS
from hvd_compress.kernels.cuda import CudaKernels
from hvd_compress.kernels.cuda_batch import CudaBatch
from hvd_compress.kernels.torch_device import TorchDevice
from tests.builds import ROOT
from tests.cuda.executors import emulated_library

TYPE = "hostdev"
"""The type of the device."""

BACKEND = "hostccl"
"""The backend of process groups for tensors on the device: Gloo, over views of the same memory."""


KERNELS: tuple[tuple[type, str, tuple[int | str, ...], tuple[int | str, ...]], ...] = (
    (CudaKernels, "restore", (1, 2), (1,)),
    (CudaBatch, "encode", (1, 2), (3, 5)),
    (CudaBatch, "decode_sum", (3,), (1, 5)),
)
"""The calls of kernels: classes, methods, and the arguments that they read and that they write."""


class _Services(TorchDevice):
    type = TYPE

    def stream(self, index: int) -> int:
        """The number of the current stream."""
        return current_stream().stream_id


def _noting(
    real: Callable[..., Any], name: str, reads: Sequence[int | str], writes: Sequence[int | str]
) -> Callable[..., Any]:
    """A method of kernels that adds its calls for the device to the log."""

    @functools.wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        named = {**dict(enumerate(args)), **kwargs}
        given = [list(_addresses([named.get(key) for key in keys])) for keys in (reads, writes)]
        addresses = [*given[0], *given[1]]
        if addresses:
            array = (ctypes.c_int64 * len(addresses))(*addresses)
            library().hostdev_use(name.encode(), array, len(given[0]), len(addresses))
        return real(*args, **kwargs)

    return call


def _addresses(values: Any) -> Iterator[int]:
    """The addresses of the memory of all tensors on the device, in nested sequences."""
    if isinstance(values, torch.Tensor):
        if values.device.type == TYPE and values.numel():
            yield values.untyped_storage().data_ptr()
    elif isinstance(values, Sequence) and not isinstance(values, str):
        for one in values:
            yield from _addresses(one)


@cache
def library() -> ctypes.CDLL:
    """Loads the device, which is compiled when its source or PyTorch has changed."""
    folder, source = ROOT / "build" / "hostdev", Path(__file__).with_name("hostdev.cc")
    folder.mkdir(parents=True, exist_ok=True)
    command = _compilation(source)
    inputs = f"{torch.__version__} {command} {source.read_text(encoding='utf-8')}"
    built = folder / f"{hashlib.sha256(inputs.encode()).hexdigest()[:16]}.so"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # Until the file is closed.
        if not built.exists():
            part = built.with_suffix(".part")
            subprocess.run([*command, "-o", str(part)], check=True, timeout=600)
            part.replace(built)
    loaded = ctypes.CDLL(str(built))
    loaded.hostdev_log.restype = ctypes.c_char_p
    return loaded


def _compilation(source: Path) -> list[str]:
    found = Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    command = [os.environ.get("CXX", "c++"), "-O0", "-std=c++20", "-shared", "-fPIC", "-Wall", abi]
    for include in ("include", "include/torch/csrc/api/include"):
        command += ["-isystem", str(found / include)]
    return [*command, "-Werror", str(source), f"-L{found / 'lib'}", "-ltorch_cpu", "-lc10"]


@cache
def register() -> None:
    """Makes the device, its kernels and its backend known in this process."""
    library()
    torch.utils.rename_privateuse1_backend(TYPE)
    torch._register_device_module(TYPE, _module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    CUDA_KERNELS[TYPE] = lambda: CudaKernels(_Services(torch), emulated_library())
    for where, name, reads, writes in KERNELS:
        setattr(where, name, _noting(getattr(where, name), name, reads, writes))
    dist.Backend.register_backend(BACKEND, _backend, devices=[TYPE])


def _backend(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


def _module() -> types.ModuleType:
    """The module ``torch.hostdev``, as ``torch.cuda`` is for CUDA devices."""
    module = types.ModuleType(f"torch.{TYPE}")
    module.__dict__.update(
        Stream=torch.Stream,
        Event=torch.Event,
        current_stream=current_stream,
        stream=stream,
        synchronize=torch.accelerator.synchronize,
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda _: None,
        device=lambda _: nullcontext(),
        manual_seed_all=lambda _: None,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
    )
    return module


def current_stream(device: Any = None) -> torch.Stream:
    """The current stream of this thread."""
    return torch.accelerator.current_stream()


@contextmanager
def stream(one: torch.Stream | None) -> Iterator[None]:
    """Makes a stream current; restores the previous one on exit."""
    before = current_stream()
    if one is not None:
        torch.accelerator.set_stream(one)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


class Log(list[tuple[str, int, int]]):
    """The calls in order, each with its name, the event or memory, and the stream.

    Names are ``record``, ``wait``, ``record_stream``, ``synchronize_device``, ``synchronize_event``,
    ``synchronize_stream``, ``allocate``, ``free``, and those of operators, collectives and kernels. After
    one of these come ``reads`` and ``writes`` with the memory that it uses.
    """


@contextmanager
def logged() -> Iterator[Log]:
    """Logs what happens in the ``with`` block, on all threads; the log is complete on exit."""
    log = Log()
    library().hostdev_log(True)
    try:
        yield log
    finally:
        for line in library().hostdev_log(False).decode().splitlines():
            what, number, where = line.rsplit(" ", 2)
            log.append((what, int(number), int(where)))
