"""Horovod that is initialized again in running processes, with fewer ranks."""

from __future__ import annotations

import os
from typing import Any

from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer

_servers = []


def initialize_again(hvd: Any, size: int) -> bool:
    """Ends Horovod on all ranks of a job, and starts it with the first ones of them.

    Args:
        hvd: a framework's Horovod.
        size: how many go on.

    Returns:
        Whether this rank is one of them.
    """
    rank, port = hvd.rank(), None
    if rank == 0:
        # One of its own: the first server still has the addresses of all ranks.
        server = RendezvousServer()
        port = server.start()
        server.init(get_host_assignments(parse_hosts(f"localhost:{size}"), size))
        _servers.append(server)
    port = hvd.broadcast_object(port, root_rank=0, name="port of the next rendezvous")
    hvd.shutdown()
    if rank >= size:
        return False
    os.environ.update(
        HOROVOD_SIZE=str(size),
        HOROVOD_LOCAL_SIZE=str(size),
        HOROVOD_GLOO_RENDEZVOUS_ADDR="127.0.0.1",
        HOROVOD_GLOO_RENDEZVOUS_PORT=str(port),
    )
    hvd.init()
    return True
