"""NumPy arrays and CPU tensors as the native library's pointers, one by one or in tables."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvd_compress.codecs import Codec, ErrorFeedback, NoiseKey, PayloadError, bfloat
from hvd_compress.kernels.cpu_library import spec_pointer
from hvd_compress.kernels.native import (
    DTYPES,
    Shape,
    Spec,
    Tensor,
    check_dtype,
    dtype_of,
    noise_of,
)

_TENSOR = np.dtype(Tensor)

# Bytes of an element, by ``hvdc_dtype``.
_WIDTHS = np.array([4, 2, 2], np.uint64)

# By dtype: building a dtype's name takes longer than all other work for a tensor in a call.
_codes: dict[Any, int] = {}
_names: dict[Any, str] = {}


def pointer_to(what: str, array: Any, count: int, dtype: str | None = None) -> int:
    """The address of a contiguous array of ``count`` elements.

    Raises:
        TypeError: the dtype differs.
        ValueError: the size, order or device differs; or a uint8 array, which holds payloads, does not
            start at a multiple of 4.
    """
    if dtype is not None and _names.get(array.dtype) != dtype:
        check_dtype(what, array, dtype)
        _names[array.dtype] = dtype
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
    return bfloat.widened(bits_of(array))


def is_bfloat16(array: Any) -> bool:
    """Whether an array is a tensor of dtype bfloat16, which NumPy lacks."""
    return dtype_of("array", array) == DTYPES["bfloat16"]


def bits_of(tensor: Any) -> np.ndarray:
    """A view of a bfloat16 tensor's memory, shape=(n,), dtype uint16."""
    pointer = pointer_to("array", tensor, size_of(tensor))
    words = (ctypes.c_uint16 * size_of(tensor)).from_address(pointer) if pointer else ()
    return np.asarray(words, np.uint16)


def check_lengths(count: int, **lists: Sequence[Any]) -> None:
    """Raises ``ValueError`` unless every list has ``count`` items."""
    for name, items in lists.items():
        if len(items) != count:
            raise ValueError(f"{name}: expected {count} items, got {len(items)}")


def check_message(what: str, got: int, least: int) -> None:
    """Raises ``PayloadError`` if a message is too short for its payloads."""
    if got < least:
        raise PayloadError(f"{what}: expected at least {least} bytes, got {got}")


class TensorTable:
    """A table with one ``hvdc_tensor`` per entry.

    Whole columns are set at once: Python's work for each tensor would take longer than a small tensor's
    kernel. Every list of a call has one item per array; an entry uses a part of one array.

    Args:
        sizes: the number of elements in each array.
        sources: each entry's array, by number, and the entry's first element in this array.
        places: each entry's offset in the message and its size, in bytes.
        bits: the number of bits in each entry's lanes, for integer sums.
        norms: each entry's first norm and number of norms, for integer sums.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        sources: Sequence[tuple[int, int]],
        codecs: Sequence[Codec],
        shapes: Sequence[Shape],
        feedbacks: Sequence[ErrorFeedback],
        noises: Sequence[NoiseKey],
        places: Sequence[tuple[int, int]],
        bits: Sequence[int] = (),
        norms: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._table = np.zeros(len(sources), _TENSOR)
        self.pointer = self._table.ctypes.data
        self.size = len(sources)
        self._sizes = sizes
        self._arrays = np.array([array for array, _ in sources], np.intp)
        self._begins = np.array([begin for _, begin in sources], np.uint64)
        self._enabled = np.array([feedback.enabled for feedback in feedbacks], bool)
        self._residual_dtypes = [feedback.residual_dtype for feedback in feedbacks]
        self._used = sorted(set(self._arrays.tolist()))
        self._fed = sorted(set(self._arrays[self._enabled].tolist()))
        self._unfed = sorted(set(self._used) - set(self._fed))
        self._values, self._dtypes = self._table["values"], self._table["dtype"]
        self._columns = self._table["residual"], self._table["next_residual"]
        self._steps, self._flags = self._table["noise"]["step"], self._table["flags"]
        for place in range(self.size):
            row = Tensor.from_address(self.pointer + place * _TENSOR.itemsize)
            row.spec = _spec(codecs[place], shapes[place])
            row.noise = noise_of(noises[place])
            row.alpha, row.beta = feedbacks[place].alpha, feedbacks[place].beta
            row.residual_dtype = DTYPES[feedbacks[place].residual_dtype]
            row.offset, row.payload_bytes = places[place]
            if bits:
                row.bits = bits[place]
                row.norm_offset, row.norm_count = norms[place]

    def set_values(self, what: str, arrays: Sequence[Any]) -> None:
        """Sets the pointers to gradients or outputs.

        Raises as :func:`pointer_to` does.
        """
        self._values[:], self._dtypes[:] = self._pointers(what, arrays, self._used)

    def set_residuals(
        self, residuals: Sequence[Any | None], next_residuals: Sequence[Any | None]
    ) -> None:
        """Sets the pointers to residuals.

        Raises:
            TypeError: a residual has another dtype.
            ValueError: a residual has another size, order or device; or there is a residual without
                feedback, or feedback without a residual.
        """
        for what, arrays, column in (
            ("residuals", residuals, self._columns[0]),
            ("next_residuals", next_residuals, self._columns[1]),
        ):
            for number in self._unfed:
                if arrays[number] is not None:
                    raise _misplaced(f"{what}[{number}]")
            try:
                pointers, dtypes = self._pointers(what, arrays, self._fed)
            except AttributeError:
                for number in self._fed:
                    if arrays[number] is None:
                        raise _misplaced(f"{what}[{number}]") from None
                raise
            for place in np.flatnonzero((dtypes != self._table["residual_dtype"]) & self._enabled):
                number = self._arrays[place]
                check_dtype(f"{what}[{number}]", arrays[number], self._residual_dtypes[place])
            column[:] = pointers * self._enabled

    def set_steps(self, steps: Sequence[int]) -> None:
        """Sets the steps.

        Raises:
            OverflowError: a step is negative, or has more than 64 bits.
        """
        self._steps[:] = np.array(steps, np.uint64)[self._arrays]

    def any_flag(self) -> bool:
        """Whether the last call flagged a tensor."""
        return bool(self._flags.any())

    def _pointers(
        self, what: str, arrays: Sequence[Any], numbers: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The addresses and dtypes of the entries' parts of some arrays; 0 for parts of other arrays."""
        pointers = np.zeros(len(self._sizes), np.uint64)
        dtypes = np.zeros(len(self._sizes), np.intp)
        pointers[numbers], dtypes[numbers] = _pointers(what, arrays, self._sizes, numbers)
        dtypes = dtypes[self._arrays]
        return pointers[self._arrays] + self._begins * _WIDTHS[dtypes], dtypes


def _misplaced(what: str) -> ValueError:
    return ValueError(f"{what}: expected a residual exactly where error feedback is enabled")


def _spec(codec: Codec, shape: Shape) -> Spec:
    pointer = spec_pointer(codec, shape)
    if pointer is None:
        raise NotImplementedError(f"{codec!r} has no native kernels")
    return pointer.contents


def _pointers(
    what: str, arrays: Sequence[Any], sizes: Sequence[int], numbers: Sequence[int]
) -> tuple[list[int], list[int]]:
    """The addresses and dtypes of arrays; the checks take a short path for torch's CPU tensors."""
    pointers, dtypes = [], []
    known = _codes.get
    for number in numbers:
        array, size = arrays[number], sizes[number]
        code = known(array.dtype)
        if code is None:
            code = _codes[array.dtype] = dtype_of(f"{what}[{number}]", array)
        dtypes.append(code)
        try:
            good = array.is_cpu and array.numel() == size and array.is_contiguous()
        except AttributeError:
            good = False  # an array of NumPy's, or of a kind that is refused
        if good:
            pointers.append(array.data_ptr())
        else:
            pointers.append(pointer_to(f"{what}[{number}]", array, size))
    return pointers, dtypes
