"""The parts of torch.distributed that this package uses and PyTorch does not publish.

``tests/distributed/test_private.py`` tries each name, so that a version of PyTorch without it fails there.
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

_made: WeakKeyDictionary[dist.ProcessGroup, itertools.count[int]] = WeakKeyDictionary()
"""For each process group, how many groups :func:`make_group` has made of its ranks."""

_making = threading.Lock()
"""Held by the thread that makes a group over the job's own connection to its store."""


def make_group(
    parent: dist.ProcessGroup, ranks: Sequence[int], device: torch.device
) -> dist.ProcessGroup:
    """Makes a process group of some ranks of another one; each of these ranks calls this, no other does.

    Unlike ``new_group()``, this function neither names the new group by the number of groups that a rank
    has made before, in which ranks may differ, nor changes that number.

    Args:
        parent: the other group, whose ranks call this equally often. The new group has its backends.
        ranks: the numbers of the new group's ranks in the job, in the order of the new group.
        device: the device of the tensors; the new group has the other one's timeout for them.
    """
    c10d: Any = dist.distributed_c10d
    number = next(_made.setdefault(parent, itertools.count()))
    told = f"{parent.group_name} {number} {list(ranks)}"
    alone = _making.acquire(blocking=False)
    try:
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(dist.get_rank()),
            list(ranks),
            dist.Backend(dist.get_backend_config(parent)),
            # While one thread waits in a store for another rank, no other can use its connection.
            job_store() if alone else job_store().clone(),
            f"hvd_compress/{hashlib.sha256(told.encode()).hexdigest()[:32]}",
            timeout=timeout_of(parent, device),
            device_id=dist.group.WORLD.bound_device_id,  # type: ignore[union-attr]
        )
    finally:
        if alone:
            _making.release()
    c10d._world.pg_group_ranks[group] = {rank: own for own, rank in enumerate(ranks)}
    made: dist.ProcessGroup = group
    return made


class _Forgotten:
    """A placeholder for a forgotten group in the table by whose size PyTorch 2.13 names users' groups.

    Ranks forget groups at different times, and must nevertheless count alike.
    """

    def shutdown(self) -> None:
        """Called when all groups are destroyed."""

    abort = shutdown


def forget_group(group: dist.ProcessGroup) -> None:
    """Removes a group of :func:`make_group` from PyTorch's tables, so that it ends with its last reference.

    ``destroy_process_group()`` issues a warning for a group with one backend.
    """
    c10d: Any = dist.distributed_c10d
    world = c10d._world
    name = world.pg_names.get(group)
    if name is None:
        return  # All groups were destroyed together.
    c10d._cleanup_process_group_global_state(group)
    world.pg_names[_Forgotten()] = name
    for tagged in world.tags_to_pg.values():
        if group in tagged:
            tagged.remove(group)


def is_unregistered(group: dist.ProcessGroup | None) -> bool:
    """Whether torch.distributed does not know a process group, such as the groups that torchft makes."""
    known = dist.distributed_c10d._world.pg_map
    return isinstance(group, dist.ProcessGroup) and group not in known


def job_store() -> Any:
    """The store of the default process group, which all ranks of the job share."""
    return dist.distributed_c10d._get_default_store()


def backend_for(group: dist.ProcessGroup, device: torch.device) -> Any:
    """A group's backend for tensors on a device.

    Raises:
        RuntimeError: it has none.
    """
    return group._get_backend(device)


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> datetime.timedelta:
    """The timeout of a group's collectives on a device; the default one for a backend without any."""
    try:
        options = backend_for(group, device).options
    except (AttributeError, RuntimeError):
        return dist.distributed_c10d.default_pg_timeout
    timeout: datetime.timedelta = options._timeout
    return timeout


def devices_of_gloo(backend: Any) -> int:
    """The number of network devices among which Gloo chooses one by a message's tag."""
    return len(backend.options._devices)


def fail(future: torch.futures.Future, raising: Callable[[Any], Any]) -> None:
    """Completes a future whose ``value()`` and ``wait()`` call ``raising``, which raises an exception.

    ``set_exception()`` makes the exception the result. A future with devices pickles its result to find
    tensors, and not every exception can be pickled.
    """
    future._set_unwrap_func(raising)
    future.set_result(None)
