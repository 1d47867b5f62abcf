"""torch.distributed among Horovod's ranks."""

from __future__ import annotations

import os
import socket

import horovod.torch as hvd
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]


def join() -> None:
    """Makes the default process group of all of Horovod's ranks, once; Horovod is initialized."""
    if dist.is_initialized():
        return
    # The interface of Horovod's own connections; by itself, Gloo would look up the host's name.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", os.environ["HOROVOD_GLOO_IFACE"])
    address, store = _address(), None
    if hvd.rank() == 0:
        store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    port = store.port if store else None
    address, port = hvd.broadcast_object((address, port), name="store")
    store = store or TCPStore(address, port)
    dist.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=hvd.size())


def _address() -> str:
    """The address of this host on its way to the launcher."""
    launcher = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((launcher, 1))  # Sends nothing.
        address: str = probe.getsockname()[0]
        return address
