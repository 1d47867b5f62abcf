"""Chooses the kernels that encode and decode a tensor by the tensor's device."""

from __future__ import annotations

import ctypes
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import torch

from hvd_compress.codecs import Codec
from hvd_compress.codecs.checks import check_threads
from hvd_compress.kernels.batch import Arrays, Batch, Entry, SplitBatch
from hvd_compress.kernels.copies import CopiedBatch
from hvd_compress.kernels.cpu_arrays import FixedArrays
from hvd_compress.kernels.cpu_batch import CpuBatch
from hvd_compress.kernels.cpu_library import load, spec_pointer
from hvd_compress.kernels.cuda import CudaKernels
from hvd_compress.kernels.cuda_batch import CudaBatch
from hvd_compress.kernels.torch_device import TorchDevice
from hvd_compress.ranks.errors import ExchangeError

Columns = tuple[Sequence[torch.Tensor | None], Sequence[torch.Tensor | None]]
"""The residuals of a bucket's gradients, and the arrays for the next ones; None without feedback."""

CUDA_KERNELS: dict[str, Callable[[], CudaKernels]] = {
    TorchDevice.type: lambda: CudaKernels(TorchDevice(torch))
}
"""The functions that make the kernels for devices other than the CPU, by the type of the device."""

_PENDING = -1
"""The value of a word in host memory that has not come from its device yet."""


def device_of(tensors: Iterable[torch.Tensor]) -> torch.device:
    """The device that encodes gradients: the first CUDA device of a parameter, or else the CPU."""
    devices = (tensor.device for tensor in tensors)
    return next((device for device in devices if device.type in CUDA_KERNELS), torch.device("cpu"))


class HostWord:
    """A copy of a word in host memory, which a device writes without the host waiting for it.

    Args:
        word: the word on the device, shape=().
    """

    def __init__(self, word: torch.Tensor) -> None:
        self._copy = torch.full(
            (), _PENDING, dtype=torch.int32, device="cpu", pin_memory=not word.is_cpu
        )
        self._copy.copy_(word.int(), non_blocking=True)

    def read(self) -> int | None:
        """The value of the word; None if it has not arrived."""
        value = ctypes.c_int32.from_address(self._copy.data_ptr()).value
        return None if value == _PENDING else value


class Executors:
    """The CPU's kernels, and the CUDA kernels once there is a CUDA tensor.

    CUDA kernels run later than the calls that start them, so :meth:`check` raises their errors. A codec
    without CUDA kernels encodes and decodes copies of CUDA tensors in host memory and waits for the device.

    Args:
        threads: the number of threads of the CPU's kernels.
        chained: whether the caller itself puts streams in order and waits for devices.

    Attributes:
        threads: the number of threads of the CPU's kernels.
        cuda: the CUDA kernels; None before the first CUDA tensor.
        later: the words that devices will write, and the errors that they stand for.
    """

    cuda: CudaKernels | None = None

    def __init__(self, threads: int, *, chained: bool = False) -> None:
        self.threads = threads
        self._chained = chained
        check_threads("Executors", threads)
        load()
        self._streams: dict[torch.device, set[torch.Stream]] = {}
        self._sharing = threading.Lock()
        self._warned: set[Codec] = set()
        self.later: deque[tuple[HostWord, Exception]] = deque()

    def deferred(self, tensor: torch.Tensor) -> CudaKernels | None:
        """The kernels for a tensor if they run asynchronously and report errors later; otherwise None.

        Raises:
            KernelError: the tensor is on a CUDA device, and the CUDA library was not built.
        """
        make = CUDA_KERNELS.get(tensor.device.type)
        if make is None:
            return None
        with self._sharing:
            if self.cuda is None:
                self.cuda = make()
            return self.cuda

    def order(self, tensor: torch.Tensor) -> None:
        """Makes the current stream of a CUDA tensor's device wait for the streams of earlier calls.

        Gradients, residuals and payloads may be used in one stream now and in another one next time, and
        threads may use several streams in turn. If the caller puts streams in order, no stream waits.
        """
        if tensor.device.type in CUDA_KERNELS:
            stream = current_stream(tensor.device)
            with self._sharing:
                streams = self._streams.setdefault(tensor.device, set())
                others = set() if self._chained else streams - {stream}
                streams.add(stream)
            for other in others:
                stream.wait_stream(other)

    def batch(self, entries: Sequence[Entry], arrays: Arrays | None, like: torch.Tensor) -> Batch:
        """Kernels that encode and decode many tensors together; ``like`` is a tensor on the same device.

        Warns of each codec without CUDA kernels, the first time.

        Raises:
            TypeError: there are no kernels for the device.
        """
        kernels = self.deferred(like)
        if kernels is None and like.device.type != "cpu":
            raise TypeError(
                f"expected gradients on the CPU or on a CUDA device, got one on {like.device}"
            )
        if kernels is None:
            return CpuBatch(entries, self.threads, arrays)
        arrays = arrays or Arrays.whole(entry.shape for entry in entries)
        quick = [has_cuda_kernels(entry.codec, entry.shape) for entry in entries]
        if all(quick):
            return CudaBatch(kernels, entries, arrays)
        parts: list[tuple[Batch, Sequence[int]]] = []
        for one in set(quick):
            numbers = [number for number, value in enumerate(quick) if value == one]
            some, there = [entries[number] for number in numbers], arrays.of(numbers)
            if one:
                parts.append((CudaBatch(kernels, some, there), numbers))
            else:
                self._warn(entry.codec for entry in some)
                parts.append((CopiedBatch(some, self.threads, there), numbers))
        return SplitBatch(*parts)

    def restore(self, columns: Sequence[Columns], when: torch.Tensor) -> None:
        """Copies residuals over the next ones if a word on their device is not 0.

        Args:
            columns: sources and destinations, shape=(n,) each, float32 or bfloat16, on one CUDA device.
            when: the word, shape=(1,), int32.
        """
        kernels = self.deferred(when)
        assert kernels is not None
        self.order(when)
        keep_from_reuse(when)
        for one in chain(*columns):
            keep_all_from_reuse(one)
        kernels.restore(columns, when)

    def raise_later(self, word: torch.Tensor, error: Exception) -> None:
        """Makes :meth:`check` raise an error as soon as the host can see that a word is not 0.

        The word, shape=(), is on a CUDA device.
        """
        self.later.append((HostWord(word), error))

    def check(self) -> None:
        """Raises the errors of work on CUDA devices that the host can see without waiting.

        Raises:
            PayloadError: a payload was altered in transit.
            ExchangeError: a rank has sent nothing.
        """
        while self.later and (word := self.later[0][0].read()) is not None:
            _, error = self.later.popleft()
            if word:
                raise error
        if self.cuda is not None:
            self.cuda.check()

    def begin_step(self) -> None:
        """Calls :meth:`check`; called before the first work of a step.

        Raises:
            PayloadError: the same as in :meth:`check`.
            ExchangeError: a CUDA graph is being captured.
        """
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise ExchangeError(
                "expected gradients outside of the capture of a CUDA graph, got some within: a replay "
                "would repeat the step and the noise that were captured; capture no backward pass"
            )
        self.check()

    def settle(self) -> None:
        """Waits for the CUDA devices that have had work, and calls :meth:`check`.

        Raises:
            PayloadError: the same as in :meth:`check`.
        """
        for device in list(self._streams):
            torch.get_device_module(device).synchronize(device)
        self.check()

    def _warn(self, codecs: Iterable[Codec]) -> None:
        for codec in dict.fromkeys(codecs):
            if codec not in self._warned:
                self._warned.add(codec)
                warnings.warn(
                    f"{codec} has no CUDA kernel: copies in host memory are encoded and decoded, which is "
                    f"slow",
                    stacklevel=3,
                )


def has_cuda_kernels(codec: Codec, shape: tuple[int, ...]) -> bool:
    """Whether the CUDA library can encode tensors of a shape with a codec."""
    return codec.on_device and spec_pointer(codec, shape) is not None


def keep_from_reuse(*tensors: torch.Tensor) -> None:
    """Keeps the memory of tensors, all on one device, from other streams until this one is done with it."""
    if tensors and tensors[0].device.type in CUDA_KERNELS:
        stream = current_stream(tensors[0].device)
        for tensor in tensors:
            tensor.record_stream(stream)


def keep_all_from_reuse(arrays: Sequence[torch.Tensor | None]) -> None:
    """Calls :func:`keep_from_reuse` for the tensors of a sequence; for fixed arrays, once in each stream.

    The allocator remembers the stream until it frees the memory.
    """
    tensors = [one for one in arrays if one is not None]
    if not tensors or tensors[0].device.type not in CUDA_KERNELS:
        return
    if isinstance(arrays, FixedArrays):
        stream = current_stream(tensors[0].device)
        if stream in arrays.streams:
            return
        arrays.streams.add(stream)
    keep_from_reuse(*tensors)


def current_stream(device: torch.device) -> torch.Stream:
    """The current stream of a CUDA device."""
    stream: torch.Stream = torch.get_device_module(device).current_stream(device)
    return stream
