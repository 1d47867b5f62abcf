"""Trains a small network on two ranks with 8-bit gradients.

Start it with: torchrun --standalone --nproc-per-node 2 docs/examples/ddp_quickstart.py
With --uncompressed at the end, it trains without compression.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hvd_compress.ddp as hvdc
from hvd_compress import Int8, NoCompression

STEPS = 200
BATCH = 32
FEATURES, CLASSES = 64, 10

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(1)  # The same task on every rank ...
task = torch.randn(FEATURES, CLASSES)
network = nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, CLASSES))
data = torch.Generator().manual_seed(100 + dist.get_rank())  # ... but other samples.

model = DistributedDataParallel(network)
compressor = hvdc.register(model, NoCompression() if "--uncompressed" in sys.argv else Int8())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

losses = []
for _ in range(STEPS):
    inputs = torch.randn(BATCH, FEATURES, generator=data)
    labels = (inputs @ task).argmax(1)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

if dist.get_rank() == 0:
    inputs = torch.randn(5000, FEATURES)
    right = (network(inputs).argmax(1) == (inputs @ task).argmax(1)).float().mean()
    counters = compressor.counters.per_step
    print(f"loss: {sum(losses[:20]) / 20:.3f} at first, {sum(losses[-20:]) / 20:.3f} at last")
    print(f"accuracy on new samples: {right:.1%}")
    print(f"bytes a step: {counters.wire_bytes:.0f} for {counters.uncompressed_bytes:.0f}")
dist.destroy_process_group()
