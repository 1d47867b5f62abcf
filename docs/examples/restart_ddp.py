"""Trains with 1-bit gradients through failures: torchrun starts all ranks again, from a checkpoint.

Start it with::

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # Else restarts can hang, see docs/elastic.md.
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 docs/examples/restart_ddp.py
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hvd_compress.ddp as hvdc
from hvd_compress import OneBit

BATCH = 32
FEATURES, CLASSES = 64, 10

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
arguments = parser.parse_args()

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(1)
task = torch.randn(FEATURES, CLASSES)
network = nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, CLASSES))
model = DistributedDataParallel(network)
compressor = hvdc.register(model, OneBit())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
residuals = hvdc.GatheredState(compressor)  # Those of all ranks, in the file of the first one.

begin = 0
if arguments.checkpoint.exists():
    saved = torch.load(arguments.checkpoint, map_location="cpu")
    network.load_state_dict(saved["network"])
    optimizer.load_state_dict(saved["optimizer"])
    residuals.load_state_dict(saved["residuals"])
    begin = saved["step"]

for step in range(begin, arguments.steps):
    data = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    inputs = torch.randn(BATCH, FEATURES, generator=data)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), (inputs @ task).argmax(1))
    loss.backward()
    optimizer.step()
    if (step + 1) % 20 == 0:
        state = {
            "network": network.state_dict(),
            "optimizer": optimizer.state_dict(),
            "residuals": residuals.state_dict(),  # All ranks come here.
            "step": step + 1,
        }
        if dist.get_rank() == 0:
            whole = arguments.checkpoint.with_suffix(".part")
            torch.save(state, whole)
            whole.replace(arguments.checkpoint)  # Never half a checkpoint.
        print(f"step {step + 1}: rank {dist.get_rank()}, process {os.getpid()}", flush=True)

counters = compressor.counters
weights = torch.cat([parameter.detach().reshape(-1) for parameter in network.parameters()])
print(
    f"rank {dist.get_rank()} began at step {begin} and ends with weights "
    f"{weights.double().sum().item():.12f}, bytes "
    f"{counters.ratio:.3f} of uncompressed",
    flush=True,
)
dist.destroy_process_group()
