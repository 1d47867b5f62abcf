"""Takes all memory from a rank before it encodes gradients."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from tests.faults.cases import STOCK, Case

_M_ARENA_MAX = -8


@contextmanager
def scarce(case: Case) -> Iterator[Callable[[], None]]:
    """Makes this process's allocations fail in the context, from a moment that the caller sets.

    The caller must make the job in the context, because graphs get an operation that takes the memory.

    Args:
        case: the case, which determines how encoding is intercepted.

    Yields:
        A function after whose call memory ends: when gradients are next encoded, or at once without this
        package.
    """
    hoard: list[bytearray] = []
    limits = resource.getrlimit(resource.RLIMIT_AS)
    due = False
    # With more arenas, other threads would have memory in reserve.
    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)

    def take_all() -> None:
        # Leaves memory for Python's small objects: only tensors must not fit.
        small = [bytes(size) for size in range(0, 480, 16) for _ in range(500)]
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), limits[1]))
        size = 2**24
        while size >= 2**10:  # Takes the allocator's free memory, too.
            try:
                hoard.append(bytearray(size))
            except MemoryError:
                size //= 2
        del small

    def end() -> None:
        nonlocal due
        due = True
        if case.exchange == STOCK:
            take_all()

    def before_encoding() -> None:
        if due:  # In each step, because the next one could use the memory that a step frees.
            take_all()

    with ExitStack() as stack:
        if case.exchange != STOCK:
            patch = _graphs if case.frontend in ("tensorflow", "keras") else _batches
            stack.enter_context(patch(before_encoding))
        try:
            yield end
        finally:
            hoard.clear()
            resource.setrlimit(resource.RLIMIT_AS, limits)


def _batches(before: Callable[[], None]) -> Any:
    from hvd_compress.engine.batches import Batches

    make = Batches.make

    def made(*arguments: Any, **options: Any) -> Any:
        before()
        return make(*arguments, **options)

    return mock.patch.object(Batches, "make", made)


def _graphs(before: Callable[[], None]) -> Any:
    import tensorflow as tf

    from hvd_compress.tensorflow import Compressor

    compress = Compressor.compress

    def compressed(compressor: Compressor, tensor: tf.Tensor) -> Any:
        def same(value: tf.Tensor) -> tf.Tensor:
            before()
            return value

        same_later = tf.py_function(same, [tensor], tensor.dtype)
        same_later.set_shape(tensor.shape)
        return compress(compressor, same_later)

    return mock.patch.object(Compressor, "compress", compressed)
