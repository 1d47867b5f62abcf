"""What a process has, and whether it goes back to that when something is dropped."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable, Iterable


def _open() -> tuple[int, int]:
    """Threads, and descriptors."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def assert_freed(make: Callable[[], Iterable[object]], times: int = 3) -> None:
    """Fails unless what is made is freed, with its threads and descriptors, once nothing refers to it.

    Args:
        make: makes and uses something; returns objects that have to be freed afterwards.
        times: how often.
    """
    list(make())  # What a process makes once, it keeps.
    gc.collect()
    gc.freeze()  # Other tests' objects make collections slow.
    try:
        before, alive = _settled(lambda: [], None), []
        for _ in range(times):
            alive += [weakref.ref(one) for one in make()]
            gc.collect()
        after = _settled(lambda: [one for one in alive if one() is not None], before)
        left = [type(one()).__name__ for one in alive if one() is not None]
    finally:
        gc.unfreeze()
    assert (after, left) == (before, [])


def _settled(alive: Callable[[], list[object]], before: tuple[int, int] | None) -> tuple[int, int]:
    """What is open when threads have had time to end; ends early where it is as before."""
    end = time.monotonic() + (2 if before is None else 60)
    while time.monotonic() < end:
        if before is not None and _open() <= before and not alive():
            return before
        time.sleep(0.05)
        gc.collect()
    return _open()
