"""Trains a small network on two ranks, which exchange what they have learnt every 20 steps.

Start it with: torchrun --standalone --nproc-per-node 2 docs/examples/diloco_quickstart.py
"""

import torch
import torch.distributed as dist
from torch import nn

from hvd_compress import ErrorFeedback, Int8, Route
from hvd_compress.diloco import DiLoCo

STEPS = 400
BATCH = 32
FEATURES, CLASSES = 64, 10

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(1)  # The same task on every rank ...
task = torch.randn(FEATURES, CLASSES)
model = nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, CLASSES))
data = torch.Generator().manual_seed(100 + dist.get_rank())  # ... but other samples.

optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
# What an exchange rounds off goes into the next one.
codec = Route(Int8(), ErrorFeedback(1.0))
diloco = DiLoCo(model, codec, sync_every=20)

losses = []
for _ in range(STEPS):
    inputs = torch.randn(BATCH, FEATURES, generator=data)
    labels = (inputs @ task).argmax(1)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    diloco.step()
    losses.append(loss.item())
diloco.synchronize()

if dist.get_rank() == 0:
    print(f"loss: {sum(losses[:20]) / 20:.3f} at first, {sum(losses[-20:]) / 20:.3f} at last")
    print(f"exchanges: {diloco.rounds} in {diloco.steps} steps")
    gradients = sum(4 * parameter.numel() for parameter in model.parameters())
    counters = diloco.compressor.counters
    print(f"bytes a step without compression: {gradients}")
    print(f"bytes a step handed to gloo: {counters.message_bytes / diloco.steps:.0f}")
    print(f"bytes a step on the wire: {counters.wire_bytes / diloco.steps:.0f}")
    print(f"norm of what has not been sent yet: {diloco.compressor.residual_norm():.3f}")
dist.destroy_process_group()
