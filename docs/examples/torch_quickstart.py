"""Trains a small network on two ranks with 8-bit gradients.

Start it with: horovodrun --gloo -np 2 python docs/examples/torch_quickstart.py
With --uncompressed at the end, it trains without compression.
"""

import sys

import horovod.torch as hvd
import torch
from torch import nn

import hvd_compress.torch as hvdc

STEPS = 200
BATCH = 32
FEATURES, CLASSES = 64, 10

hvd.init()
if hvd.size() == 1:
    raise SystemExit("A single rank exchanges nothing: start several, as above.")
torch.set_num_threads(1)
torch.manual_seed(1)  # The same task and the same first weights on every rank ...
task = torch.randn(FEATURES, CLASSES)
model = nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, CLASSES))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
data = torch.Generator().manual_seed(100 + hvd.rank())  # ... but other samples.

optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
compressor = hvdc.NoCompression(model) if "--uncompressed" in sys.argv else hvdc.Int8(model)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=compressor
)

losses = []
for _ in range(STEPS):
    inputs = torch.randn(BATCH, FEATURES, generator=data)
    labels = (inputs @ task).argmax(1)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

if hvd.rank() == 0:
    inputs = torch.randn(5000, FEATURES)
    right = (model(inputs).argmax(1) == (inputs @ task).argmax(1)).float().mean()
    counters = compressor.counters.per_step
    print(f"loss: {sum(losses[:20]) / 20:.3f} at first, {sum(losses[-20:]) / 20:.3f} at last")
    print(f"accuracy on new samples: {right:.1%}")
    print(f"bytes a step: {counters.wire_bytes:.0f} for {counters.uncompressed_bytes:.0f}")
hvd.shutdown()
