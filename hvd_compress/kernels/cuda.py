"""The CUDA library, called with device pointers and streams through its C interface."""

from __future__ import annotations

import ctypes
import itertools
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hvd_compress.codecs import Codec, PayloadError
from hvd_compress.codecs.base import Shape
from hvd_compress.kernels import cuda_library
from hvd_compress.kernels.cpu_arrays import Addresses, FixedArrays, addresses_of
from hvd_compress.kernels.cuda_library import Error, Queue, Residual
from hvd_compress.kernels.native import (
    DTYPES,
    KernelError,
    Spec,
    check_dtype,
    dtype_of,
    spec_of,
)

MAX_PAYLOADS = 1024
"""The largest number of ranks whose payloads one call can add up."""

_RESIDUAL = np.dtype(Residual)

_BATCH_BITS = 32
"""The bits of an error's tag that hold the number of an entry; the others hold that of the batch."""


class Device(Protocol):
    """The services that the kernels need from the framework that owns the tensors.

    The library itself allocates nothing: the framework owns all memory, and frees it in the order of its
    streams.
    """

    type: str
    """The ``tensor.device.type`` of the tensors that the kernels accept."""

    def guard(self, index: int) -> AbstractContextManager[object]:
        """Makes a device current; restores the previous one, which may have no context yet, on exit."""
        ...

    def stream(self, index: int) -> int:
        """The current stream of a device, a ``cudaStream_t``."""
        ...

    def empty(self, size: int, index: int) -> Any:
        """Allocates memory on a device: a tensor, shape=(size,), uint8, aligned to 256 bytes."""
        ...

    def pinned(self, size: int) -> Any:
        """Allocates host memory that devices can write to: a tensor, shape=(size,), uint8, zeros."""
        ...


class CudaKernels:
    """The CUDA library for one framework: the launches and the errors of all batches on its devices.

    With ``HVDC_CUDA_SYNC=1`` in the environment, each call waits for its own work, and raises its own
    errors. Threads may share one object: a call starts all of its kernels before another call starts any.

    Args:
        device: the services of the framework.
        library: the path of another build of the library, for tests.

    Raises:
        KernelError: the CUDA library was not built, or belongs to another version.

    Attributes:
        services: the services of the framework.
    """

    def __init__(self, device: Device, library: Path | None = None) -> None:
        self.library = cuda_library.load(library or cuda_library.LIBRARY)
        self.services = device
        # One for each stream: a stream's kernels write in order, those of two streams at the same time.
        self._errors: dict[tuple[int, int], Any] = {}
        self._batches: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._next_batch = itertools.count(1)
        self._launching = threading.Lock()

    def restore(
        self, columns: Sequence[tuple[Sequence[Any | None], Sequence[Any | None]]], when: Any
    ) -> None:
        """Copies residuals over others if ``when`` is not 0, without the host reading ``when``.

        Args:
            columns: sources and destinations on the device; shape=(n,) each, float32 or bfloat16, of one
                dtype in a pair; None for neither.
            when: the condition, shape=(1,), int32.
        """
        arrays = DeviceArrays(self.services.type, when)
        table = np.concatenate([_copies(arrays, *both) for both in columns])
        word = arrays.pointer("when", when, 1, "int32")
        with self.launching(arrays.index) as stream:
            queue = ctypes.byref(Queue(arrays.index, 0, stream))
            status = self.library.hvdc_cuda_restore(table.ctypes.data, len(table), word, queue)
            self.check_status(status, "restore")

    def check(self) -> None:
        """Raises the error of an earlier call; for a caller that has just synchronized.

        If calls in several streams have failed, each call of this method raises the error of one stream.

        Raises:
            PayloadError: a payload was not one that its codec writes for its shape and step; what
                ``explain`` of its batch makes, unless the batch is gone.
        """
        for memory in list(self._errors.values()):
            error = Error.from_address(memory.data_ptr())
            if error.status:
                raise self._explained(error)

    def register(self, batch: Any) -> int:
        """The tag of the first entry of a batch, whose ``explain`` then makes the errors of its calls.

        Args:
            batch: the batch, which is not kept.
        """
        number = next(self._next_batch)
        self._batches[number] = batch
        return number << _BATCH_BITS

    @contextmanager
    def launching(self, index: int) -> Iterator[int]:
        """Makes a device current while one call starts its kernels; yields the device's stream."""
        with self._launching, self.services.guard(index):
            yield self.services.stream(index)

    def error_address(self, index: int, stream: int) -> int:
        """The address to which the kernels of one stream of a device write what is wrong with payloads."""
        if (index, stream) not in self._errors:
            self._errors[index, stream] = self.services.pinned(ctypes.sizeof(Error))
        return self._errors[index, stream].data_ptr()

    def _explained(self, error: Error) -> PayloadError:
        """Takes an error out of the memory to which a device has written it."""
        what = {3: "header", 4: "checksum", 6: "list of indices"}.get(
            error.status, f"status {error.status}"
        )
        rank = error.payload
        batch, number = divmod(error.tag, 1 << _BATCH_BITS)
        error.status = 0
        explained = self._batches.get(batch)
        if explained is not None:
            return explained.explain(number, rank, what)
        return PayloadError(altered(rank, what, "unknown codec", "unknown"))

    def check_status(self, status: int, call: str) -> None:
        """Raises the error that a status of the library stands for; ``call`` names the work."""
        if status == 0:
            return
        if status == cuda_library.FAILED:
            raise KernelError(f"{call}: CUDA answered: {self.library.hvdc_cuda_message().decode()}")
        if status == cuda_library.TOO_LARGE:
            raise ValueError(
                f"{call}: expected less than 2**31 elements, and as few words in the payload, got more: "
                f"split the tensor"
            )
        if status == cuda_library.MISALIGNED:
            raise ValueError(
                f"{call}: expected payloads aligned to 16 bytes and tensors to their elements, got others"
            )
        raise KernelError(f"{call}: the CUDA library answered with status {status}")


def _copies(
    arrays: DeviceArrays, sources: Sequence[Any | None], destinations: Sequence[Any | None]
) -> np.ndarray:
    """The rows of the library's table for copies of residuals over others."""
    known = sources.copies if isinstance(sources, FixedArrays) else None
    if (
        known is not None
        and isinstance(destinations, FixedArrays)
        and known[0] is destinations.checked
    ):
        return known[1]
    rows = np.zeros(len(sources), _RESIDUAL)
    rows["count"] = counts = [0 if one is None else one.numel() for one in sources]
    rows["before"], rows["dtype"], codes = arrays.pointers("before", sources, counts)
    rows["after"], dtypes, _ = arrays.pointers("after", destinations, counts)
    if DTYPES["float16"] in codes or (rows["dtype"] != dtypes).any():
        raise TypeError("residuals: expected pairs of one dtype, float32 or bfloat16, got others")
    if isinstance(sources, FixedArrays) and isinstance(destinations, FixedArrays):
        sources.copies = destinations.checked, rows
    return rows


def altered(rank: int, what: str, codec: object, shape: object) -> str:
    """The message of the error for an altered payload, of which ``what`` is wrong."""
    return (
        f"rank {rank}'s payload: expected the {what} that {codec!r} writes for shape {shape} and this "
        f"step, got another one; its result is NaN"
    )


@lru_cache(maxsize=4096)
def spec_for(codec: Codec, shape: Shape) -> Spec:
    """The C interface's description of a codec and a tensor's shape.

    Raises:
        KernelError: the codec has no CUDA kernels.
    """
    spec = spec_of(codec, shape)
    if spec is None or codec.varies or not codec.on_device:
        raise KernelError(f"{codec!r} has no CUDA kernel: keep its gradients on the CPU")
    return spec


class DeviceArrays:
    """Returns the addresses of tensors, after a check that all are on the device of the first one."""

    def __init__(self, device_type: str, first: Any) -> None:
        self._type = device_type
        self.device = first.device
        self.index: int = first.device.index or 0
        self._place = None if device_type == "cpu" else self.index

    def pointer(self, what: str, tensor: Any, count: int, dtype: str | None = None) -> int:
        """The address of a contiguous tensor of ``count`` elements.

        Raises:
            TypeError: the dtype differs.
            ValueError: the size or the device differs, or the tensor is not contiguous.
        """
        if dtype is not None:
            check_dtype(what, tensor, dtype)
        if tensor.numel() != count:
            raise ValueError(f"{what}: expected {count} elements, got {tensor.numel()}")
        if not tensor.is_contiguous():
            raise ValueError(f"{what}: expected a contiguous tensor, got strides of another order")
        return self._address(what, tensor)

    def pointers(
        self, what: str, tensors: Sequence[Any | None], counts: Sequence[int]
    ) -> Addresses:
        """The addresses and the ``hvdc_dtype`` of many tensors; 0 for None.

        Raises:
            TypeError: a tensor has another dtype than float32, float16 and bfloat16.
            ValueError: as in :meth:`pointer`.
        """
        found = addresses_of(tensors, counts, self._place)
        if found is not None:
            return found
        pointers, codes = [0] * len(counts), [0] * len(counts)
        for number, (tensor, count) in enumerate(zip(tensors, counts, strict=True)):
            if tensor is not None:
                place = f"{what}[{number}]"
                codes[number] = dtype_of(place, tensor)
                pointers[number] = self.pointer(place, tensor, count)
        return Addresses.of(pointers, codes)

    def rows(self, what: str, tensor: Any) -> int:
        """The address of a two-dimensional uint8 tensor; there may be gaps between its rows.

        Raises:
            TypeError: the dtype differs.
            ValueError: the device differs, or a row is not contiguous.
        """
        check_dtype(what, tensor, "uint8")
        if tensor.shape[1] > 1 and tensor.stride(1) != 1:
            raise ValueError(f"{what}: expected contiguous rows, got strides of another order")
        return self._address(what, tensor)

    def _address(self, what: str, tensor: Any) -> int:
        if tensor.device.type != self._type:
            raise ValueError(
                f"{what}: expected a {self._type.upper()} tensor, got one on {tensor.device}"
            )
        if tensor.device != self.device:
            raise ValueError(
                f"{what}: expected a tensor on {self.device} as the others, got one on {tensor.device}"
            )
        return tensor.data_ptr()
