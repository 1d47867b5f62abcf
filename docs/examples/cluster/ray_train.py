"""Trains on two of Ray's workers with 8-bit gradients.

Start it with: python docs/examples/cluster/ray_train.py
"""

import ray
import torch
import torch.distributed as dist
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch import nn

import hvd_compress.ddp as hvdc
from hvd_compress import Int8

STEPS = 200
BATCH = 32
FEATURES, CLASSES = 64, 10


def train(config: dict[str, str]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)  # The same task on every rank ...
    task = torch.randn(FEATURES, CLASSES)
    model = nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, CLASSES))
    data = torch.Generator().manual_seed(100 + dist.get_rank())  # ... but other samples.

    model = prepare_model(model)  # Ray wraps the model in DistributedDataParallel.
    compressor = hvdc.register(model, Int8(), exchange=config["exchange"])
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
        counters = compressor.counters
        print(f"bytes a step without compression: {counters.per_step.uncompressed_bytes:.0f}")
        print(f"bytes a step on the wire: {counters.per_step.wire_bytes:.0f}")


if __name__ == "__main__":
    ray.init()  # On a cluster's head node, this connects to the cluster.
    TorchTrainer(
        train,
        train_loop_config={"exchange": "allgather"},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
    ).fit()
