"""The CUDA library: its location, its functions and its structures."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path

from hvd_compress.kernels.native import (
    F32,
    FOLDER,
    I32,
    I64,
    U64,
    KernelError,
    Noise,
    P,
    Signatures,
    Spec,
    open_library,
)

ABI_VERSION = 10
LIBRARY = FOLDER / "libhvdc_cuda.so"
FAILED, TOO_LARGE, MISALIGNED = 16, 17, 18


class Queue(ctypes.Structure):
    """The C interface's ``hvdc_cuda_queue``."""

    _fields_ = [
        ("device", I32),
        ("reserved", I32),
        ("stream", P),
        ("workspace", P),
        ("workspace_bytes", I64),
    ]


class Error(ctypes.Structure):
    """The C interface's ``hvdc_cuda_error``."""

    _fields_ = [("status", ctypes.c_uint32), ("payload", I32), ("tag", U64)]


class Residual(ctypes.Structure):
    """The C interface's ``hvdc_cuda_residual``."""

    _fields_ = [("before", P), ("after", P), ("count", I64), ("dtype", I32), ("reserved", I32)]


class CudaEntry(ctypes.Structure):
    """The C interface's ``hvdc_cuda_entry``."""

    _fields_ = [
        ("spec", Spec),
        ("noise", Noise),
        ("alpha", F32),
        ("beta", F32),
        ("feedback", I32),
        ("array", I32),
        ("first", I64),
        ("offset", I64),
        ("residual_dtype", I32),
        ("reserved", I32),
    ]


class Array(ctypes.Structure):
    """The C interface's ``hvdc_cuda_array``."""

    _fields_ = [
        ("values", P),
        ("residual", P),
        ("next_residual", P),
        ("step", U64),
        ("dtype", I32),
        ("reserved", I32),
    ]


def library() -> Path:
    """Opens the CUDA library and returns its path.

    Raises:
        KernelError: the library was not built, or belongs to another version.
    """
    load(LIBRARY)
    return LIBRARY


SIGNATURES: Signatures = {
    "hvdc_cuda_abi_version": (ctypes.c_uint32, []),
    "hvdc_cuda_message": (ctypes.c_char_p, []),
    "hvdc_cuda_workspace_bytes": (I64, [P]),
    "hvdc_cuda_prepare": (I32, [P]),
    "hvdc_cuda_encode": (I32, [P, P, P, I32, P, P, I64, P]),
    "hvdc_cuda_decode_sum": (
        I32,
        [P, U64, P, I64, I64, I32, F32, P, I32, P, P, U64, P],
    ),
    "hvdc_cuda_restore": (I32, [P, I64, P, P]),
    "hvdc_cuda_plan_encode": (I32, [P, I64, I32, P]),
    "hvdc_cuda_plan_decode": (I32, [P, I64, I32, I32, P]),
    "hvdc_cuda_plan_bytes": (I64, [P]),
    "hvdc_cuda_plan_prepare": (I32, [P, P]),
    "hvdc_cuda_plan_free": (None, [P]),
    "hvdc_cuda_encode_batch": (I32, [P, P, I64, P, P]),
    "hvdc_cuda_decode_batch": (I32, [P, P, I64, P, I64, F32, P, P, U64, P]),
}


@lru_cache(maxsize=4)
def load(path: Path) -> ctypes.CDLL:
    """Opens a build of the library once and returns it.

    Raises:
        KernelError: the library was not built, or belongs to another version.
    """
    if not path.exists():
        raise KernelError(
            f"CUDA tensors need the CUDA library {path.name} in hvd_compress/lib, found none: install "
            f"nvcc of CUDA 12 or 13 and the package again with `HVDC_CUDA=on pip install .`, or keep the "
            f"model on the CPU"
        )
    return open_library(path, SIGNATURES, ("hvdc_cuda_abi_version", ABI_VERSION))
