"""Trains a small network on two ranks with 8-bit gradients, by Lightning's Trainer.

Start it with: torchrun --standalone --nproc-per-node 2 docs/examples/lightning_quickstart.py
With --uncompressed at the end, it trains without compression.
"""

import sys

import lightning.pytorch as lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hvd_compress import Int8, NoCompression
from hvd_compress.lightning import CompressGradients

FEATURES, CLASSES, SAMPLES = 64, 10, 12800


class Network(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, CLASSES))
        self.losses = []

    def training_step(self, batch, _):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.layers(inputs), labels)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


torch.manual_seed(1)
inputs = torch.randn(SAMPLES, FEATURES)
task = torch.randn(FEATURES, CLASSES)
labels = (inputs @ task).argmax(1)
network = Network()

compress = CompressGradients(NoCompression() if "--uncompressed" in sys.argv else Int8())
trainer = lightning.Trainer(
    strategy="ddp",
    accelerator="cpu",
    devices=2,
    max_epochs=1,
    callbacks=[compress],
    enable_checkpointing=False,
    enable_model_summary=False,
    enable_progress_bar=False,
    logger=False,
)
trainer.fit(network, DataLoader(TensorDataset(inputs, labels), batch_size=32))

if trainer.is_global_zero:
    inputs = torch.randn(5000, FEATURES)
    right = (network.layers(inputs).argmax(1) == (inputs @ task).argmax(1)).float().mean()
    losses, counters = network.losses, compress.compressor.counters.per_step
    print(f"loss: {sum(losses[:20]) / 20:.3f} at first, {sum(losses[-20:]) / 20:.3f} at last")
    print(f"accuracy on new samples: {right:.1%}")
    print(f"bytes a step: {counters.wire_bytes:.0f} for {counters.uncompressed_bytes:.0f}")
