"""Models whose gradients are known under stock Horovod's optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import horovod.torch as hvd
import torch

from hvd_compress.torch.collectives import Handle
from tests.torch_models import Probe


@cache
def process_set(*ranks: int) -> hvd.ProcessSet:
    """Returns a process set for all tests of a job: Horovod accepts each set once."""
    return hvd.add_process_set(list(ranks))


def distributed(
    model: torch.nn.Module, compression: Any, learning_rate: float = 1.0, **options: Any
) -> Any:
    """Stock Horovod's optimizer over plain SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    return hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
        **options,
    )


def exchange(
    model: Probe,
    optimizer: Any,
    gradients: Mapping[str, torch.Tensor],
    order: Iterable[str] | None = None,
) -> dict[str, torch.Tensor]:
    """One backward pass and step; returns the gradients that the step used."""
    optimizer.zero_grad()
    model(gradients, order).backward()
    optimizer.step()
    return {
        name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None
    }


def watch(
    compressor: Any,
    started: Callable[[str], None] = lambda name: None,
    result: Callable[[str, torch.Tensor], None] = lambda name, rows: None,
) -> None:
    """Calls functions for every collective of a compressor's exchanges.

    Args:
        compressor: this rank's compressor.
        started: called with a collective's name when it is started.
        result: called with a collective's name and result, which may be altered in place.
    """
    collectives = compressor._ranks.collectives
    start = collectives.start

    class Watched(Handle):
        def wait(self) -> torch.Tensor:
            rows = super().wait()
            result(self.name, rows)
            return rows

    def noted(collective: Any, name: str) -> Any:
        started(name)
        return Watched(**vars(start(collective, name)))

    collectives.start = noted


def assert_identical_on_all_ranks(model: torch.nn.Module) -> None:
    """Fails unless every rank holds the same parameters, bit for bit."""
    flat = torch.cat([p.detach().reshape(-1).float() for p in model.parameters()])
    everywhere = hvd.allgather(flat[None], name="parameters of all ranks")
    assert all(torch.equal(everywhere[0], other) for other in everywhere)
