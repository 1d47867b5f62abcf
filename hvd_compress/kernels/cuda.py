"""The CUDA executor: the CUDA library, called with device pointers and streams through its C interface."""

from __future__ import annotations

import ctypes
import itertools
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hvd_compress.codecs import Codec, ErrorFeedback, NoiseKey, PayloadError
from hvd_compress.codecs.base import Shape
from hvd_compress.kernels import cuda_library
from hvd_compress.kernels.cpu_arrays import Addresses, FixedArrays, addresses_of
from hvd_compress.kernels.cuda_library import Error, Queue, Residual
from hvd_compress.kernels.interface import Kernels
from hvd_compress.kernels.native import (
    DTYPES,
    KernelError,
    Spec,
    check_dtype,
    dtype_of,
    feedback_of,
    noise_of,
    spec_of,
)

MAX_PAYLOADS = 1024
"""The largest number of ranks whose payloads one call can add up."""

_REMEMBERED = 4096
"""The number of latest calls to which an error can be traced."""

_RESIDUAL = np.dtype(Residual)

_BATCH_BITS = 32
"""The bits of an error's tag that hold a call's number, or the number of an entry of a batch."""


class Device(Protocol):
    """The services that the executor needs from the framework that owns the tensors.

    The library itself allocates nothing: the framework owns all memory, and frees it in the order of its
    streams.
    """

    type: str
    """The ``tensor.device.type`` of the tensors that the executor accepts."""

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


class CudaKernels(Kernels):
    """Implements :class:`hvd_compress.kernels.interface.Kernels` for CUDA tensors.

    A call puts its work into the current stream of the tensors' device and returns. So ``decode_sum``
    cannot raise for an altered payload: the whole result becomes NaN, and :meth:`check` raises after the
    caller has synchronized. With ``HVDC_CUDA_SYNC=1`` in the environment, each call waits for its own
    work, and raises its own errors.

    Threads may share one object: each call starts all of its kernels before another call starts any, so
    calls in one stream use its workspace one after the other.

    In a CUDA graph, a captured call repeats the step and the noise that it was captured with.

    Args:
        device: the services of the framework.
        library: the path of another build of the library, for tests.

    Raises:
        KernelError: the CUDA library was not built, or belongs to another version.

    Attributes:
        services: the services of the framework.
    """

    name = "cuda"

    def __init__(self, device: Device, library: Path | None = None) -> None:
        self.library = cuda_library.load(library or cuda_library.LIBRARY)
        self.services = device
        self._workspaces: dict[tuple[int, int], Any] = {}
        self._outgrown: list[Any] = []  # CUDA graphs may still use them
        # One for each stream: a stream's kernels write in order, those of two streams at the same time.
        self._errors: dict[tuple[int, int], Any] = {}
        self._calls: dict[int, tuple[Codec, Shape]] = {}
        self._tag = 0
        self._batches: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._next_batch = itertools.count(1)
        self._launching = threading.Lock()

    def encode(
        self,
        codec: Codec,
        shape: Shape,
        gradient: Any,
        payload: Any,
        *,
        feedback: ErrorFeedback,
        residual: Any | None,
        noise: NoiseKey,
    ) -> None:
        """Encodes on the device; arguments are those of ``Kernels.encode``.

        ``payload`` must be aligned to 16 bytes.
        """
        if (residual is not None) != feedback.enabled:
            raise ValueError("encode: expected a residual exactly where error feedback is enabled")
        spec = spec_for(codec, shape)
        count, size = math.prod(shape), codec.payload_bytes(shape)
        arrays = DeviceArrays(self.services.type, gradient)
        coefficients = None
        if residual is not None:
            pointer = arrays.pointer("residual", residual, count, feedback.residual_dtype)
            coefficients = ctypes.byref(feedback_of(feedback, pointer))
        self._call(
            f"encode: {codec!r}, shape {shape}",
            self.library.hvdc_cuda_encode,
            arrays.index,
            self.library.hvdc_cuda_workspace_bytes(ctypes.byref(spec)),
            ctypes.byref(spec),
            ctypes.byref(noise_of(noise)),
            arrays.pointer("gradient", gradient, count),
            dtype_of("gradient", gradient),
            coefficients,
            arrays.pointer("payload", payload, size, "uint8"),
            size,
        )

    def decode_sum(
        self,
        codec: Codec,
        shape: Shape,
        payloads: Any,
        out: Any,
        *,
        step: int,
        scale: float = 1.0,
    ) -> None:
        """Decodes and adds on the device; arguments are those of ``Kernels.decode_sum``.

        ``decode_sum`` raises only for a wrong number or size of payloads; for altered payloads,
        :meth:`check` raises.
        """
        size = codec.payload_bytes(shape)
        ranks, got = payloads.shape
        if got != size:
            raise PayloadError(f"payload: expected size in bytes {size}, got {got}")
        if ranks > MAX_PAYLOADS:
            raise ValueError(f"payloads: expected at most {MAX_PAYLOADS} ranks, got {ranks}")
        spec = spec_for(codec, shape)
        arrays = DeviceArrays(self.services.type, out)
        arguments = (
            ctypes.byref(spec),
            step,
            arrays.rows("payloads", payloads),
            size,
            payloads.stride(0),
            ranks,
            scale,
            arrays.pointer("out", out, math.prod(shape)),
            dtype_of("out", out),
            None,
        )
        tag = self._remember(codec, shape)
        workspace_bytes = self.library.hvdc_cuda_workspace_bytes(ctypes.byref(spec))
        with self.launching(arrays.index) as stream:
            queue = self._queue(arrays.index, stream, workspace_bytes)
            error = self.error_address(arrays.index, stream)
            status = self.library.hvdc_cuda_decode_sum(*arguments, error, tag, queue)
            self.check_status(status, f"decode_sum: {codec!r}, shape {shape}")

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
        self._call(
            "restore",
            self.library.hvdc_cuda_restore,
            arrays.index,
            0,
            table.ctypes.data,
            len(table),
            arrays.pointer("when", when, 1, "int32"),
        )

    def check(self) -> None:
        """Raises the error of an earlier call; for a caller that has just synchronized.

        If calls in several streams have failed, each call of this method raises the error of one stream.

        Raises:
            PayloadError: a payload was not one that its codec writes for its shape and step. If the call
                was one of a batch, the error is what the batch's explanation makes of it.
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
        codec, shape = self._calls.get(number, ("unknown codec", "unknown"))
        if batch:
            codec, shape = "unknown codec", "unknown"
        return PayloadError(altered(rank, what, codec, shape))

    def _call(
        self,
        what: str,
        function: Callable[..., int],
        index: int,
        workspace_bytes: int,
        *arguments: Any,
    ) -> None:
        """Puts work into the current stream of a device.

        Args:
            what: the name of the work, for messages.
            function: a function of the library.
            index: the index of the device.
            workspace_bytes: the size of the workspace that the work needs.
            arguments: the arguments of the function, except for the last one, the queue.
        """
        with self.launching(index) as stream:
            queue = self._queue(index, stream, workspace_bytes)
            self.check_status(function(*arguments, queue), what)

    def _queue(self, index: int, stream: int, workspace_bytes: int) -> Any:
        """The current stream of a device; with a prepared workspace of its own if the work needs one."""
        if not workspace_bytes:
            return ctypes.byref(Queue(index, 0, stream, None, 0))
        workspace = self._workspaces.get((index, stream))
        if workspace is None or workspace.numel() < workspace_bytes:
            if workspace is not None:
                self._outgrown.append(workspace)
            # Twice as large each time, so that what is outgrown takes no more than what is in use.
            size = 1 << (workspace_bytes - 1).bit_length()
            workspace = self.services.empty(size, index)
            queue = Queue(index, 0, stream, workspace.data_ptr(), workspace.numel())
            status = self.library.hvdc_cuda_prepare(ctypes.byref(queue))
            self.check_status(status, "prepare")
            self._workspaces[index, stream] = workspace
        size = workspace.numel()
        return ctypes.byref(Queue(index, 0, stream, workspace.data_ptr(), size))

    def _remember(self, codec: Codec, shape: Shape) -> int:
        with self._launching:
            self._tag += 1
            self._calls[self._tag] = (codec, shape)
            self._calls.pop(self._tag - _REMEMBERED, None)
            return self._tag

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
