"""The CPU executor: the native library, called with raw pointers through its C interface."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

from hvd_compress.codecs import BF16, Codec, ErrorFeedback, NoiseKey, PayloadError
from hvd_compress.codecs.base import Shape
from hvd_compress.codecs.checks import check_threads
from hvd_compress.kernels.batch import altered_payload
from hvd_compress.kernels.cpu_arrays import (
    as_numpy,
    bits_of,
    is_bfloat16,
    pointer_to,
    readable,
    rows,
)
from hvd_compress.kernels.cpu_library import load, spec_pointer
from hvd_compress.kernels.interface import Kernels
from hvd_compress.kernels.native import (
    DTYPES,
    KernelError,
    Noise,
    Tensor,
    dtype_of,
    noise_of,
)
from hvd_compress.kernels.reference import ReferenceKernels

__all__ = ["CpuKernels", "KernelError"]


class CpuKernels(Kernels):
    """Implements :class:`hvd_compress.kernels.interface.Kernels` for NumPy arrays and CPU tensors.

    Arrays may be any contiguous objects with ``data_ptr()`` (torch tensors) or ``ctypes`` (NumPy arrays).
    The GIL is released while a kernel runs. A codec without a native kernel runs in the reference.

    Args:
        threads: the number of threads that a call may use.

    Raises:
        KernelError: the library was not built, or belongs to another version.
    """

    name = "cpu"

    def __init__(self, threads: int = 1) -> None:
        check_threads("CpuKernels", threads)
        self.threads = threads
        self._library = load()
        self._reference = ReferenceKernels()

    @property
    def isa(self) -> str:
        """The instruction set in use: ``"avx512"``, ``"avx2"`` or ``"plain"``."""
        return self._library.hvdc_isa().decode()

    def set_isa(self, name: str) -> None:
        """Changes the instruction set in the whole process; for tests.

        Raises:
            KernelError: this machine does not have the instruction set.
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
        """Encodes a tensor; arguments are those of :meth:`.interface.Kernels.encode`."""
        spec = spec_pointer(codec, shape)
        if spec is None:
            arrays = (readable(gradient), as_numpy(payload))
            rest = None if residual is None else readable(residual)
            self._reference.encode(
                codec, shape, *arrays, feedback=feedback, residual=rest, noise=noise
            )
            if rest is not None and is_bfloat16(residual):
                bits_of(residual)[:] = rest.view(np.uint32) >> np.uint32(16)
            return
        if (residual is not None) != feedback.enabled:
            raise ValueError("encode: expected a residual exactly where error feedback is enabled")
        count, size = math.prod(shape), codec.payload_bytes(shape)
        tensor = Tensor(
            spec=spec.contents,
            noise=noise_of(noise),
            values=pointer_to("gradient", gradient, count),
            dtype=dtype_of("gradient", gradient),
            payload_bytes=size,
        )
        if residual is not None:
            pointer = pointer_to("residual", residual, count, feedback.residual_dtype)
            tensor.residual = tensor.next_residual = pointer
            tensor.alpha, tensor.beta = feedback.alpha, feedback.beta
            tensor.residual_dtype = DTYPES[feedback.residual_dtype]
        message = pointer_to("payload", payload, size, "uint8")
        status = self._library.hvdc_encode_batch(
            ctypes.byref(tensor), 1, message, self.threads, None
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
    ) -> None:
        """Decodes and adds payloads; arguments are those of :meth:`.interface.Kernels.decode_sum`."""
        size = codec.payload_bytes(shape)
        ranks, got = payloads.shape
        if got != size:
            raise PayloadError(f"payload: expected size in bytes {size}, got {got}")
        spec = spec_pointer(codec, shape)
        if spec is None:
            total = readable(out)
            self._reference.decode_sum(
                codec, shape, as_numpy(payloads), total, step=step, scale=scale
            )
            if is_bfloat16(out):
                bits_of(out)[:] = BF16().quantize(total, shape, NoiseKey())[1].view(np.uint16)
            return
        bad = ctypes.c_int32(-1)
        pointer, stride = rows("payloads", payloads)
        tensor = Tensor(
            spec=spec.contents,
            noise=Noise(step=step),
            values=pointer_to("out", out, math.prod(shape)),
            dtype=dtype_of("out", out),
            payload_bytes=size,
        )
        status = self._library.hvdc_decode_batch(
            ctypes.byref(tensor),
            1,
            pointer,
            stride,
            ranks,
            scale,
            self.threads,
            None,
            ctypes.byref(bad),
        )
        if status and bad.value >= 0:
            # The reference's checks name the field and both values; the library only finds the payload.
            error = altered_payload(codec, shape, step, bad.value, payloads[bad.value])
            if error is not None:
                raise error
        _check(status, codec, shape)


def _check(status: int, codec: Codec, shape: Shape) -> None:
    if status:
        raise KernelError(
            f"{codec!r}, shape {shape}: the native library answered with status {status}"
        )
