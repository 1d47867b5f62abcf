"""Keeps a process and its process groups alive until the groups' threads have released Python objects.

When the training loop continues after a collective, the collective's thread still has to release the
callback and the tensors that were sent. If the interpreter ends at that moment, it stops the thread by
force, which ends the whole process ("terminate called without an active exception"). The process also ends
if a thread releases the last reference to its own process group, which would then wait for the thread
("Resource deadlock avoided"). PyTorch's own synchronous collectives have the first problem, too, if a group
outlives ``destroy_process_group()``, for example in a DDP model.

A collective whose peers have lost another rank ends when the peers' connections close, perhaps while this
interpreter ends. So this rank closes its own connections first if possible. Gloo then ends all waiting
collectives on both sides, except for a transfer in the middle of a message; therefore collectives first get
time to end by themselves.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import datetime
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from hvd_compress.process_group.private import backend_for, devices_of_gloo, forget_group
from hvd_compress.ranks import threads

_TIMEOUT = 10.0
"""The longest wait in seconds. Only a thread that gets no CPU time needs more than a few milliseconds."""

_MOMENT = 0.25
"""The time in seconds that threads get at the end of the process to release the tensors of synchronous
collectives; often the last collective gathers a checkpoint's state or sums a metric. Nothing shows when a
thread has released these tensors."""

_PATIENCE = 2.0
"""The time in seconds that collectives get to end by themselves when a process ends without an error."""

_TAG = 0x68766463
"""The tag of receives that no rank answers; users' tags are small numbers."""


class _Underway:
    """A collective that a thread may still use.

    Args:
        work: the collective; as long as this object holds it, the thread's reference is not the last one.
        call: the callback of the collective's future; the thread releases it afterwards.
        group: the process group of the collective; the objects that the thread releases may have the only
            other reference to the group.
    """

    def __init__(
        self, work: dist.Work, call: Callable[..., None], group: dist.ProcessGroup
    ) -> None:
        self.work, self.group = work, group
        self.process = os.getpid()
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
_starting: int | None = None
"""The process that starts collectives; a forked process has its parent's, without their threads."""


def note_collectives() -> None:
    """Notes that this process is about to start collectives, whether or not :func:`hold` gets them."""
    global _starting
    _starting = os.getpid()


def hold(work: dist.Work, call: Callable[..., None], group: dist.ProcessGroup) -> None:
    """Holds a collective and its process group until the group's thread has released the collective.

    Nothing else may keep a reference to ``call``, the callback of the collective's future. Frames in the
    traceback of an error keep references to a function, to their callers and to all their variables, so the
    callback should be a partial. It releases what it refers to before it returns: the thread frees the
    callback itself when :func:`_release_all` may already have freed the group.
    """
    _let_go()
    with _lock:
        _underway.append(_Underway(work, call, group))


def release_with(owner: object, group: dist.ProcessGroup) -> None:
    """Frees a process group that this package has made when its owner is freed.

    The group's threads and connections then end. Only Gloo's groups are freed: only they can end without
    the other ranks.
    """
    if _gloo(group) is not None:
        _start_releasing()
        weakref.finalize(owner, _released.put, (group, os.getpid())).atexit = False


_released: SimpleQueue[tuple[dist.ProcessGroup, int] | None] = SimpleQueue()
"""The groups to free, and the processes that made them. Any thread may free an owner, perhaps the group's
own thread, which would wait for itself if it freed the group."""

_releasing: int | None = None
"""The process in which a thread frees groups."""

_of_the_parent: list[dist.ProcessGroup] = []
"""Groups whose threads a forked process does not have; freeing such a group would wait for its threads."""


def _start_releasing() -> None:
    global _releasing
    with _lock:
        started, _releasing = _releasing == os.getpid(), os.getpid()
    if not started:
        stop = functools.partial(_released.put, None)
        threads.start(_release_all, stop, name="hvd_compress release")


def _release_all() -> None:
    while (entry := _released.get()) is not None:
        group, process = entry
        if process != os.getpid():
            _of_the_parent.append(group)
        else:
            end = time.monotonic() + _TIMEOUT
            while _is_underway(group) and time.monotonic() < end:
                time.sleep(0.001)
            forget_group(group)
            _let_go()
        del entry, group  # The last reference, unless a user has one.


def _is_underway(group: dist.ProcessGroup) -> bool:
    return any(one.group is group and not one.dropped for one in list(_underway))


def _let_go() -> None:
    """Frees collectives that threads have released, and so ends the threads of destroyed groups."""
    # Freed on return, without the lock: the end of a group waits for its threads, and they may come here.
    with _lock:
        dropped = [one for one in _underway if one.dropped]
        _underway[:] = [one for one in _underway if one not in dropped]


@atexit.register
def _end() -> None:
    if _starting == os.getpid():
        _wait()
    for one in _underway:
        # Never freed: its thread's own reference must not be the last one even now.
        for kept in (one.work, one.group):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def _wait() -> None:
    """Waits until no thread uses a collective; ends collectives that do not end by themselves."""
    failed = getattr(sys, "last_value", None) is not None
    patience = _MOMENT if failed else _PATIENCE
    closed: dict[dist.ProcessGroup, bool] = {}
    began = time.monotonic()
    while (passed := time.monotonic() - began) < _TIMEOUT:
        # Anew each time, since what is called back starts others.
        left = [one for one in list(_underway) if one.process == os.getpid() and not one.dropped]
        if not left and passed >= _MOMENT:
            return
        if passed >= patience:
            groups = {one.group for one in left}
            closed |= {group: close(group) for group in groups - closed.keys()}
            if not any(closed[one.group] or one.over for one in left):
                return
        time.sleep(0.001)


def close(group: dist.ProcessGroup) -> bool:
    """Closes a group's connections and so ends its collectives, if the backend is Gloo.

    Gloo closes the connections to all peers of a device when a receive from one of them times out; its
    ``abort()`` does nothing.

    Returns:
        Whether the connections were closed.
    """
    backend = _gloo(group)
    if backend is None:
        return False
    for device in range(devices_of_gloo(backend)):
        for rank in range(group.size()):
            with contextlib.suppress(RuntimeError):  # Expected, or the error for a lost rank.
                work = group.recv(
                    [torch.empty(1, dtype=torch.uint8, device="cpu")], rank, _TAG + device
                )
                work.wait(datetime.timedelta(milliseconds=1))
    return True


def _gloo(group: dist.ProcessGroup) -> Any | None:
    """A group's backend for the CPU if it is Gloo, otherwise None."""
    try:
        backend = backend_for(group, torch.device("cpu"))
    except RuntimeError:
        return None
    return backend if backend.name() == "gloo" else None
