"""Threads of exchanges, which end before the interpreter does.

A thread that returns from C++ to Python while the interpreter ends is stopped there by force. PyTorch's
code does not allow that, and the whole process ends with "terminate called without an active exception". So
a process waits for these threads before it ends.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable

_TIMEOUT = 10.0
"""Seconds that a process waits at its end for all threads together."""

_started: weakref.WeakKeyDictionary[threading.Thread, Callable[[], object]] = (
    weakref.WeakKeyDictionary()
)


def start(target: Callable[[], None], stop: Callable[[], object], name: str) -> threading.Thread:
    """Starts a thread that does not keep the process from ending.

    Args:
        target: the function that the thread runs.
        stop: called at the end of the process if the thread still runs; makes the thread end soon.
        name: the name of the thread.
    """
    thread = threading.Thread(target=target, name=name, daemon=True)
    _started[thread] = stop
    thread.start()
    return thread


@atexit.register
def _end() -> None:
    # In a forked process, none of them is alive.
    left = [(thread, stop) for thread, stop in list(_started.items()) if thread.is_alive()]
    for _, stop in left:
        stop()
    end = time.monotonic() + _TIMEOUT
    for thread, _ in left:
        thread.join(max(0.0, end - time.monotonic()))
