"""Trains a small network on four ranks: two replicas of two shards, with 8-bit gradients between replicas.

Start it with: torchrun --standalone --nproc-per-node 4 docs/examples/fsdp_quickstart.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hvd_compress.fsdp as hvdc
from hvd_compress import Int8

STEPS = 200
BATCH = 32
FEATURES, CLASSES = 64, 10

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(1)  # The same task on every rank ...
task = torch.randn(FEATURES, CLASSES)
model = nn.Sequential(nn.Linear(FEATURES, 256), nn.ReLU(), nn.Linear(256, CLASSES))
data = torch.Generator().manual_seed(100 + dist.get_rank())  # ... but other samples.

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh["shard"])  # Not the whole mesh.
compressor = hvdc.Compressor(model, Int8(), mesh=mesh)
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
    print(f"loss: {sum(losses[:20]) / 20:.3f} at first, {sum(losses[-20:]) / 20:.3f} at last")
    for name, route in compressor.routes().items():
        print(f"{name}: {'as it is' if route.uncompressed else route}")
    counters = compressor.counters
    print(f"bytes a step without compression: {counters.per_step.uncompressed_bytes:.0f}")
    print(f"bytes a step handed to gloo: {counters.per_step.message_bytes:.0f}")
    print(f"bytes a step on the wire: {counters.per_step.wire_bytes:.0f}")
dist.destroy_process_group()
