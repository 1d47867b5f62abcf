"""Where a rank is: its host, as the environment says."""

from __future__ import annotations

import os

_VARIABLES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
"""A rank's number on its host, the host's ranks, and the host's number, as torchrun sets them."""


def ranks_of_a_host(*, required: bool) -> int:
    """How many ranks this host has, or 1 where the environment does not tell and that is not required."""
    try:
        return read_environment()[1]
    except ValueError:
        if required:
            raise
        return 1


def read_environment() -> tuple[int, int, int]:
    """This rank's number on its host, how many ranks the host has, and the host's number.

    Raises:
        ValueError: the environment does not tell.
    """
    values = [os.environ.get(name, "") for name in _VARIABLES]
    if not all(value.isdecimal() for value in values):
        found = ", ".join(f"{n}={v!r}" for n, v in zip(_VARIABLES, values, strict=True))
        raise ValueError(
            f"Compressor.exchange: expected {', '.join(_VARIABLES)} in the environment for 'hierarchical', "
            f"got {found}: start the ranks by torchrun, which sets them, or set them to this rank's place "
            f"on its host, the number of ranks there, and the host's number"
        )
    local_rank, local, host = map(int, values)
    if not local_rank < local:
        raise ValueError(
            f"Compressor.exchange: expected LOCAL_RANK below LOCAL_WORLD_SIZE for 'hierarchical', got "
            f"{local_rank} of {local}"
        )
    return local_rank, local, host
