"""The CUDA library: its location, its functions and its structures."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from hvd_compress.codecs import Codec
from hvd_compress.codecs.base import Shape
from hvd_compress.kernels.batch import Entry
from hvd_compress.kernels.native import (
    DTYPES,
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
    noise_of,
    open_library,
)

ABI_VERSION = 12
LIBRARY = FOLDER / "libhvdc_cuda.so"
FAILED, TOO_LARGE, MISALIGNED = 16, 17, 18


class Queue(ctypes.Structure):
    """The C interface's ``hvdc_cuda_queue``."""

    _fields_ = [("device", I32), ("reserved", I32), ("stream", P)]


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


def table_of(
    entries: Sequence[Entry],
    places: Sequence[tuple[int, int]],
    spec: Callable[[Codec, Shape], Spec],
) -> Any:
    """The C interface's table of a batch: one :class:`CudaEntry` for each entry.

    Args:
        entries: the entries of the batch.
        places: each entry's array, by number, and the entry's first element in this array.
        spec: returns the description of a codec and a tensor's shape.
    """
    table = (CudaEntry * len(entries))()
    for row, entry, (array, first) in zip(table, entries, places, strict=True):
        row.spec, row.noise = spec(entry.codec, entry.shape), noise_of(entry.noise)
        row.alpha, row.beta = entry.feedback.alpha, entry.feedback.beta
        row.feedback = entry.feedback.enabled
        row.residual_dtype = DTYPES[entry.feedback.residual_dtype]
        row.array, row.first, row.offset = array, first, entry.offset
    return table


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


SIGNATURES: Signatures = {
    "hvdc_cuda_abi_version": (ctypes.c_uint32, []),
    "hvdc_cuda_message": (ctypes.c_char_p, []),
    "hvdc_cuda_restore": (I32, [P, I64, P, P]),
    "hvdc_cuda_plan_encode": (I32, [P, I64, I32, P]),
    "hvdc_cuda_plan_decode": (I32, [P, I64, I32, I32, P]),
    "hvdc_cuda_plan_bytes": (I64, [P]),
    "hvdc_cuda_plan_prepare": (I32, [P, P, P]),
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
