"""Trains on two ranks of Horovod with a compressor, or without it."""

from __future__ import annotations

import sys

import horovod.torch as hvd
import torch

import hvd_compress.torch as hvdc


def _main(use: bool) -> None:
    hvd.init()
    model = torch.nn.Linear(64, 64)
    compressor = hvdc.Int8(model)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression=compressor if use else hvd.Compression.none,
    )
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    later = torch.nn.Linear(64, 64)
    beside = hvdc.Int8(later)
    hvd.shutdown()  # Training may go on alone.
    torch.optim.SGD(later.parameters(), lr=0.1).step()
    print("trained", beside)


_main(sys.argv[1] == "used")
