"""Trains with 1-bit gradients on hosts that come and go.

Start it with a script that prints the hosts there are, each with its slots, as in "host1:2":

    horovodrun --gloo -np 2 --min-np 1 --host-discovery-script ./hosts.sh \
        python docs/examples/elastic_quickstart.py
"""

import argparse
import logging
import os

import horovod.torch as hvd
import torch
from torch import nn

import hvd_compress.torch as hvdc
from hvd_compress.torch.elastic import TorchState

BATCH = 32
FEATURES, CLASSES = 64, 10

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
arguments = parser.parse_args()

logging.basicConfig(level=logging.INFO)  # Says what has become of lost ranks' residuals.
hvd.init()
torch.set_num_threads(1)
torch.manual_seed(1)
task = torch.randn(FEATURES, CLASSES)
model = nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, CLASSES))
compressor = hvdc.OneBit(model)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    named_parameters=model.named_parameters(),
    compression=compressor,
)
state = TorchState(model, optimizer, step=0, share_residuals=True)


@hvd.elastic.run
def train(state: TorchState) -> None:
    """Goes on from ``state.step``, with the ranks that there are."""
    data = torch.Generator().manual_seed(1000 * state.step + hvd.rank())
    while state.step < arguments.steps:
        inputs = torch.randn(BATCH, FEATURES, generator=data)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), (inputs @ task).argmax(1))
        loss.backward()
        optimizer.step()
        state.step += 1
        if state.step % 10 == 0:
            sent = compressor.counters.message_bytes / compressor.counters.uncompressed_bytes
            print(
                f"step {state.step}: rank {hvd.rank()} of {hvd.size()}, process {os.getpid()}, "
                f"loss {loss.item():.3f}, bytes {sent:.3f} of uncompressed",
                flush=True,
            )
            compressor.reset_counters()
            state.commit()


train(state)
weights = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
print(f"rank {hvd.rank()} of {hvd.size()} ends with weights {weights.double().sum().item():.12f}")
hvd.shutdown()
