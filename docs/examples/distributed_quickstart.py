"""Trains a small network on two ranks, whose gradients one compressed all_reduce averages.

Start it with: torchrun --standalone --nproc-per-node 2 docs/examples/distributed_quickstart.py
"""

import torch
import torch.distributed as dist
from torch import nn

import hvd_compress.distributed as hvdc
from hvd_compress import Int8

STEPS = 200
BATCH = 32
FEATURES, CLASSES = 64, 10

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(1)  # The same task and the same first weights on every rank ...
task = torch.randn(FEATURES, CLASSES)
model = nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, CLASSES))
data = torch.Generator().manual_seed(100 + dist.get_rank())  # ... but other samples.

names, parameters = zip(*model.named_parameters(), strict=True)
compressor = hvdc.Compressor(Int8())
optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

losses = []
for _ in range(STEPS):
    inputs = torch.randn(BATCH, FEATURES, generator=data)
    labels = (inputs @ task).argmax(1)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    hvdc.all_reduce([p.grad for p in parameters], compressor, key=names)
    optimizer.step()
    losses.append(loss.item())

if dist.get_rank() == 0:
    print(f"loss: {sum(losses[:20]) / 20:.3f} at first, {sum(losses[-20:]) / 20:.3f} at last")
    for name, route in compressor.routes().items():
        print(f"{name}: {'as it is' if route.uncompressed else route}")
    counters = compressor.counters
    print(f"bytes a step without compression: {counters.per_step.uncompressed_bytes:.0f}")
    print(f"bytes a step handed to gloo: {counters.per_step.message_bytes:.0f}")
    print(f"bytes a step on the wire: {counters.per_step.wire_bytes:.0f}")
dist.destroy_process_group()
