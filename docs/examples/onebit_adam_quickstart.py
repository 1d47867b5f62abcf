"""Trains a small network on two ranks by 1-bit Adam, which averages momenta of one bit an element.

Start it with: torchrun --standalone --nproc-per-node 2 docs/examples/onebit_adam_quickstart.py
"""

import torch
import torch.distributed as dist
from torch import nn

from hvd_compress import OneBit
from hvd_compress.optim import OneBitAdam

STEPS, WARMUP = 400, 80
BATCH = 32
FEATURES, CLASSES = 64, 10

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(1)  # The same task on every rank ...
task = torch.randn(FEATURES, CLASSES)
model = nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, CLASSES))
data = torch.Generator().manual_seed(100 + dist.get_rank())  # ... but other samples.

optimizer = OneBitAdam(model.named_parameters(), OneBit(), warmup_steps=WARMUP, lr=0.003)

losses = []
for step in range(STEPS):
    if step == WARMUP:  # Gradients went uncompressed until here.
        optimizer.compressor.reset_counters()
    inputs = torch.randn(BATCH, FEATURES, generator=data)
    labels = (inputs @ task).argmax(1)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

if dist.get_rank() == 0:
    print(f"loss: {sum(losses[:20]) / 20:.3f} at first, {sum(losses[-20:]) / 20:.3f} at last")
    gradients = sum(4 * parameter.numel() for parameter in model.parameters())
    counters = optimizer.compressor.counters
    print(f"bytes a step without compression: {gradients}")
    print(f"bytes a step handed to gloo: {counters.per_step.message_bytes:.0f}")
    print(f"bytes a step on the wire: {counters.per_step.wire_bytes:.0f}")
    print(f"norm of what has not been sent yet: {optimizer.compressor.residual_norm():.3f}")
dist.destroy_process_group()
