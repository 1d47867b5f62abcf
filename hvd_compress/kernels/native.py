"""The structures of the C interface, and the loading of a library that implements it."""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache
from pathlib import Path
from typing import Any

from hvd_compress.codecs import Codec, NoiseKey
from hvd_compress.codecs.base import Shape

Signatures = dict[str, tuple[Any, list[Any]]]
"""The type of the result and the types of the arguments, by function."""

FOLDER = Path(__file__).parent.parent / "lib"
"""The folder for the libraries that the package's build makes."""

DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2}
"""The values of ``hvdc_dtype`` by the names that NumPy and torch use."""

I32, I64, U64, F32, P = (
    ctypes.c_int32,
    ctypes.c_int64,
    ctypes.c_uint64,
    ctypes.c_float,
    ctypes.c_void_p,
)


class KernelError(RuntimeError):
    """A native library that is missing, does not match this package, or refused a call."""


class Spec(ctypes.Structure):
    """The C interface's ``hvdc_spec``."""

    _fields_ = [
        ("codec", ctypes.c_uint32),
        ("config_hash", ctypes.c_uint32),
        ("variant", ctypes.c_uint32),
        ("grouping", ctypes.c_uint32),
        ("group", ctypes.c_uint32),
        ("levels", ctypes.c_uint32),
        ("factor", ctypes.c_float),
        ("coding", ctypes.c_uint32),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
    ]


class Noise(ctypes.Structure):
    """The C interface's ``hvdc_noise``."""

    _fields_ = [
        ("seed", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("tensor", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("step", ctypes.c_uint64),
    ]


class Tensor(ctypes.Structure):
    """The C interface's ``hvdc_tensor``."""

    _fields_ = [
        ("spec", Spec),
        ("noise", Noise),
        ("values", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("next_residual", ctypes.c_void_p),
        ("alpha", ctypes.c_float),
        ("beta", ctypes.c_float),
        ("offset", ctypes.c_int64),
        ("payload_bytes", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("flags", ctypes.c_uint32),
        ("residual_dtype", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


def spec_of(codec: Codec, shape: Shape) -> Spec | None:
    """The C interface's description of a codec and a tensor's shape; None without native kernels."""
    try:
        fields = codec.native()
    except NotImplementedError:
        return None
    return Spec(
        codec=codec.codec_id,
        config_hash=codec.config_hash(),
        rows=shape[0] if shape else 1,
        columns=math.prod(shape[1:]),
        **fields,
    )


def noise_of(noise: NoiseKey) -> Noise:
    """A position in the noise for the C interface."""
    return Noise(noise.seed, noise.rank, noise.tensor, 0, noise.step)


@lru_cache(maxsize=64)
def name_of(dtype: Any) -> str:
    """The name of a dtype of NumPy's or torch's; making it takes longer than all else that is done."""
    return str(dtype).removeprefix("torch.")


@lru_cache(maxsize=64)
def code_of(dtype: Any) -> int | None:
    """The ``hvdc_dtype`` of a dtype of NumPy's or torch's; None if there is none."""
    return DTYPES.get(name_of(dtype))


def dtype_of(what: str, array: Any) -> int:
    """The ``hvdc_dtype`` of a NumPy array or a tensor.

    Raises:
        TypeError: any other dtype.
    """
    code = code_of(array.dtype)
    if code is None:
        raise TypeError(
            f"{what}: expected dtype float32, float16 or bfloat16, got {name_of(array.dtype)}"
        )
    return code


def check_dtype(what: str, array: Any, dtype: str) -> None:
    """Raises ``TypeError`` unless an array has the named dtype."""
    if name_of(array.dtype) != dtype:
        raise TypeError(f"{what}: expected dtype {dtype}, got {array.dtype}")


def open_library(path: Path, signatures: Signatures, version: tuple[str, int]) -> ctypes.CDLL:
    """Loads an existing library and declares its functions.

    ``version`` has the name of the function that returns the interface's version, and the expected version.

    Raises:
        KernelError: the library has another version.
    """
    library = ctypes.CDLL(str(path))
    # First: a library of another version may lack some of the functions.
    function, expected = version
    got = getattr(library, function)()
    if got != expected:
        raise KernelError(
            f"{path.name}: expected interface version {expected}, got {got}: "
            f"install the package again with `pip install .`"
        )
    for name, (result, arguments) in signatures.items():
        declared = getattr(library, name)
        declared.restype, declared.argtypes = result, arguments
    return library
