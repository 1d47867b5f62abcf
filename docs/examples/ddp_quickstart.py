"""Trains a small network on two ranks with 1-bit gradients, without Horovod.

Start it with: torchrun --standalone --nproc-per-node 2 docs/examples/ddp_quickstart.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hvd_compress.ddp as hvdc
from hvd_compress import OneBit

STEPS = 200
BATCH = 32
FEATURES, CLASSES = 64, 10

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(1)  # The same task on every rank ...
task = torch.randn(FEATURES, CLASSES)
model = nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, CLASSES))
data = torch.Generator().manual_seed(100 + dist.get_rank())  # ... but other samples.

model = DistributedDataParallel(model)
compressor = hvdc.Compressor(model, OneBit())
model.register_comm_hook(compressor, hvdc.hook)
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
    print(f"encoding and decoding: {counters.encode_seconds + counters.decode_seconds:.3f} s")
    print(f"norm of what has not been sent yet: {compressor.residual_norm():.3f}")
dist.destroy_process_group()
