"""The loaded TensorFlow operations."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps_utils

from hvd_compress.codecs import Codec
from hvd_compress.codecs.base import Shape
from hvd_compress.kernels import cpu_library, cuda_library
from hvd_compress.kernels.native import KernelError, P, Spec, spec_of

_ORDERLESS = (
    *("HvdcUncompressed", "HvdcReturned", "HvdcSubmit", "HvdcResult"),
    *("HvdcEncode", "HvdcAverage", "HvdcDecode"),
)
"""The operations of a step's gradients. TensorFlow would run operations that share a resource one after
the other, in the order in which they were traced: from the first layer's gradient, which is available last,
to the last layer's. These operations share the ledger, which has its own lock, and are registered as
read-only so that TensorFlow does not order them. A gradient's own operations are ordered by their data,
those of a bucket by the contents of its ledger, and steps by ``HvdcBegin``."""


_CUDA = (
    *("message", "restore", "plan_encode", "plan_decode", "plan_bytes", "plan_prepare"),
    *("plan_free", "encode_batch", "decode_batch"),
)
"""The functions of the CUDA library that the operations call: ``CudaFunctions`` of gpu_kernels.h."""


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
    """Gives the operations the functions of the CUDA library; called before one of them runs on a GPU.

    Raises:
        KernelError: the CUDA library was not built, or belongs to another version.
    """
    try:
        library = cuda_library.load(cuda_library.LIBRARY)
    except KernelError as error:
        raise KernelError(
            f"{error}; or copy gradients to the host and encode them there, with device='CPU:0'"
        ) from None
    _hand_over(library)


@lru_cache(maxsize=4)  # The operations call the functions as long as the process lives.
def _hand_over(library: ctypes.CDLL) -> Any:
    from hvd_compress.tensorflow import build

    functions = (P * len(_CUDA))(
        *(ctypes.cast(getattr(library, f"hvdc_cuda_{name}"), P).value for name in _CUDA)
    )
    ctypes.CDLL(str(build.library())).hvdc_tensorflow_set_cuda(functions)
    return functions


def spec_for(codec: Codec, shape: Shape) -> Spec:
    """The C interface's description of a codec and a gradient's shape.

    For a codec without native kernels, the spec is one with which the operations call its NumPy reference.
    """
    from hvd_compress.tensorflow.reference import reference_spec  # Seldom needed.

    return _spec_of(codec, shape) or reference_spec(codec, shape)


_spec_of = lru_cache(maxsize=4096)(spec_of)
"""A bucket's table is made again with each gradient that joins it."""
