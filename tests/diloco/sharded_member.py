"""One rank of a job of sharded workers, of which the last one is killed.

``python -m tests.diloco.sharded_member PORT FOLDER RANK RANKS``: the ranks train through two exchanges of
each fragment. Those of the last worker then wait for their end; the others go on among themselves, and
write what they end with.
"""

from __future__ import annotations

import datetime
import faulthandler
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import hvd_compress.distributed as hvdc
from hvd_compress import OneBit
from tests.diloco.nesterov import DiLoCo
from tests.diloco.test_shards import FRAGMENTS, SHAPES, parts, train
from tests.fsdp.probes import Net, mesh_of, shard

SHARDS = 2


def main(port: str, folder: str, rank: str, ranks: str) -> None:
    """Trains, and goes on without the last worker."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    own, count = int(rank), int(ranks)
    store = dist.TCPStore("127.0.0.1", int(port), is_master=False)
    store.set(f"process of {own}", str(os.getpid()))
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=own, world_size=count, timeout=timeout)
    mesh = mesh_of(count // SHARDS)
    net, worker = shard(Net(SHAPES), mesh), mesh.get_local_rank("replicate")
    diloco = DiLoCo(net, hvdc.Compressor(OneBit(), threshold=0), mesh=mesh, **FRAGMENTS)
    train(diloco, net, worker, range(5))
    if own >= count - SHARDS:
        store.set(f"{own} can be killed", "now")
        time.sleep(600)
    store.get("killed")
    try:
        train(diloco, net, worker, range(5, 12))
    except RuntimeError as error:
        Path(folder, f"{own}.error").write_text(f"{time.time()} {error}")
    left = range(own % SHARDS, count - SHARDS, SHARDS)
    diloco.rebind(dist.new_group(list(left), use_local_synchronization=True))
    train(diloco, net, worker, range(diloco.steps, 14))
    diloco.synchronize()
    torch.save((diloco.rounds, parts(net)), Path(folder, f"{own}.end"))
    store.set(f"{own} has ended", "")
    for other in range(count - SHARDS):
        store.get(f"{other} has ended")


if __name__ == "__main__":
    main(*sys.argv[1:])
