"""Trains a small network on two ranks with 8-bit gradients, with Hugging Face Accelerate.

Start it with: torchrun --standalone --nproc-per-node 2 docs/examples/accelerate_quickstart.py
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hvd_compress.ddp as hvdc
from hvd_compress import Int8

FEATURES, CLASSES, SAMPLES = 64, 10, 12800

torch.manual_seed(1)
inputs = torch.randn(SAMPLES, FEATURES)
labels = (inputs @ torch.randn(FEATURES, CLASSES)).argmax(1)
model = nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, CLASSES))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
data = DataLoader(TensorDataset(inputs, labels), batch_size=32)

accelerator = Accelerator(cpu=True)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
compressor = hvdc.register(model, Int8(), grad_scaler=accelerator.scaler)
accelerator.register_for_checkpointing(hvdc.GatheredState(compressor))

losses = []
for inputs, labels in data:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), labels)
    accelerator.backward(loss)
    optimizer.step()
    losses.append(loss.item())

if accelerator.is_main_process:
    counters = compressor.counters
    print(f"loss: {sum(losses[:20]) / 20:.3f} at first, {sum(losses[-20:]) / 20:.3f} at last")
    print(f"bytes a step without compression: {counters.per_step.uncompressed_bytes:.0f}")
    print(f"bytes a step handed to gloo: {counters.per_step.message_bytes:.0f}")
    print(f"bytes a step on the wire: {counters.per_step.wire_bytes:.0f}")
accelerator.end_training()
