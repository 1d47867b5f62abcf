"""NumPy arrays and CPU tensors as the native library's pointers, and as the reference's arrays."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from hvd_compress.codecs import ErrorFeedback
from hvd_compress.kernels.native import DTYPES, check_dtype, dtype_of, feedback_of


def pointer_to(what: str, array: Any, count: int, dtype: str | None = None) -> int:
    """The address of a contiguous array of ``count`` elements.

    Raises:
        TypeError: the dtype differs.
        ValueError: the size, order or device differs; or a uint8 array, which holds payloads, does not
            start at a multiple of 4.
    """
    if dtype is not None:
        check_dtype(what, array, dtype)
    if size_of(array) != count:
        raise ValueError(f"{what}: expected {count} elements, got {size_of(array)}")
    if hasattr(array, "data_ptr"):
        if array.device.type != "cpu":
            raise ValueError(f"{what}: expected a CPU tensor, got one on {array.device}")
        contiguous, pointer = array.is_contiguous(), array.data_ptr()
    else:
        contiguous, pointer = array.flags.c_contiguous, array.ctypes.data
    if not contiguous:
        raise ValueError(f"{what}: expected a contiguous array, got strides of another order")
    if dtype == "uint8" and count:
        _check_alignment(what, pointer)
    return pointer


def _check_alignment(what: str, place: int) -> None:
    if place % 4:
        raise ValueError(f"{what}: expected bytes that start at a multiple of 4, got {place:#x}")


def feedback_pointer(feedback: ErrorFeedback, residual: Any | None, count: int) -> Any | None:
    """A reference to an ``hvdc_feedback``; None without a residual.

    Raises:
        ValueError: a residual without feedback, or feedback without a residual.
    """
    if (residual is not None) != feedback.enabled:
        raise ValueError("encode: expected a residual exactly where error feedback is enabled")
    if residual is None:
        return None
    pointer = pointer_to("residual", residual, count, "float32")
    return ctypes.byref(feedback_of(feedback, pointer))


def size_of(array: Any) -> int:
    """The number of elements in an array or a tensor."""
    return array.numel() if hasattr(array, "data_ptr") else array.size


def rows(what: str, array: Any) -> tuple[int, int]:
    """The address of the first of equally long rows of bytes, and the stride between rows in bytes."""
    count, length = array.shape
    if not count:
        return 0, length
    pointer_to(what, array[count - 1], length, "uint8")
    stride = array.stride(0) if hasattr(array, "data_ptr") else array.strides[0]
    if count > 1:
        _check_alignment(what, stride)
    return pointer_to(what, array[0], length, "uint8"), stride


def as_numpy(array: Any) -> np.ndarray:
    """An array or a tensor as a NumPy array, without a copy."""
    return array.detach().numpy() if hasattr(array, "data_ptr") else array


def readable(array: Any) -> np.ndarray:
    """An array for the reference: a bfloat16 tensor, which NumPy lacks, is copied to float32."""
    if not is_bfloat16(array):
        return as_numpy(array)
    return (bits_of(array).astype(np.uint32) << np.uint32(16)).view(np.float32)


def is_bfloat16(array: Any) -> bool:
    """Whether an array is a tensor of dtype bfloat16, which NumPy lacks."""
    return dtype_of("array", array) == DTYPES["bfloat16"]


def bits_of(tensor: Any) -> np.ndarray:
    """A view of a bfloat16 tensor's memory, shape=(n,), dtype uint16."""
    pointer = pointer_to("array", tensor, size_of(tensor))
    words = (ctypes.c_uint16 * size_of(tensor)).from_address(pointer) if pointer else ()
    return np.asarray(words, np.uint16)
