"""The operations, loaded."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import tensorflow as tf

from hvd_compress.codecs import Codec
from hvd_compress.kernels.cpu import CpuKernels
from hvd_compress.kernels.native import spec_of


@lru_cache(maxsize=1)
def operations() -> Any:
    """The module of operations: ``hvdc_ledger``, ``hvdc_begin``, ``hvdc_dense``, ``hvdc_encode``,
    ``hvdc_decode`` and ``hvdc_counters``.

    Raises:
        BuildError: they could not be compiled.
        KernelError: the package was not built.
    """
    from hvd_compress.tensorflow import build  # Not above: it also runs as a program, once.

    CpuKernels()  # Loads the kernels, which the operations' library finds by name.
    return tf.load_op_library(str(build.library()))


def spec_bytes(codec: Codec) -> bytes:
    """A codec's ``hvdc_spec`` without a shape, as the operations' attribute.

    Raises:
        ValueError: a codec without a native kernel, which cannot run in a graph.
    """
    spec = spec_of(codec, ())
    if spec is None:
        raise ValueError(f"expected a codec with a native kernel in TensorFlow, got {codec!r}")
    spec.rows = spec.columns = 0
    return bytes(spec)
