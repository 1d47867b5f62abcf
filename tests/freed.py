"""A check that dropped objects free their memory, threads and file descriptors."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable, Iterable


def _open() -> tuple[int, int]:
    """The numbers of this process's threads and open file descriptors."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def assert_freed(make: Callable[[], Iterable[object]], *, at_once: bool = False) -> None:
    """Fails unless objects are freed, with their threads and descriptors, once nothing refers to them.

    Args:
        make: makes and uses objects, and returns those that must be freed afterwards.
        at_once: whether they are freed without a collection of cycles, which may come late.
    """
    list(make())  # The first call may also make what a process keeps.
    gc.collect()
    gc.freeze()  # Other tests' objects make collections slow.
    try:
        before, alive = _settled(lambda: [], None), []
        if at_once:
            gc.disable()
        for _ in range(3):
            alive += [weakref.ref(one) for one in make()]
            _collect()
        after = _settled(lambda: [one for one in alive if one() is not None], before)
        left = [type(one()).__name__ for one in alive if one() is not None]
    finally:
        gc.enable()
        gc.unfreeze()
    assert (after, left) == (before, [])


def _collect() -> None:
    if gc.isenabled():
        gc.collect()


def _settled(alive: Callable[[], list[object]], before: tuple[int, int] | None) -> tuple[int, int]:
    """Waits for threads to end, at most until all is as before; returns the numbers of :func:`_open`."""
    end = time.monotonic() + (2 if before is None else 60)
    while time.monotonic() < end:
        if before is not None and _open() <= before and not alive():
            return before
        time.sleep(0.05)
        _collect()
    return _open()
