"""One replica of a job whose replicas come and go: torchft says who takes part in an exchange.

Start a lighthouse, then two replicas or more, each under its own name; kill and start them as you like:

    torchft_lighthouse --bind [::]:29510 --min_replicas 2 --join_timeout_ms 5000
    export TORCHFT_LIGHTHOUSE=http://localhost:29510
    python docs/examples/torchft_diloco.py first
    python docs/examples/torchft_diloco.py second
"""

import argparse
import hashlib
import logging
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torchft
from torch import nn

from hvd_compress import OneBit
from hvd_compress.diloco import DiLoCo
from hvd_compress.distributed import Compressor

FEATURES, CLASSES, BATCH = 64, 10, 32

parser = argparse.ArgumentParser()
parser.add_argument("name")
parser.add_argument("--rounds", type=int, default=20)
parser.add_argument("--pause", type=float, default=0.0, help="seconds after each exchange")
arguments = parser.parse_args()

logging.basicConfig(level=logging.WARNING)
torch.set_num_threads(1)
torch.manual_seed(1)  # The same task in every replica ...
task = torch.randn(FEATURES, CLASSES)
model = nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, CLASSES))
data = torch.Generator().manual_seed(os.getpid())  # ... but other samples.

store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
group = torchft.ProcessGroupGloo(timeout=timedelta(seconds=10))
manager = torchft.Manager(
    pg=group,
    load_state_dict=None,
    state_dict=None,
    min_replica_size=2,
    use_async_quorum=False,
    replica_id=arguments.name,
    rank=0,
    world_size=1,
    store_addr="localhost",
    store_port=store.port,
    hostname="localhost",
    timeout=timedelta(seconds=10),
)

optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
# One bit is coarse for differences: the allgather quantizes them once, two shots twice.
compressor = Compressor(OneBit(), exchange="allgather", process_group=group)
diloco = DiLoCo(model, compressor, sync_every=10, manager=manager)

losses = []
while diloco.rounds < arguments.rounds:
    inputs = torch.randn(BATCH, FEATURES, generator=data)
    labels = (inputs @ task).argmax(1)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    before = diloco.rounds
    diloco.step()
    losses.append(loss.item())
    if diloco.rounds > before:
        parameters = [one.numpy().tobytes() for one in diloco.common_parameters.values()]
        digest = hashlib.sha256(b"".join(parameters)).hexdigest()[:12]
        counters = compressor.counters
        print(
            f"round {diloco.rounds}: {arguments.name} of {manager.num_participants()}, process "
            f"{os.getpid()}, step {diloco.steps}, loss {sum(losses[-10:]) / 10:.3f}, bytes "
            f"{counters.ratio:.3f} of uncompressed, common "
            f"parameters {digest}",
            flush=True,
        )
        time.sleep(arguments.pause)
manager.shutdown()
