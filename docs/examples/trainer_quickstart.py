"""Trains a small network on two ranks with 8-bit gradients, by Hugging Face Transformers' Trainer.

Start it with: torchrun --standalone --nproc-per-node 2 docs/examples/trainer_quickstart.py
"""

import tempfile

import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer, TrainingArguments

from hvd_compress import Int8
from hvd_compress.transformers import CompressGradients

FEATURES, CLASSES, SAMPLES = 64, 10, 12800


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, CLASSES))
        self.losses = []

    def forward(self, inputs, labels):
        loss = nn.functional.cross_entropy(self.layers(inputs), labels)
        self.losses.append(loss.item())
        return {"loss": loss}


torch.manual_seed(1)
inputs = torch.randn(SAMPLES, FEATURES)
labels = (inputs @ torch.randn(FEATURES, CLASSES)).argmax(1)
network = Network()

trainer = Trainer(
    model=network,
    args=TrainingArguments(
        output_dir=tempfile.gettempdir(),
        use_cpu=True,
        num_train_epochs=1,
        per_device_train_batch_size=32,
        learning_rate=0.05,
        lr_scheduler_type="constant",
        optim="sgd",
        optim_args="momentum=0.9",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        report_to="none",
    ),
    train_dataset=[{"inputs": x, "labels": y} for x, y in zip(inputs, labels, strict=True)],
)
compress = CompressGradients(trainer, Int8())
trainer.add_callback(compress)
trainer.train()

if trainer.is_world_process_zero():
    losses, counters = network.losses, compress.compressor.counters
    print(f"loss: {sum(losses[:20]) / 20:.3f} at first, {sum(losses[-20:]) / 20:.3f} at last")
    print(f"bytes a step without compression: {counters.per_step.uncompressed_bytes:.0f}")
    print(f"bytes a step handed to gloo: {counters.per_step.message_bytes:.0f}")
    print(f"bytes a step on the wire: {counters.per_step.wire_bytes:.0f}")
dist.destroy_process_group()
