"""Trains convolutions data-parallel and dense layers model-parallel on two ranks, with 8-bit messages.

Start it with: torchrun --standalone --nproc-per-node 2 docs/examples/parallel_quickstart.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hvd_compress.codecs import Int8
from hvd_compress.papers import ColumnParallelLinear, ParallelGroup, RowParallelLinear

STEPS = 200
BATCH = 32
SIDE, CLASSES = 12, 10

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(1)  # The same task and the same first weights on every rank ...
task = torch.randn(SIDE * SIDE, CLASSES)
convolutions = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten())
group = ParallelGroup(Int8())
dense = nn.Sequential(
    ColumnParallelLinear(8 * SIDE * SIDE, 256, group, gather_output=False, batch_parallel=True),
    nn.ReLU(),
    RowParallelLinear(256, CLASSES, group, input_is_parallel=True, batch_parallel=True),
)
data = torch.Generator().manual_seed(100 + group.rank)  # ... but other samples.

model = DistributedDataParallel(convolutions)  # Not the dense layers: each weight is on one rank.
optimizer = torch.optim.Adam([*model.parameters(), *dense.parameters()], lr=0.001)

losses = []
for _ in range(STEPS):
    images = torch.randn(BATCH, 1, SIDE, SIDE, generator=data)
    labels = (images.flatten(1) @ task).argmax(1)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(dense(model(images)), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

if group.rank == 0:
    counters = group.counters
    print(f"loss: {sum(losses[:20]) / 20:.3f} at first, {sum(losses[-20:]) / 20:.3f} at last")
    print(f"exchanges a step: {counters.steps / STEPS:.0f}")
    print(f"bytes a step of the tensors: {counters.uncompressed_bytes / STEPS:.0f}")
    print(f"bytes a step handed to gloo: {counters.message_bytes / STEPS:.0f}")
dist.destroy_process_group()
