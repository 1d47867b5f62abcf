"""The native library for CPUs: its location, its functions, and its descriptions of codecs."""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from typing import Any

from hvd_compress.codecs import Codec
from hvd_compress.codecs.base import Shape
from hvd_compress.kernels.native import (
    F32,
    FOLDER,
    I32,
    I64,
    KernelError,
    P,
    Signatures,
    open_library,
    spec_of,
)

ABI_VERSION = 10
_LIBRARY = FOLDER / "libhvdc_cpu.so"

_SIGNATURES: Signatures = {
    "hvdc_abi_version": (ctypes.c_uint32, []),
    "hvdc_isa": (ctypes.c_char_p, []),
    "hvdc_set_isa": (I32, [ctypes.c_char_p]),
    "hvdc_payload_bytes": (I64, [P]),
    "hvdc_encode_batch": (I32, [P, I64, P, I32, P]),
    "hvdc_decode_batch": (I32, [P, I64, P, I64, I32, F32, I32, P, P]),
}


@lru_cache(maxsize=1)
def load() -> ctypes.CDLL:
    """Opens the library once and returns it.

    Raises:
        KernelError: the library was not built, or belongs to another version, or HVDC_ISA names an
            instruction set that this machine lacks.
    """
    if not _LIBRARY.exists():
        raise KernelError(
            f"expected the native library {_LIBRARY.name} in hvd_compress/lib, found none: install the "
            f"package with `pip install .` (needs a C++ compiler and cmake)"
        )
    library = open_library(_LIBRARY, _SIGNATURES, ("hvdc_abi_version", ABI_VERSION))
    if library.hvdc_isa() is None:
        raise KernelError(
            f"HVDC_ISA: expected one of 'avx512', 'avx2' and 'plain' that this machine has, got "
            f"{os.environ.get('HVDC_ISA')!r}: correct the environment variable or unset it"
        )
    return library


def isa() -> str:
    """The instruction set in use: ``"avx512"``, ``"avx2"`` or ``"plain"``.

    Raises:
        KernelError: the library was not built, or belongs to another version.
    """
    return load().hvdc_isa().decode()


def set_isa(name: str) -> None:
    """Changes the instruction set in the whole process; for tests.

    Raises:
        KernelError: this machine does not have the instruction set.
    """
    if load().hvdc_set_isa(name.encode()):
        raise KernelError(f"set_isa: expected an instruction set of this machine, got {name!r}")


@lru_cache(maxsize=4096)
def spec_pointer(codec: Codec, shape: Shape) -> Any | None:
    """A pointer to an ``hvdc_spec``; None for a codec without native kernels.

    Raises:
        KernelError: the library computes another size of the payload.
    """
    spec = spec_of(codec, shape)
    if spec is None:
        return None
    expected, got = codec.payload_bytes(shape), load().hvdc_payload_bytes(ctypes.byref(spec))
    if expected != got:
        raise KernelError(f"{codec!r}, shape {shape}: expected {expected} bytes, got {got}")
    return ctypes.pointer(spec)
