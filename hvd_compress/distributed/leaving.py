"""Keeps a process and its process groups until the groups' threads are done with what belongs to Python.

The thread that ran a collective still has to drop what was called back and the tensors that were sent when
the training loop already goes on. A thread that comes to that while the interpreter ends is stopped there
by force, and takes the whole process with it ("terminate called without an active exception"). So does one
that drops the last reference to its own process group, which would wait for it ("Resource deadlock
avoided").
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist

_TIMEOUT = 10.0
"""Seconds. Only a thread that gets no time at all needs more than a few thousandths of one."""


class _Underway:
    """A collective, as long as a thread may have to do with it.

    Args:
        work: the collective; while it is held here, the thread's reference is not its last one.
        call: what its future calls back, which the thread drops afterwards.
        group: of the collective; what the thread drops may have the only other reference to it.
    """

    def __init__(
        self, work: dist.Work, call: Callable[..., None], group: dist.ProcessGroup
    ) -> None:
        self.work, self.group = work, group
        self._future: torch.futures.Future = work.get_future()
        self._call = weakref.ref(call)

    @property
    def over(self) -> bool:
        return self._future.done()

    @property
    def dropped(self) -> bool:
        return self.over and self._call() is None


_lock = threading.Lock()
_underway: list[_Underway] = []


def hold(work: dist.Work, call: Callable[..., None], group: dist.ProcessGroup) -> None:
    """Holds a collective and its process group until the group's thread is done with it.

    Args:
        work: it has been started.
        call: what its future calls back. Nothing else may hold on to it, as frames in the traceback of an
            error do to a function: a partial is right.
        group: of the collective.
    """
    with _lock:
        _underway[:] = [one for one in _underway if not one.dropped]
        _underway.append(_Underway(work, call, group))


@atexit.register
def _wait() -> None:
    end = time.monotonic() + _TIMEOUT
    with _lock:
        # One that is not over will not be: its peers are gone.
        while any(one.over and not one.dropped for one in _underway) and time.monotonic() < end:
            time.sleep(0.001)
        for one in _underway:
            # Never freed: its thread's own reference must not be the last one even now.
            for kept in (one.work, one.group):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
