"""Initializes Horovod again in running processes, with fewer ranks or with all of them."""

from __future__ import annotations

import os
from typing import Any

from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer

_servers = []


def initialize_again(hvd: Any, size: int) -> bool:
    """Shuts down Horovod on all ranks of a job, and initializes it on the first ``size`` of them.

    Args:
        hvd: a framework's Horovod.
        size: the number of ranks that continue.

    Returns:
        Whether this rank continues.
    """
    return start_at(hvd, next_places(hvd, size)[0], size)


def next_places(hvd: Any, *sizes: int) -> list[int]:
    """The ports of the next rendezvous, one for each size, for :func:`start_at`; all ranks call this."""
    ports = None
    if hvd.rank() == 0:
        ports = []
        for size in sizes:
            # A new server, because the old one still has the addresses of all ranks.
            server = RendezvousServer()
            ports.append(server.start())
            server.init(get_host_assignments(parse_hosts(f"localhost:{size}"), size))
            _servers.append(server)
    return hvd.broadcast_object(ports, root_rank=0, name="ports of the next rendezvous")


def start_at(hvd: Any, port: int, size: int) -> bool:
    """Shuts down Horovod on this rank, and initializes it if the rank is one of the first ``size``.

    Args:
        hvd: a framework's Horovod.
        port: a port from :func:`next_places`.
        size: the number of ranks that continue.

    Returns:
        Whether this rank continues.
    """
    hvd.shutdown()
    if int(os.environ["HOROVOD_RANK"]) >= size:
        return False
    os.environ.update(
        HOROVOD_SIZE=str(size),
        HOROVOD_LOCAL_SIZE=str(size),
        HOROVOD_GLOO_RENDEZVOUS_ADDR="127.0.0.1",
        HOROVOD_GLOO_RENDEZVOUS_PORT=str(port),
    )
    hvd.init()
    return True
