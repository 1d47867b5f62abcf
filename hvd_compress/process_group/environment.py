"""The place of a rank among the hosts, from the environment or from the ranks' host names."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from hvd_compress.process_group.private import job_store

_VARIABLES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
"""A rank's number on its host, the number of ranks on the host, and the host's number; set by torchrun."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""A file that distinguishes machines with the same name."""


@dataclass(frozen=True)
class Place:
    """A rank's place among the hosts.

    Attributes:
        local_rank: the rank's number on its host.
        local: the number of ranks on this host.
        host: the host's number.
    """

    local_rank: int
    local: int
    host: int


def ranks_of_job() -> int:
    """The number of ranks in the default process group; 1 before it is made, and after its end."""
    return dist.get_world_size() if dist.is_initialized() else 1


def find_place() -> Place:
    """The place of this rank in the job, from the environment or else from all ranks' host names.

    Every rank of the job has to call it: a rank without the variables waits for the names of the others.
    Names are exchanged through the job's store, so the order of this call and collectives does not matter.

    Raises:
        ValueError: the environment contradicts itself.
    """
    store = job_store()
    store.set(_key(dist.get_rank()), host_name())
    place = read_environment()
    if place is not None:
        return place
    names = [store.get(_key(rank)).decode() for rank in range(dist.get_world_size())]
    return place_among(names, dist.get_rank())


def _key(rank: int) -> str:
    return f"hvd_compress/host/{rank}"


def host_name() -> str:
    """A name that is the same for all ranks on a host, and differs between hosts."""
    try:
        return f"{socket.gethostname()} {_BOOT_ID.read_text().strip()}"
    except OSError:
        return socket.gethostname()


def place_among(names: list[str], rank: int) -> Place:
    """The place of a rank, from all ranks' host names; hosts are numbered in the order of first ranks."""
    own = names[rank]
    return Place(names[:rank].count(own), names.count(own), list(dict.fromkeys(names)).index(own))


def read_environment() -> Place | None:
    """The place of this rank in the job from torchrun's variables; None if one of them is missing.

    Raises:
        ValueError: the variables contradict each other.
    """
    values = [os.environ.get(name, "") for name in _VARIABLES]
    if not all(values):
        return None
    if not all(value.isdecimal() for value in values) or not int(values[0]) < int(values[1]):
        found = ", ".join(f"{n}={v!r}" for n, v in zip(_VARIABLES, values, strict=True))
        raise ValueError(
            f"Compressor.exchange: expected LOCAL_RANK below LOCAL_WORLD_SIZE, and the host's number as "
            f"GROUP_RANK, in the environment for 'hierarchical', got {found}: correct or unset them"
        )
    return Place(*map(int, values))
