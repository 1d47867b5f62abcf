"""Codecs without native kernels, whose NumPy reference TensorFlow's operations call here.

The operations reach a codec through three functions of the C interface. For a codec from another package,
those three are Python functions: they find the codec by its ``hvdc_spec``, and run on the host, one tensor
at a time.
"""

from __future__ import annotations

import ctypes
import logging
import math
import warnings
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from hvd_compress.codecs import Codec, ErrorFeedback, NoiseKey, PayloadError
from hvd_compress.codecs.base import Shape
from hvd_compress.codecs.feedback import OFF
from hvd_compress.codecs.payload import FLAG_NONFINITE, checksum, read_header
from hvd_compress.kernels.batch import BatchPayloadError, Entry
from hvd_compress.kernels.native import F32, I32, I64, P, Spec, Tensor
from hvd_compress.kernels.reference import ReferenceBatch

_OK, _BAD_SPEC, _BAD_HEADER, _BAD_CHECKSUM = 0, 1, 3, 4  # hvdc_status.
_DTYPES = (np.float32, np.float16, tf.bfloat16.as_numpy_dtype)  # By hvdc_dtype.

_known: dict[tuple[int, int], Codec] = {}


def reference_spec(codec: Codec, shape: Shape) -> Spec:
    """The ``hvdc_spec`` of a codec without native kernels, with which operations call its reference.

    Warns the first time it is called for a codec.

    Args:
        codec: a codec, which sees each gradient as a matrix of its first dimension and all others.
        shape: the gradient's shape.
    """
    key = codec.codec_id, codec.config_hash()
    known = key in _known
    _known[key] = codec  # Also where a notebook has defined the class again.
    if not known:
        _library().hvdc_tensorflow_set_reference(key[0], ctypes.byref(_FUNCTIONS))
        warnings.warn(
            f"{codec} has no kernel for TensorFlow: its NumPy reference encodes and decodes in host "
            f"memory, which is slow",
            stacklevel=2,
        )
    rows, columns = shape[0] if shape else 1, math.prod(shape[1:])
    return Spec(codec=key[0], config_hash=key[1], rows=rows, columns=columns)


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    from hvd_compress.tensorflow import build

    library = ctypes.CDLL(str(build.library()))
    library.hvdc_tensorflow_set_reference.restype = None
    library.hvdc_tensorflow_set_reference.argtypes = [ctypes.c_uint8, ctypes.c_void_p]
    return library


def _codec_and_shape(spec: Spec) -> tuple[Codec, tuple[int, int]]:
    return _known[spec.codec, spec.config_hash], (spec.rows, spec.columns)


def _array(pointer: int | None, count: int, dtype: Any) -> np.ndarray:
    """The numbers at an address, without a copy."""
    numbers = np.dtype(dtype)
    if not count:
        return np.zeros(0, numbers)
    return np.frombuffer(
        (ctypes.c_char * (count * numbers.itemsize)).from_address(pointer), numbers
    )


def _payload_bytes(spec: Any) -> int:
    try:
        codec, shape = _codec_and_shape(spec[0])
        return codec.payload_bytes(shape)
    except Exception:
        _report()
        return -1


def _encode_batch(tensors: Any, count: int, message: int, threads: int, bad: Any) -> int:
    try:
        for number, tensor in enumerate(tensors[:count]):
            if bad:
                bad[0] = number
            _encode(tensor, message + tensor.offset)
        return _OK
    except Exception:
        _report()
        return _BAD_SPEC


def _encode(tensor: Tensor, payload: int) -> None:
    codec, shape = _codec_and_shape(tensor.spec)
    elements, noise = math.prod(shape), tensor.noise
    feedback, before, after = OFF, None, None
    if tensor.next_residual:
        dtype = _DTYPES[tensor.residual_dtype]
        name: Literal["float32", "bfloat16"] = "float32" if dtype is np.float32 else "bfloat16"
        feedback = ErrorFeedback(tensor.alpha, tensor.beta, name)
        before, after = (
            _array(pointer, elements, dtype) for pointer in (tensor.residual, tensor.next_residual)
        )
    entry = Entry(codec, shape, feedback, NoiseKey(noise.seed, noise.rank, noise.tensor))
    values = _array(tensor.values, elements, _DTYPES[tensor.dtype])
    message = _array(payload, tensor.payload_bytes, np.uint8)
    ReferenceBatch([entry]).encode([values], [before], [after], [noise.step], message)


def _decode_batch(
    tensors: Any,
    count: int,
    message: int,
    stride: int,
    ranks: int,
    scale: float,
    threads: int,
    bad: Any,
    bad_rank: Any,
) -> int:
    try:
        for number, tensor in enumerate(tensors[:count]):
            if bad:
                bad[0] = number
            size, first = tensor.payload_bytes, message + tensor.offset
            codec, shape = _codec_and_shape(tensor.spec)
            rows = np.zeros((ranks, size), np.uint8)
            for rank, payload in enumerate(rows):
                payload[:] = _array(first + rank * stride, size, np.uint8)
            values = _array(tensor.values, math.prod(shape), _DTYPES[tensor.dtype])
            batch, step = ReferenceBatch([Entry(codec, shape)]), tensor.noise.step
            try:
                if batch.decode_sum([values], [step], rows, scale):
                    tensor.flags |= FLAG_NONFINITE
            except BatchPayloadError as error:
                bad_rank[0] = error.rank
                return _what_is_wrong(rows[error.rank])
        return _OK
    except Exception:
        _report()
        return _BAD_SPEC


def _what_is_wrong(payload: np.ndarray) -> int:
    try:
        return _BAD_HEADER if read_header(payload).checksum == checksum(payload) else _BAD_CHECKSUM
    except PayloadError:
        return _BAD_HEADER


def _report() -> None:
    # The operation fails with a status alone: what Python met is only known here.
    logging.getLogger(__name__).exception("a codec's NumPy reference failed")


_SPEC = ctypes.POINTER(Spec)
_PayloadBytes = ctypes.CFUNCTYPE(I64, _SPEC)
_Number = ctypes.POINTER(I64)
_EncodeBatch = ctypes.CFUNCTYPE(I32, ctypes.POINTER(Tensor), I64, P, I32, _Number)
_DecodeBatch = ctypes.CFUNCTYPE(
    I32, ctypes.POINTER(Tensor), I64, P, I64, I32, F32, I32, _Number, ctypes.POINTER(I32)
)


class _Functions(ctypes.Structure):
    """``CodecFunctions`` of kernels.h."""

    _fields_ = [
        ("payload_bytes", _PayloadBytes),
        ("encode_batch", _EncodeBatch),
        ("decode_batch", _DecodeBatch),
    ]


_FUNCTIONS = _Functions(
    _PayloadBytes(_payload_bytes), _EncodeBatch(_encode_batch), _DecodeBatch(_decode_batch)
)
"""Kept, since the operations call them as long as the process lives."""
