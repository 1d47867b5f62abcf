"""NumPy arrays and CPU tensors as the native library's pointers, one by one or in tables."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvd_compress.codecs import PayloadError, bfloat
from hvd_compress.kernels.batch import Entry, misplaced
from hvd_compress.kernels.cpu_library import spec_pointer
from hvd_compress.kernels.native import (
    DTYPES,
    KernelError,
    Tensor,
    check_dtype,
    code_of,
    dtype_of,
    name_of,
    noise_of,
)

_TENSOR = np.dtype(Tensor)

# Bytes of an element, by ``hvdc_dtype``.
_WIDTHS = np.array([4, 2, 2], np.uint64)


class Addresses(NamedTuple):
    """The addresses of arrays.

    Attributes:
        pointers: the addresses, shape=(n,), uint64; 0 for None.
        dtypes: the arrays' ``hvdc_dtype``, shape=(n,), int32.
        codes: the same without order and repetitions.
    """

    pointers: np.ndarray
    dtypes: np.ndarray
    codes: set[int]

    @classmethod
    def of(cls, pointers: Sequence[int], codes: Sequence[int]) -> Addresses:
        """The addresses, and the ``hvdc_dtype`` of each array."""
        return cls(np.array(pointers, np.uint64), np.array(codes, np.int32), set(codes))

    def spread(self, numbers: Sequence[int], count: int) -> Addresses:
        """The same as those of some of ``count`` arrays, with zeros for the others."""
        pointers, dtypes = np.zeros(count, np.uint64), np.zeros(count, np.int32)
        pointers[numbers], dtypes[numbers] = self.pointers, self.dtypes
        return Addresses(pointers, dtypes, self.codes)


class FixedArrays(tuple[Any, ...]):
    """Arrays of several calls that stay where they are in memory: only the first call checks them.

    Nothing may change the place, the size, the strides or the dtype of an array that is in here. Scripts
    can move what they can reach, such as residuals, as ``share_memory_()`` does: see :meth:`unmoved`.

    Attributes:
        checked: the sizes and the device of the check, and the addresses; None before the first call.
        copies: the value of :attr:`checked` of other arrays, and a table for copies of these over them.
        fits: the tags of the batches that have accepted these arrays as their residuals.
        streams: the streams that the arrays' memory is kept for until they are done with it.
    """

    checked: tuple[Sequence[int], int | None, Addresses] | None

    def __init__(self, arrays: Iterable[Any]) -> None:
        self.checked = None
        self.copies: tuple[object, np.ndarray] | None = None
        self.fits: set[int] = set()
        self.streams: set[Any] = set()

    def unmoved(self) -> bool:
        """Whether the arrays, tensors or None, are where the check has found them."""
        if self.checked is None:
            return True
        now = [0 if array is None else array.data_ptr() for array in self]
        return now == self.checked[2].pointers.tolist()

    @classmethod
    def cut(cls, buffer: Any, sizes: Sequence[int]) -> FixedArrays:
        """The parts, of ``sizes`` elements, of a float32 tensor, shape=(n,), one behind the other."""
        made = cls(buffer.split_with_sizes(sizes))
        begins, dtypes = _offsets(tuple(sizes))
        addresses = Addresses(begins + buffer.data_ptr(), dtypes, {DTYPES["float32"]})
        made.checked = sizes, None if buffer.is_cpu else buffer.get_device(), addresses
        return made


@functools.lru_cache(maxsize=1024)
def _offsets(sizes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The offsets in bytes of the float32 parts of a buffer, and the ``hvdc_dtype`` of each part."""
    begins = np.cumsum([0, *sizes[:-1]], dtype=np.uint64) * _WIDTHS[0]
    return begins[: len(sizes)], np.full(len(sizes), DTYPES["float32"], np.int32)


def addresses_of(
    arrays: Sequence[Any], sizes: Sequence[int], device: int | None
) -> Addresses | None:
    """The addresses of many tensors after a short check; None if each has to be checked by itself.

    Args:
        arrays: the tensors; None has the address 0.
        sizes: the number of elements in each tensor, a list; anything for None.
        device: the result of ``get_device()`` for the tensors; None is the CPU.
    """
    if isinstance(arrays, FixedArrays):
        if arrays.checked is None or arrays.checked[:2] != (sizes, device):
            found = addresses_of([*arrays], sizes, device)
            if found is None:
                return None
            arrays.checked = sizes, device, found
        return arrays.checked[2]
    # All in lists, which take a third of the time of a loop over the tensors.
    try:
        pointers = [array.data_ptr() for array in arrays]
    except AttributeError:
        given = [number for number, array in enumerate(arrays) if array is not None]
        if len(given) == len(arrays):
            return None  # Arrays of NumPy's, or of a kind that is refused.
        some = addresses_of([arrays[n] for n in given], [sizes[n] for n in given], device)
        return some and some.spread(given, len(arrays))
    if device is None:
        there = False not in [array.is_cpu for array in arrays]
    else:
        there = {device}.issuperset([array.get_device() for array in arrays])
    if (
        not there
        or [array.numel() for array in arrays] != sizes
        or False in [array.is_contiguous() for array in arrays]
        or not (all(pointers) or not all(sizes))
    ):
        return None
    codes = [code for array in arrays if (code := code_of(array.dtype)) is not None]
    return None if len(codes) < len(arrays) else Addresses.of(pointers, codes)


def pointer_to(what: str, array: Any, count: int, dtype: str | None = None) -> int:
    """The address of a contiguous array of ``count`` elements.

    Raises:
        TypeError: the dtype differs.
        ValueError: the size, order or device differs; or a uint8 array, which holds payloads, does not
            start at a multiple of 4.
    """
    if dtype is not None and name_of(array.dtype) != dtype:
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


def check_lengths(
    count: int,
    values: Sequence[Any],
    residuals: Sequence[Any] | None = None,
    next_residuals: Sequence[Any] | None = None,
    steps: Sequence[int] | None = None,
) -> None:
    """Raises ``ValueError`` unless every list that is given has ``count`` items."""
    given = {
        "values": values,
        "residuals": residuals,
        "next_residuals": next_residuals,
        "steps": steps,
    }
    for name, items in given.items():
        if items is not None and len(items) != count:
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
        entries: the entries' codecs, shapes, error feedback and noise keys.
        places: each entry's offset in the message and its size, in bytes.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        sources: Sequence[tuple[int, int]],
        entries: Sequence[Entry],
        places: Sequence[tuple[int, int]],
    ) -> None:
        self._table = np.zeros(len(sources), _TENSOR)
        self.pointer = self._table.ctypes.data
        self.size = len(sources)
        self._entries = entries
        self._sizes = list(sizes)
        self._arrays = np.array([array for array, _ in sources], np.intp)
        self._begins = np.array([begin for _, begin in sources], np.uint64)
        self._enabled = np.array([entry.feedback.enabled for entry in entries], bool)
        self._residual_dtypes = [entry.feedback.residual_dtype for entry in entries]
        self._used = sorted(set(self._arrays.tolist()))
        self._fed = sorted(set(self._arrays[self._enabled].tolist()))
        self._unfed = sorted(set(self._used) - set(self._fed))
        self._values, self._dtypes = self._table["values"], self._table["dtype"]
        self._columns = self._table["residual"], self._table["next_residual"]
        self._steps, self._flags = self._table["noise"]["step"], self._table["flags"]
        for place, entry in enumerate(entries):
            row = Tensor.from_address(self.pointer + place * _TENSOR.itemsize)
            spec = spec_pointer(entry.codec, entry.shape)
            assert spec is not None  # The batch has no other entries.
            row.spec = spec.contents
            row.noise = noise_of(entry.noise)
            row.alpha, row.beta = entry.feedback.alpha, entry.feedback.beta
            row.residual_dtype = DTYPES[entry.feedback.residual_dtype]
            row.offset, row.payload_bytes = places[place]

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
                    raise misplaced(f"{what}[{number}]")
            for number in self._fed:
                if arrays[number] is None:
                    raise misplaced(f"{what}[{number}]")
            pointers, dtypes = self._pointers(what, arrays, self._fed)
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

    def call(self, function: Any, *arguments: Any) -> None:
        """Calls a function of the library that takes the table, arguments, and the place of a bad entry.

        Raises:
            KernelError: the library has refused the call.
        """
        bad = ctypes.c_int64(-1)
        status = function(self.pointer, self.size, *arguments, ctypes.byref(bad))
        if status:
            raise self.refusal(status, bad.value)

    def refusal(self, status: int, place: int) -> KernelError:
        """The error for a status of the library, and the place of the entry that it is about, or -1."""
        what = "batch"
        if place >= 0:
            entry = self._entries[place]
            what = f"{entry.codec!r}, shape {entry.shape}"
        return KernelError(f"{what}: the native library answered with status {status}")

    def any_flag(self) -> bool:
        """Whether the last call flagged a tensor."""
        return bool(self._flags.any())

    def _pointers(
        self, what: str, arrays: Sequence[Any], numbers: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The addresses and dtypes of the entries' parts of arrays; only the arrays ``numbers`` count."""
        found = addresses_of(arrays, self._sizes, None)
        if found is None:
            given = [
                (f"{what}[{number}]", arrays[number], self._sizes[number]) for number in numbers
            ]
            codes = [dtype_of(place, array) for place, array, _ in given]
            some = Addresses.of([pointer_to(*one) for one in given], codes)
            found = some.spread(numbers, len(arrays))
        pointers, dtypes, _ = found
        dtypes = dtypes[self._arrays]
        return pointers[self._arrays] + self._begins * _WIDTHS[dtypes], dtypes
