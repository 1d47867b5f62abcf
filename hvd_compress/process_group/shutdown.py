"""Keeps a process and its process groups until the groups' threads are done with what belongs to Python.

The thread that ran a collective still has to drop what was called back and the tensors that were sent when
the training loop already goes on. A thread that comes to that while the interpreter ends is stopped there
by force, and takes the whole process with it ("terminate called without an active exception"). So does one
that drops the last reference to its own process group, which would wait for it ("Resource deadlock
avoided"). PyTorch's own synchronous collectives have the first problem too where a group outlives
``destroy_process_group()``, as in a DDP model.

A collective whose peers have lost another rank ends when those do: when their connections close, perhaps
while this interpreter ends. So this rank closes its own first, where that is possible. Gloo then ends what
waits, but for a transfer in the midst of a message, here and at the other end; so what may still end by
itself gets time to.
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

from hvd_compress.ranks import threads

_TIMEOUT = 10.0
"""Seconds. Only a thread that gets no time at all needs more than a few thousandths of one."""

_MOMENT = 0.25
"""Seconds, at the end of the process, for what synchronous collectives sent: one that gathers a
checkpoint's state or sums a metric is often the last. Nothing tells when a thread has dropped that."""

_PATIENCE = 2.0
"""Seconds, at the end of a process without an error, for collectives to end by themselves."""

_TAG = 0x68766463
"""Of receives that nobody answers: users' have small ones."""


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
"""The process that starts collectives: a forked one has its parent's without their threads."""


def note_collectives() -> None:
    """Tells that this process is about to start collectives, whether or not they are held."""
    global _starting
    _starting = os.getpid()


def hold(work: dist.Work, call: Callable[..., None], group: dist.ProcessGroup) -> None:
    """Holds a collective and its process group until the group's thread is done with it.

    Args:
        work: it has been started.
        call: what its future calls back. Nothing else may hold on to it, as frames in the traceback of an
            error do to a function (a partial is right), and to their callers with all their variables.
        group: of the collective.
    """
    _let_go()
    with _lock:
        _underway.append(_Underway(work, call, group))


def release_with(owner: object, group: dist.ProcessGroup) -> None:
    """Frees a process group of the package's own when what uses it is freed.

    Its threads and connections end then. Only Gloo's do so without the other ranks.
    """
    if _gloo(group) is not None:
        _start_releasing()
        weakref.finalize(owner, _released.put, (group, os.getpid())).atexit = False


_released: SimpleQueue[tuple[dist.ProcessGroup, int] | None] = SimpleQueue()
"""Groups to be freed, and the processes that made them. Owners are freed by any thread, perhaps by the
group's own, which would wait for itself."""

_releasing: int | None = None
"""The process in which a thread frees groups."""

_of_the_parent: list[dist.ProcessGroup] = []
"""Groups whose threads a forked process does not have: freeing them would wait for these."""


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
            with naming:
                _unregister(group)
            _let_go()
        del entry, group  # The last reference, unless a user has one.


def _is_underway(group: dist.ProcessGroup) -> bool:
    return any(one.group is group and not one.dropped for one in list(_underway))


naming = threading.Lock()
"""Held where a group is made, or freed: PyTorch names a group by the groups that there are."""


class _Unregistered:
    """In a group's place, where PyTorch counts groups to name the next one.

    Ranks free groups at different times, and have to count alike.
    """

    def shutdown(self) -> None:
        """Called where all groups are destroyed."""


def _unregister(group: dist.ProcessGroup) -> None:
    """Has PyTorch forget a group. Its ``destroy_process_group()`` warns of groups with one backend."""
    c10d: Any = dist.distributed_c10d
    world = c10d._world
    name = world.pg_names.pop(group, None)
    if name is None:
        return  # All groups were destroyed together.
    world.pg_names[_Unregistered()] = name
    for table in (world.pg_map, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag):
        table.pop(group, None)
    for tagged in world.tags_to_pg.values():
        if group in tagged:
            tagged.remove(group)
    c10d._unregister_process_group(name)


def _let_go() -> None:
    """Frees what the threads are done with, and with a destroyed group, ends the group's threads."""
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
    """Waits until no thread has to do with a collective; ends those that do not end by themselves."""
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
    """Closes a group's connections, where that is known to be possible, which ends its collectives.

    Gloo does so for all peers of a device when a receive from one of them times out; its ``abort()`` does
    nothing.
    """
    backend = _gloo(group)
    if backend is None:
        return False
    devices = getattr(backend.options, "_devices", [None])  # Gloo chooses one by the tag.
    for device in range(len(devices)):
        for rank in range(group.size()):
            with contextlib.suppress(RuntimeError):  # As it should, or for the rank that is lost.
                work = group.recv(
                    [torch.empty(1, dtype=torch.uint8, device="cpu")], rank, _TAG + device
                )
                work.wait(datetime.timedelta(milliseconds=1))
    return True


def _gloo(group: dist.ProcessGroup) -> Any | None:
    """A group's backend for the CPU, where that is Gloo."""
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return None
    return backend if backend.name() == "gloo" else None
