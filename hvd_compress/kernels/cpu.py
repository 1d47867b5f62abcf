"""The CPU executor: the native library, called with raw pointers through its C interface."""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache
from typing import Any

import numpy as np

from hvd_compress.codecs import BF16, Codec, ErrorFeedback, NoiseKey, PayloadError
from hvd_compress.codecs.base import check_number
from hvd_compress.kernels.native import (
    DTYPES,
    F32,
    FOLDER,
    I32,
    I64,
    U64,
    KernelError,
    P,
    Shape,
    Signatures,
    check_dtype,
    dtype_of,
    feedback_of,
    noise_of,
    open_library,
    spec_of,
)
from hvd_compress.kernels.oracle import OracleKernels

__all__ = ["CpuKernels", "KernelError"]

ABI_VERSION = 1
_LIBRARY = FOLDER / "libhvdc_cpu.so"


class CpuKernels:
    """Implements :class:`hvd_compress.kernels.interface.Kernels` for NumPy arrays and CPU tensors.

    Anything contiguous with ``data_ptr()`` (a torch tensor) or ``ctypes`` (a NumPy array) is taken. The
    GIL is released while a kernel runs. A codec that has no native kernel yet runs in the oracle.

    Args:
        threads: how many threads a call may use.

    Raises:
        KernelError: the library was not built, or belongs to another version.
    """

    name = "cpu"

    def __init__(self, threads: int = 1) -> None:
        check_number("CpuKernels", "threads", threads, 1, 1024, integer=True)
        self.threads = threads
        self._library = _load()
        self._oracle = OracleKernels()

    @property
    def isa(self) -> str:
        """The instruction set in use: ``"avx512"``, ``"avx2"`` or ``"plain"``."""
        return self._library.hvdc_isa().decode()

    def set_isa(self, name: str) -> None:
        """Uses another instruction set in the whole process; for tests.

        Raises:
            KernelError: this machine does not have it.
        """
        if self._library.hvdc_set_isa(name.encode()):
            raise KernelError(f"set_isa: expected an instruction set of this machine, got {name!r}")

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
        """See :meth:`hvd_compress.kernels.interface.Kernels.encode`."""
        if (residual is not None) != feedback.enabled:
            raise ValueError("encode: expected a residual exactly where error feedback is enabled")
        spec = _spec(codec, shape)
        if spec is None:
            arrays = (_readable(gradient), _as_numpy(payload))
            rest = None if residual is None else _as_numpy(residual)
            self._oracle.encode(
                codec, shape, *arrays, feedback=feedback, residual=rest, noise=noise
            )
            return
        count = math.prod(shape)
        size = codec.payload_bytes(shape)
        status = self._library.hvdc_encode(
            spec,
            ctypes.byref(noise_of(noise)),
            _pointer("gradient", gradient, count),
            dtype_of("gradient", gradient),
            _feedback(feedback, residual, count),
            _pointer("payload", payload, size, "uint8"),
            size,
            self.threads,
        )
        _check(status, codec, shape)

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
        """See :meth:`hvd_compress.kernels.interface.Kernels.decode_sum`."""
        size = codec.payload_bytes(shape)
        ranks, got = payloads.shape
        if got != size:
            raise PayloadError(f"payload: expected size in bytes {size}, got {got}")
        spec = _spec(codec, shape)
        if spec is None:
            total = _readable(out)
            self._oracle.decode_sum(
                codec,
                shape,
                _as_numpy(payloads),
                total,
                step=step,
                scale=scale,
                accumulate=accumulate,
            )
            if _is_bfloat16(out):
                _bits_of(out)[:] = BF16().quantize(total, shape, NoiseKey())[1].view(np.uint16)
            return
        bad = ctypes.c_int32(-1)
        pointer, stride = _rows("payloads", payloads)
        status = self._library.hvdc_decode_sum(
            spec,
            step,
            pointer,
            size,
            stride,
            ranks,
            scale,
            _pointer("out", out, math.prod(shape)),
            dtype_of("out", out),
            accumulate,
            self.threads,
            ctypes.byref(bad),
        )
        payload = payloads[bad.value] if bad.value >= 0 else None
        _check(status, codec, shape, step, payload, f"rank {bad.value}'s ")

    def take_back(
        self,
        codec: Codec,
        shape: Shape,
        gradient: Any,
        residual: Any,
        payload: Any,
        *,
        feedback: ErrorFeedback,
        step: int,
    ) -> None:
        """See :meth:`hvd_compress.kernels.interface.Kernels.take_back`."""
        spec = _spec(codec, shape)
        if spec is None:
            arrays = (_readable(gradient), _as_numpy(residual), _as_numpy(payload))
            self._oracle.take_back(codec, shape, *arrays, feedback=feedback, step=step)
            return
        count = math.prod(shape)
        size = codec.payload_bytes(shape)
        status = self._library.hvdc_take_back(
            spec,
            step,
            _pointer("gradient", gradient, count),
            dtype_of("gradient", gradient),
            _feedback(feedback, residual, count),
            _pointer("payload", payload, size, "uint8"),
            size,
            self.threads,
        )
        _check(status, codec, shape, step, payload)

    def square_sum(self, values: Any) -> float:
        """Sum of squares of a float32 array, in double precision."""
        count = _size(values)
        pointer = _pointer("values", values, count, "float32")
        return float(self._library.hvdc_square_sum(pointer, count, self.threads))


_SIGNATURES: Signatures = {
    "hvdc_abi_version": (ctypes.c_uint32, []),
    "hvdc_isa": (ctypes.c_char_p, []),
    "hvdc_set_isa": (I32, [ctypes.c_char_p]),
    "hvdc_payload_bytes": (I64, [P]),
    "hvdc_encode": (I32, [P, P, P, I32, P, P, I64, I32]),
    "hvdc_decode_sum": (
        I32,
        [P, U64, P, I64, I64, I32, F32, P, I32, I32, I32, P],
    ),
    "hvdc_take_back": (I32, [P, U64, P, I32, P, P, I64, I32]),
    "hvdc_square_sum": (ctypes.c_double, [P, I64, I32]),
}


@lru_cache(maxsize=1)
def _load() -> ctypes.CDLL:
    if not _LIBRARY.exists():
        raise KernelError(
            f"expected the native library {_LIBRARY.name} in hvd_compress/lib, found none: install the "
            f"package with `pip install .` (needs a C++ compiler and cmake)"
        )
    return open_library(_LIBRARY, _SIGNATURES, ("hvdc_abi_version", ABI_VERSION))


@lru_cache(maxsize=4096)
def _spec(codec: Codec, shape: Shape) -> Any | None:
    spec = spec_of(codec, shape)
    if spec is None:
        return None
    expected, got = codec.payload_bytes(shape), _load().hvdc_payload_bytes(ctypes.byref(spec))
    if expected != got:
        raise KernelError(f"{codec!r}, shape {shape}: expected {expected} bytes, got {got}")
    return ctypes.pointer(spec)


def _feedback(feedback: ErrorFeedback, residual: Any | None, count: int) -> Any | None:
    if residual is None:
        return None
    pointer = _pointer("residual", residual, count, "float32")
    return ctypes.byref(feedback_of(feedback, pointer))


def _size(array: Any) -> int:
    return array.numel() if hasattr(array, "data_ptr") else array.size


def _pointer(what: str, array: Any, count: int, dtype: str | None = None) -> int:
    if dtype is not None:
        check_dtype(what, array, dtype)
    if _size(array) != count:
        raise ValueError(f"{what}: expected {count} elements, got {_size(array)}")
    if hasattr(array, "data_ptr"):
        if array.device.type != "cpu":
            raise ValueError(f"{what}: expected a CPU tensor, got one on {array.device}")
        contiguous, pointer = array.is_contiguous(), array.data_ptr()
    else:
        contiguous, pointer = array.flags.c_contiguous, array.ctypes.data
    if not contiguous:
        raise ValueError(f"{what}: expected a contiguous array, got strides of another order")
    return pointer


def _rows(what: str, array: Any) -> tuple[int, int]:
    """Pointer to the first of equally long rows of bytes, and how far apart the rows begin."""
    count, length = array.shape
    if not count:
        return 0, length
    _pointer(what, array[count - 1], length, "uint8")
    stride = array.stride(0) if hasattr(array, "data_ptr") else array.strides[0]
    return _pointer(what, array[0], length, "uint8"), stride


def _as_numpy(array: Any) -> np.ndarray:
    return array.detach().numpy() if hasattr(array, "data_ptr") else array


def _readable(array: Any) -> np.ndarray:
    """For the oracle: NumPy has no bfloat16, so that such tensors are widened into a copy."""
    if not _is_bfloat16(array):
        return _as_numpy(array)
    return (_bits_of(array).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _is_bfloat16(array: Any) -> bool:
    return dtype_of("array", array) == DTYPES["bfloat16"]


def _bits_of(tensor: Any) -> np.ndarray:
    """A bfloat16 tensor's memory, shape=(n,), dtype uint16."""
    pointer = _pointer("array", tensor, _size(tensor))
    words = (ctypes.c_uint16 * _size(tensor)).from_address(pointer) if pointer else ()
    return np.asarray(words, np.uint16)


def _check(
    status: int,
    codec: Codec,
    shape: Shape,
    step: int = 0,
    payload: Any = None,
    whose: str = "",
) -> None:
    if status == 0:
        return
    if payload is not None and status in (2, 3, 4):
        # The oracle's checks name the field and both values; the library only finds the payload.
        from hvd_compress.codecs.payload import open_payload

        try:
            open_payload(codec, shape, step, np.array(_as_numpy(payload)))
        except PayloadError as error:
            raise PayloadError(f"{whose}{error}") from None
    raise KernelError(f"{codec!r}, shape {shape}: the native library answered with status {status}")
