"""Models whose gradients are known, and what the ranks' compressors must make of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from hvd_compress.codecs import Codec, ErrorFeedback, LevelCodec, NoiseKey
from hvd_compress.kernels.oracle import OracleKernels
from tests.integer_sums import integer_sum

Shapes = Mapping[str, tuple[int, ...]]


@cache
def process_set(*ranks: int) -> hvd.ProcessSet:
    """Those ranks, for all tests of a job: Horovod takes a set once."""
    return hvd.add_process_set(list(ranks))


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


class _Coding:
    """What simulations of exchanges in parts have in common."""

    def __init__(self, codec: Codec, feedback: ErrorFeedback, seed: int) -> None:
        self._codec, self._feedback, self._seed = codec, feedback, seed
        self._kernels = OracleKernels()
        self._step = 0

    def _encode(
        self, numbers: np.ndarray, residual: np.ndarray, index: int, stream: int
    ) -> np.ndarray:
        payload = np.empty(self._codec.payload_bytes(numbers.shape), np.uint8)
        self._kernels.encode(
            self._codec,
            numbers.shape,
            numbers,
            payload,
            feedback=self._feedback,
            residual=residual if self._feedback.enabled else None,
            noise=NoiseKey(self._seed, stream, index, self._step),
        )
        return payload

    def _decode(self, payloads: np.ndarray, out: np.ndarray, scale: float) -> None:
        self._kernels.decode_sum(
            self._codec, out.shape, payloads, out, step=self._step, scale=scale
        )


def _part(shapes: Shapes, name: str, rank: int, size: int) -> slice:
    names, grain = list(shapes), 1024
    count = math.prod(shapes[name])
    part = (rank - names.index(name)) % size
    grains = math.ceil(count / grain)
    begin, end = (p * grains // size * grain for p in (part, part + 1))
    return slice(min(begin, count), min(end, count))


class TwoShotSimulation(_Coding):
    """The same for the two-shot exchange, written down from ``docs/exchanges.md``.

    Args:
        codec: as the compressors'.
        feedback: of both shots.
        shapes: of the parameters.
        size: ranks.
        seed: of the noise.
        owner_step: as the compressors'.
    """

    def __init__(
        self,
        codec: Codec,
        feedback: ErrorFeedback,
        shapes: Shapes,
        size: int,
        seed: int = 0,
        owner_step: Any = None,
    ) -> None:
        super().__init__(codec, feedback, seed)
        self._shapes, self._size, self._owner_step = shapes, size, owner_step
        counts = {name: math.prod(shape) for name, shape in shapes.items()}
        self.residuals = [
            {name: np.zeros(count, np.float32) for name, count in counts.items()}
            for _ in range(size)
        ]
        self.owned = {name: np.zeros(count, np.float32) for name, count in counts.items()}
        self.states: dict[tuple[str, int], dict[str, Any]] = {}

    def shard(self, name: str, rank: int) -> slice:
        """The elements of a parameter that a rank owns."""
        return _part(self._shapes, name, rank, self._size)

    def average(self, gradients: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """What every rank's gradients become in one step, with op=Average."""
        averages = {}
        for index, (name, shape) in enumerate(self._shapes.items()):
            out = np.empty(math.prod(shape), np.float32)
            flats = [gradients[rank][name].numpy().reshape(-1) for rank in range(self._size)]
            for owner in range(self._size):
                part = self.shard(name, owner)
                if part.start < part.stop:
                    rests = [self.residuals[rank][name][part] for rank in range(self._size)]
                    pieces = [flat[part] for flat in flats]
                    out[part] = self._shard_average(name, index, owner, pieces, rests)
            averages[name] = torch.from_numpy(out).view(shape)
        self._step += 1
        return averages

    def _shard_average(
        self,
        name: str,
        index: int,
        owner: int,
        pieces: list[np.ndarray],
        residuals: list[np.ndarray],
    ) -> np.ndarray:
        size, count = self._size, pieces[0].size
        payloads = np.stack(
            [
                self._encode(pieces[rank], residuals[rank], index, rank * size + owner)
                for rank in range(size)
            ]
        )
        average = np.empty(count, np.float32)
        self._decode(payloads, average, 1 / size)
        if self._owner_step is not None:
            state = self.states.setdefault((name, owner), {})
            self._owner_step(torch.from_numpy(average), state)
        part = self.shard(name, owner)
        again = self._encode(average, self.owned[name][part], index, size * size + owner)
        out = np.empty(count, np.float32)
        self._decode(again[None], out, 1.0)
        return out


class HierarchicalSimulation(_Coding):
    """The same for the hierarchical exchange.

    Args:
        codec: as the compressors'.
        feedback: as the compressors'.
        shapes: of the parameters.
        size: ranks.
        local: ranks of a host.
        seed: of the noise.
    """

    def __init__(
        self,
        codec: Codec,
        feedback: ErrorFeedback,
        shapes: Shapes,
        size: int,
        local: int,
        seed: int = 0,
    ) -> None:
        super().__init__(codec, feedback, seed)
        self._shapes, self._size, self._local = shapes, size, local
        self.residuals = [
            {name: np.zeros(math.prod(shape), np.float32) for name, shape in shapes.items()}
            for _ in range(size // local)
        ]

    def part(self, name: str, place: int) -> slice:
        """The elements of a parameter that the rank in a place of its host owns."""
        return _part(self._shapes, name, place, self._local)

    def average(self, gradients: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """What every rank's gradients become in one step, with op=Average."""
        averages = {}
        hosts = self._size // self._local
        for index, (name, shape) in enumerate(self._shapes.items()):
            out = np.empty(math.prod(shape), np.float32)
            for place in range(self._local):
                part = self.part(name, place)
                if part.start == part.stop:
                    continue
                payloads = []
                for host in range(hosts):
                    total = np.zeros(part.stop - part.start, np.float32)
                    for rank in range(host * self._local, (host + 1) * self._local):
                        total += gradients[rank][name].numpy().reshape(-1)[part]
                    total *= np.float32(1 / self._local)
                    rest = self.residuals[host][name][part]
                    rank = host * self._local + place
                    payloads.append(self._encode(total, rest, index, rank))
                self._decode(np.stack(payloads), out[part], self._local / self._size)
            averages[name] = torch.from_numpy(out).view(shape)
        self._step += 1
        return averages


class IntegerSumSimulation:
    """The same for the integer sum.

    Args:
        codec: as the compressors'.
        feedback: as the compressors'.
        shapes: of the parameters.
        size: ranks.
        seed: of the noise.
    """

    def __init__(
        self, codec: LevelCodec, feedback: ErrorFeedback, shapes: Shapes, size: int, seed: int = 0
    ) -> None:
        self._codec, self._feedback, self._shapes = codec, feedback, shapes
        self._size, self._seed, self._step = size, seed, 0
        self.residuals = [
            {name: np.zeros(math.prod(shape), np.float32) for name, shape in shapes.items()}
            for _ in range(size)
        ]

    def average(self, gradients: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """What every rank's gradients become in one step, with op=Average."""
        averages = {}
        for index, (name, shape) in enumerate(self._shapes.items()):
            flats = [one[name].numpy().reshape(-1) for one in gradients]
            rests = [self.residuals[rank][name] for rank in range(self._size)]
            noises = [NoiseKey(self._seed, r, index, self._step) for r in range(self._size)]
            mean = integer_sum(self._codec, self._feedback, flats, rests, noises, 1 / self._size)
            averages[name] = torch.from_numpy(mean).view(shape)
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
