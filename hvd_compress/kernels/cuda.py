"""The CUDA executor: the CUDA library, called with device pointers and streams through its C interface."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from hvd_compress.codecs import Codec, ErrorFeedback, NoiseKey, PayloadError
from hvd_compress.kernels.interface import Kernels
from hvd_compress.kernels.native import (
    F32,
    FOLDER,
    I32,
    I64,
    U64,
    KernelError,
    P,
    Shape,
    Signatures,
    Spec,
    check_dtype,
    dtype_of,
    feedback_of,
    noise_of,
    open_library,
    spec_of,
)

ABI_VERSION = 4
MAX_PAYLOADS = 1024
"""The largest number of ranks whose payloads one call can add up."""

_LIBRARY = FOLDER / "libhvdc_cuda.so"
_REMEMBERED = 4096
"""The number of latest calls to which an error can be traced."""


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

    def number(self, tensor: Any) -> float:
        """The float64 in a tensor of eight bytes; waits for the work that was started before."""
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
    """

    name = "cuda"

    def __init__(self, device: Device, library: Path | None = None) -> None:
        self._device = device
        self._library = _load(library or _LIBRARY)
        self._workspaces: dict[tuple[int, int], Any] = {}
        self._outgrown: list[Any] = []  # CUDA graphs may still use them
        self._error = device.pinned(ctypes.sizeof(_Error))
        self._calls: dict[int, tuple[Codec, Shape]] = {}
        self._tag = 0
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
        spec = _spec(codec, shape)
        count, size = math.prod(shape), codec.payload_bytes(shape)
        arrays = _Arrays(self._device.type, gradient)
        coefficients = None
        if residual is not None:
            pointer = arrays.pointer("residual", residual, count, "float32")
            coefficients = ctypes.byref(feedback_of(feedback, pointer))
        self._call(
            f"encode: {codec!r}, shape {shape}",
            self._library.hvdc_cuda_encode,
            arrays.index,
            self._library.hvdc_cuda_workspace_bytes(ctypes.byref(spec)),
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
        accumulate: bool = False,
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
        spec = _spec(codec, shape)
        arrays = _Arrays(self._device.type, out)
        self._call(
            f"decode_sum: {codec!r}, shape {shape}",
            self._library.hvdc_cuda_decode_sum,
            arrays.index,
            self._library.hvdc_cuda_workspace_bytes(ctypes.byref(spec)),
            ctypes.byref(spec),
            step,
            arrays.rows("payloads", payloads),
            size,
            payloads.stride(0),
            ranks,
            scale,
            arrays.pointer("out", out, math.prod(shape)),
            dtype_of("out", out),
            accumulate,
            self._error.data_ptr(),
            self._remember(codec, shape),
        )

    def restore(self, before: Any, after: Any, when: Any) -> None:
        """Copies ``before`` to ``after`` if ``when`` is not 0, without the host reading ``when``.

        Args:
            before: the source, on the device; shape=(n,), float32.
            after: the destination, on the device; shape=(n,), float32.
            when: the condition, such as the flags of :meth:`collect_flags`; shape=(1,), int32.
        """
        arrays, count = _Arrays(self._device.type, before), math.prod(before.shape)
        self._call(
            "restore",
            self._library.hvdc_cuda_restore,
            arrays.index,
            0,
            arrays.pointer("before", before, count, "float32"),
            arrays.pointer("after", after, count, "float32"),
            count,
            arrays.pointer("when", when, 1, "int32"),
        )

    def collect_flags(self, payloads: Any, flags: Any) -> None:
        """ORs the flags of all payloads' headers into ``flags``, a device tensor of one int32.

        Args:
            payloads: the payloads, shape=(k, bytes), uint8.
            flags: the flags, in and out, shape=(1,), int32;
                ``hvd_compress.codecs.payload.FLAG_NONFINITE`` is 1.
        """
        ranks = len(payloads)
        arrays = _Arrays(self._device.type, payloads)
        self._call(
            "collect_flags",
            self._library.hvdc_cuda_collect_flags,
            arrays.index,
            0,
            arrays.rows("payloads", payloads),
            payloads.stride(0),
            ranks,
            arrays.pointer("flags", flags, 1, "int32"),
        )

    def square_sum(self, values: Any) -> float:
        """The sum of squares of a float32 tensor, in double precision; waits for the result."""
        count = _count(values)
        arrays = _Arrays(self._device.type, values)
        result = self._device.empty(8, arrays.index)
        self._call(
            f"square_sum: {count} elements",
            self._library.hvdc_cuda_square_sum,
            arrays.index,
            self._library.hvdc_cuda_square_sum_bytes(count),
            arrays.pointer("values", values, count, "float32"),
            count,
            result.data_ptr(),
        )
        return self._device.number(result)

    def check(self) -> None:
        """Raises the error of an earlier call; for a caller that has just synchronized.

        Raises:
            PayloadError: a payload was not one that its codec writes for its shape and step.
        """
        error = _Error.from_address(self._error.data_ptr())
        if error.status == 0:
            return
        what = {3: "header", 4: "checksum"}.get(error.status, f"status {error.status}")
        codec, shape = self._calls.get(error.tag, ("unknown codec", "unknown"))
        rank = error.payload
        error.status = 0
        raise PayloadError(
            f"rank {rank}'s payload: expected the {what} that {codec!r} writes for shape {shape} and this "
            f"step, got another one; its result is NaN"
        )

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
        with self._launching, self._device.guard(index):
            queue = self._queue(index, workspace_bytes)
            self._check_status(function(*arguments, queue), what)

    def _queue(self, index: int, workspace_bytes: int) -> Any:
        """The current stream of a device with its own prepared workspace, which is large enough."""
        stream = self._device.stream(index)
        workspace = self._workspaces.get((index, stream))
        if workspace is None or _count(workspace) < workspace_bytes:
            if workspace is not None:
                self._outgrown.append(workspace)
            least = self._library.hvdc_cuda_square_sum_bytes(0)
            # Twice as large each time, so that what is outgrown takes no more than what is in use.
            size = 1 << (max(workspace_bytes, least) - 1).bit_length()
            workspace = self._device.empty(size, index)
            queue = _Queue(index, 0, stream, workspace.data_ptr(), _count(workspace))
            status = self._library.hvdc_cuda_prepare(ctypes.byref(queue))
            self._check_status(status, "prepare")
            self._workspaces[index, stream] = workspace
        size = _count(workspace)
        return ctypes.byref(_Queue(index, 0, stream, workspace.data_ptr(), size))

    def _remember(self, codec: Codec, shape: Shape) -> int:
        with self._launching:
            self._tag += 1
            self._calls[self._tag] = (codec, shape)
            self._calls.pop(self._tag - _REMEMBERED, None)
            return self._tag

    def _check_status(self, status: int, call: str) -> None:
        if status == 0:
            return
        if status == _FAILED:
            raise KernelError(
                f"{call}: CUDA answered: {self._library.hvdc_cuda_message().decode()}"
            )
        if status == _TOO_LARGE:
            raise ValueError(
                f"{call}: expected less than 2**31 elements, and as few words in the payload, got more: "
                f"split the tensor"
            )
        if status == _MISALIGNED:
            raise ValueError(
                f"{call}: expected payloads aligned to 16 bytes and tensors to their elements, got others"
            )
        raise KernelError(f"{call}: the CUDA library answered with status {status}")


class _Queue(ctypes.Structure):
    _fields_ = [
        ("device", I32),
        ("reserved", I32),
        ("stream", P),
        ("workspace", P),
        ("workspace_bytes", I64),
    ]


class _Error(ctypes.Structure):
    _fields_ = [("status", ctypes.c_uint32), ("payload", I32), ("tag", U64)]


def library() -> Path:
    """Opens the CUDA library and returns its path.

    Raises:
        KernelError: the library was not built, or belongs to another version.
    """
    _load(_LIBRARY)
    return _LIBRARY


_FAILED, _TOO_LARGE, _MISALIGNED = 16, 17, 18

_SIGNATURES: Signatures = {
    "hvdc_cuda_abi_version": (ctypes.c_uint32, []),
    "hvdc_cuda_message": (ctypes.c_char_p, []),
    "hvdc_cuda_workspace_bytes": (I64, [P]),
    "hvdc_cuda_square_sum_bytes": (I64, [I64]),
    "hvdc_cuda_prepare": (I32, [P]),
    "hvdc_cuda_encode": (I32, [P, P, P, I32, P, P, I64, P]),
    "hvdc_cuda_decode_sum": (
        I32,
        [P, U64, P, I64, I64, I32, F32, P, I32, I32, P, U64, P],
    ),
    "hvdc_cuda_restore": (I32, [P, P, I64, P, P]),
    "hvdc_cuda_collect_flags": (I32, [P, I64, I32, P, P]),
    "hvdc_cuda_square_sum": (I32, [P, I64, P, P]),
}


@lru_cache(maxsize=4)
def _load(path: Path) -> ctypes.CDLL:
    if not path.exists():
        raise KernelError(
            f"CUDA tensors need the CUDA library {path.name} in hvd_compress/lib, found none: install "
            f"nvcc of CUDA 12 or 13 and the package again with `HVDC_CUDA=on pip install .`, or keep the "
            f"model on the CPU"
        )
    return open_library(path, _SIGNATURES, ("hvdc_cuda_abi_version", ABI_VERSION))


@lru_cache(maxsize=4096)
def _spec(codec: Codec, shape: Shape) -> Spec:
    spec = spec_of(codec, shape)
    if spec is None or codec.varies or not codec.on_device:
        raise KernelError(f"{codec!r} has no CUDA kernel: keep its gradients on the CPU")
    return spec


class _Arrays:
    """Returns the addresses of tensors, after a check that all are on the device of the first one."""

    def __init__(self, device_type: str, first: Any) -> None:
        self._type = device_type
        self._device = first.device
        self.index: int = first.device.index or 0

    def pointer(self, what: str, tensor: Any, count: int, dtype: str | None = None) -> int:
        """The address of a contiguous tensor of ``count`` elements.

        Raises:
            TypeError: the dtype differs.
            ValueError: the size or the device differs, or the tensor is not contiguous.
        """
        if dtype is not None:
            check_dtype(what, tensor, dtype)
        if _count(tensor) != count:
            raise ValueError(f"{what}: expected {count} elements, got {_count(tensor)}")
        if not tensor.is_contiguous():
            raise ValueError(f"{what}: expected a contiguous tensor, got strides of another order")
        return self._address(what, tensor)

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
        if tensor.device != self._device:
            raise ValueError(
                f"{what}: expected a tensor on {self._device} as the others, got one on {tensor.device}"
            )
        return tensor.data_ptr()


def _count(tensor: Any) -> int:
    return tensor.numel()
