"""The CUDA kernels where tests can run them: on a GPU, and emulated on the host."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from hvd_compress.engine.executors import Executors
from hvd_compress.kernels import cuda_library
from hvd_compress.kernels.batch import Batch, Entry
from hvd_compress.kernels.cuda import CudaKernels
from hvd_compress.kernels.cuda_batch import CudaBatch
from hvd_compress.kernels.torch_device import TorchDevice
from tests import device
from tests.builds import build
from tests.kernels.parity import Parity

_streams = itertools.count(1)


class HostDevice:
    """Host memory for the emulated kernels; memory comes full of garbage, as from a device."""

    type = "cpu"

    def guard(self, index: int) -> AbstractContextManager[object]:
        return nullcontext()

    def stream(self, index: int) -> int:
        return 0

    def empty(self, size: int, index: int) -> torch.Tensor:
        memory = torch.full((size + 256,), 0xA5, dtype=torch.uint8)
        first = -memory.data_ptr() % 256
        return memory[first : first + size]

    def pinned(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8)


class Checked(CudaKernels):
    """The CUDA kernels, on a device that tests can wait for.

    Attributes:
        device: the device that tensors have to be on.
    """

    device: str

    def batch(self, entries: Sequence[Entry]) -> Batch:
        """A batch that raises at once what it would raise at the next synchronization."""
        return _SettledBatch(self, entries)

    @property
    def parity(self) -> Parity:
        """Compares them with the reference."""
        return Parity((self.batch,), self.device, alignment=16)

    def settle(self) -> None:
        """Waits for the device, and checks."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.check()


class _SettledBatch(CudaBatch):
    def decode_sum(self, *args: Any) -> bool:
        done = super().decode_sum(*args)
        self._kernels.settle()
        return done


def on_gpu() -> Checked:
    """The kernels on the first GPU."""
    kernels = Checked(TorchDevice(torch))
    kernels.device = "cuda"
    return kernels


def emulated() -> Checked:
    """The kernels on the host: their own sources, with the threads of a block taking turns."""
    kernels = Checked(HostDevice(), emulated_library())
    kernels.device = "cpu"
    return kernels


def another_stream(kernels: Checked) -> AbstractContextManager[object]:
    """Makes a stream current that nothing else uses."""
    if kernels.device == "cuda":
        return torch.cuda.stream(torch.cuda.Stream())
    number = next(_streams)
    return mock.patch.object(HostDevice, "stream", lambda *_: number)


def configure(processors: int, order: int) -> None:
    """Sets the emulated device's processors, and the order in which blocks and threads take turns.

    Args:
        processors: 16 blocks each.
        order: 0 from the first to the last, 1 backwards, others shuffled.
    """
    ctypes.CDLL(str(emulated_library())).hvdc_emulated_configure(processors, order)


def missing_gpu() -> str | None:
    """Why there is no GPU to test on, or None."""
    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU and a torch for CUDA: torch.cuda.is_available() is False"
    if not cuda_library.LIBRARY.exists():
        return f"needs {cuda_library.LIBRARY.name}, which was not built: HVDC_CUDA=on make native"
    return None


@cache
def emulated_library() -> Path:
    """The emulation, built when first asked for."""
    options = ("-DHVDC_EMULATED_CUDA=ON", "-DHVDC_WERROR=ON")
    flags = ("-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O2 -g")
    return build("emulated", "hvdc_cuda_emulated", *options, *flags) / "libhvdc_cuda_emulated.so"


@contextmanager
def deferred_kernels() -> Iterator[Checked]:
    """Every tensor counts as one on a device whose kernels report errors later."""
    kernels = emulated()
    kernels.settle = lambda: None  # type: ignore[method-assign]
    with (
        mock.patch.object(Executors, "deferred", lambda *_: kernels),
        mock.patch.object(Executors, "cuda", kernels),
    ):
        yield kernels


def late_kernels() -> AbstractContextManager[object]:
    """Kernels that report errors later: emulated ones, unless the tensors of the tests are on a GPU."""
    return deferred_kernels() if device.TYPE == "cpu" else nullcontext()
