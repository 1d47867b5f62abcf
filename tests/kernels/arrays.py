"""Gradients of every dtype, and guarded memory that shows a kernel's writes out of bounds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from hvd_compress.kernels.cpu_library import isa as used_isa
from hvd_compress.kernels.cpu_library import set_isa
from hvd_compress.kernels.native import KernelError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
INSTRUCTION_SETS = ("plain", "avx2", "avx512")
THREADS = (1, 2, 4)

_GUARD = 64
_FILL = 0x5A


def available(isa: str) -> bool:
    """Whether this machine has an instruction set, by what the library says."""
    try:
        with using(isa):
            return True
    except KernelError:
        return False


@contextmanager
def using(isa: str) -> Iterator[None]:
    """Runs the library's kernels with one instruction set."""
    best = used_isa()
    set_isa(isa)
    try:
        assert used_isa() == isa
        yield
    finally:
        set_isa(best)


def as_dtype(values: np.ndarray, dtype: str) -> torch.Tensor:
    """A float32 array as a tensor of a dtype, rounded as torch does."""
    return torch.from_numpy(values.copy()).to(DTYPES[dtype])


def widened(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's numbers as float32, exactly, the bits of NaNs included: what the reference is given."""
    if tensor.dtype == torch.bfloat16:
        words = tensor.view(torch.int16).numpy().view(np.uint16)
        return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return tensor.numpy().astype(np.float32)


def bits(array: Any) -> np.ndarray:
    """An array's or tensor's memory, every NaN replaced by one NaN, as integers."""
    if isinstance(array, torch.Tensor):
        width = {2: torch.int16, 4: torch.int32}[array.element_size()]
        raw = array.view(width).cpu().numpy().copy()
        raw[torch.isnan(array).cpu().numpy()] = -1
        return raw
    raw = array.view(f"i{array.dtype.itemsize}").copy()
    raw[np.isnan(array)] = -1
    return raw


def assert_same(got: np.ndarray, want: np.ndarray, what: str) -> None:
    """Fails where two arrays of integers differ, and says where first."""
    if np.array_equal(got, want):
        return
    assert got.shape == want.shape, f"{what}: expected shape {want.shape}, got {got.shape}"
    where = np.flatnonzero(got != want)
    first = where[0]
    raise AssertionError(
        f"{what}: {where.size} of {got.size} differ, the first at {first}: "
        f"expected {want[first]:#x}, got {got[first]:#x}"
    )


class Guarded:
    """A tensor between two guards, with its first element a given number of bytes off 64.

    Args:
        tensor: the content.
        offset: bytes past a multiple of 64 at which the copy starts.
        device: the device of the copy.
    """

    def __init__(self, tensor: torch.Tensor, offset: int = 0, device: str = "cpu") -> None:
        size = tensor.numel() * tensor.element_size()
        self._memory = torch.full((size + 4 * _GUARD,), _FILL, dtype=torch.uint8, device=device)
        self._first = -self._memory.data_ptr() % _GUARD + _GUARD + offset
        self._end = self._first + size
        inside = self._memory[self._first : self._end]
        if size:
            # As bytes: torch changes the bits of a bfloat16 NaN when it copies one.
            inside.copy_(tensor.reshape(-1).view(torch.uint8))
        self.array = inside.view(tensor.dtype)

    def intact(self) -> bool:
        """Whether the guards still hold what they were filled with."""
        memory = self._memory.cpu().numpy()
        before, after = memory[: self._first], memory[self._end :]
        return bool((before == _FILL).all() and (after == _FILL).all())


def empty_payload(size: int, offset: int = 0, device: str = "cpu") -> Guarded:
    """Guarded memory for a payload, holding garbage."""
    return Guarded(torch.full((size,), 0xA5, dtype=torch.uint8), offset, device)
