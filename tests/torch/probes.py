"""Models whose gradients are known, and what the ranks' compressors must make of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from hvd_compress.codecs import Codec, ErrorFeedback, NoiseKey
from hvd_compress.kernels.oracle import OracleKernels

Shapes = Mapping[str, tuple[int, ...]]


class Probe(torch.nn.Module):
    """Parameters ``p`` whose loss is the sum of ``p * t``: the gradient is ``t``, exactly."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(
        self, targets: Mapping[str, torch.Tensor], order: Iterable[str] | None = None
    ) -> torch.Tensor:
        parts = [(getattr(self, name) * targets[name]).sum() for name in order or targets]
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        return total


def targets(shapes: Shapes, rank: int, step: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Gradients of one rank at one step, the same wherever they are asked for."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return {name: scale * torch.randn(s, generator=generator) for name, s in shapes.items()}


def two_valued(shapes: Shapes, rank: int, step: int) -> dict[str, torch.Tensor]:
    """Gradients that 1-bit codes carry without error: 1 or -2 everywhere, rank and step mixed in."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    factor = 2.0 ** (rank + step)
    made = {}
    for name, shape in shapes.items():
        positive = torch.rand(shape, generator=generator) < 0.5
        made[name] = torch.where(positive, factor, -2 * factor)
    return made


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


class Simulation:
    """All ranks' compressors in one process, by the oracle."""

    def __init__(
        self, codec: Codec, feedback: ErrorFeedback, shapes: Shapes, size: int, seed: int = 0
    ) -> None:
        self._codec, self._feedback, self._shapes = codec, feedback, shapes
        self._size, self._seed = size, seed
        self._kernels = OracleKernels()
        self._step = 0
        self.residuals = [
            {name: np.zeros(math.prod(shape), np.float32) for name, shape in shapes.items()}
            for _ in range(size)
        ]

    def average(self, gradients: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """What every rank's gradients become in one step."""
        averages = {}
        for index, (name, shape) in enumerate(self._shapes.items()):
            payloads = np.empty((self._size, self._codec.payload_bytes(shape)), np.uint8)
            for rank in range(self._size):
                self._kernels.encode(
                    self._codec,
                    shape,
                    gradients[rank][name].numpy().reshape(-1),
                    payloads[rank],
                    feedback=self._feedback,
                    residual=self.residuals[rank][name] if self._feedback.enabled else None,
                    noise=NoiseKey(self._seed, rank, index, self._step),
                )
            out = np.empty(math.prod(shape), np.float32)
            self._kernels.decode_sum(
                self._codec, shape, payloads, out, step=self._step, scale=1 / self._size
            )
            averages[name] = torch.from_numpy(out).view(shape)
        self._step += 1
        return averages


def assert_same_bits(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> None:
    """Fails unless both hold the same names and the same numbers, bit for bit."""
    assert left.keys() == right.keys(), (left.keys(), right.keys())
    for name in left:
        assert torch.equal(left[name], right[name]), (
            f"{name}: {(left[name] != right[name]).sum()} of {left[name].numel()} differ, "
            f"the first {left[name].reshape(-1)[:3]} and {right[name].reshape(-1)[:3]}"
        )


def assert_identical_on_all_ranks(model: torch.nn.Module) -> None:
    """Fails unless every rank holds the same parameters, bit for bit."""
    flat = torch.cat([p.detach().reshape(-1).float() for p in model.parameters()])
    everywhere = hvd.allgather(flat[None], name="parameters of all ranks")
    assert all(torch.equal(everywhere[0], other) for other in everywhere)
