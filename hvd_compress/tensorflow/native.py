"""The loaded TensorFlow operations."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps_utils

from hvd_compress.codecs import Codec
from hvd_compress.kernels import cpu_library, cuda_library
from hvd_compress.kernels.native import KernelError, spec_of

_ORDERLESS = (
    *("HvdcUncompressed", "HvdcReturned", "HvdcSubmit", "HvdcResult"),
    *("HvdcEncode", "HvdcAverage", "HvdcDecode"),
)
"""The operations of a step's gradients. TensorFlow would run operations that share a resource one after
the other, in the order in which they were traced: from the first layer's gradient, which is available last,
to the last layer's. These operations share the ledger, which has its own lock, and are registered as
read-only so that TensorFlow does not order them. A gradient's own operations are ordered by their data,
those of a bucket by the contents of its ledger, and steps by ``HvdcBegin``."""


@lru_cache(maxsize=1)
def operations() -> Any:
    """The module of operations: ``hvdc_ledger``, ``hvdc_encode``, ``hvdc_decode`` and so on.

    Raises:
        BuildError: the operations could not be compiled.
        KernelError: the package was not built.
    """
    from hvd_compress.tensorflow import build  # Not above: it also runs as a program, once.

    cpu_library.load()  # Loads the kernels, which the operations' library finds by name.
    for name in _ORDERLESS:
        auto_control_deps_utils.register_read_only_resource_op(name)
    return tf.load_op_library(str(build.library()))


def open_cuda() -> None:
    """Gives the operations the path of the CUDA library; called before one of them runs on a GPU.

    Raises:
        KernelError: the CUDA library was not built, or belongs to another version.
    """
    from hvd_compress.tensorflow import build

    try:
        path = cuda_library.library()
    except KernelError as error:
        raise KernelError(
            f"{error}; or copy gradients to the host and encode them there, with device='CPU:0'"
        ) from None
    opened = ctypes.CDLL(str(build.library()))
    opened.hvdc_tensorflow_open_cuda.restype = ctypes.c_char_p
    wrong = opened.hvdc_tensorflow_open_cuda(str(path).encode())
    if wrong is not None:
        raise KernelError(f"hvd_compress.tensorflow: {wrong.decode()}")


def spec_bytes(codec: Codec) -> bytes:
    """A codec's ``hvdc_spec`` without a shape, as the operations' attribute.

    For a codec without native kernels, the spec is one with which the operations call its NumPy reference.
    """
    from hvd_compress.tensorflow.reference import reference_spec  # Seldom needed.

    spec = spec_of(codec, ()) or reference_spec(codec)
    spec.rows = spec.columns = 0
    return bytes(spec)
