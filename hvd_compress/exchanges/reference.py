"""The NumPy reference of the exchanges: slow, short, and the definition for the frontends.

The reference has no messages, buckets or threads, and needs no framework. Each exchange in
docs/exchanges.md is one method here.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hvd_compress.codecs import Codec, ErrorFeedback, LevelCodec, NoiseKey
from hvd_compress.codecs.base import Shape
from hvd_compress.exchanges import two_shot
from hvd_compress.exchanges.hosts import Hosts
from hvd_compress.exchanges.shards import Shared, shared, transpose, transpose_back

Arrays = Mapping[str, np.ndarray]
OwnerStep = Callable[[np.ndarray, dict[str, Any]], None]
"""A function that changes an average in place, shape=(n,), float32, and keeps its state in a dictionary."""


class Arithmetic:
    """The arithmetic of simulated ranks: the codecs' references.

    A subclass may use kernels, which give the same numbers, to make long simulations faster.
    """

    def through(self, codec: Codec, shape: Shape, x: np.ndarray, noise: NoiseKey) -> np.ndarray:
        """Encodes and decodes ``x``, as its receivers do: shape=(n,), float32."""
        return codec.dequantize(*codec.quantize(x, shape, noise), shape)

    def norms(self, codec: LevelCodec, x: np.ndarray) -> np.ndarray:
        """The norms of ``x``'s groups; ranks use the largest norms of all ranks."""
        return codec.norms(x)

    def to_levels(
        self, codec: LevelCodec, x: np.ndarray, norms: np.ndarray, noise: NoiseKey
    ) -> np.ndarray:
        """The levels of ``x``, as integers, for norms that all ranks share."""
        return codec.to_levels(x, norms, noise)


class Simulation:
    """The compressors of all ranks in one process.

    Args:
        exchange: the exchange's name in :data:`hvd_compress.exchanges.registry.EXCHANGES`.
        codec: the same as in the compressors.
        feedback: the same as in the compressors.
        shapes: the shapes of the tensors by name, in the order in which the compressors number them.
        size: the number of ranks.
        local: the number of ranks on each host; only ``hierarchical`` uses it.
        seed: the seed of the noise.
        owner_step: the same as in the compressors; only ``two_shot`` supports it.
        warmup_steps: the same as in the compressors, for simulations with an owner step; without an owner
            step, warm-up steps are plain means.
        arithmetic: the arithmetic of the ranks; None means the codecs' references.

    Attributes:
        step: the position in the noise, which is the number of steps so far.
        residuals: the residuals of each rank by tensor, shape=(n,), float32; empty if ranks keep none.
        owned: the residuals of each rank's own parts by tensor, shape=(n_part,), float32, in the order of
            :meth:`shared`; empty if the exchange has no owners.
        states: the states of the owner steps, by owner and tensor.
    """

    def __init__(
        self,
        exchange: str,
        codec: Codec,
        feedback: ErrorFeedback,
        shapes: Mapping[str, Shape],
        size: int,
        *,
        local: int = 1,
        seed: int = 0,
        owner_step: OwnerStep | None = None,
        warmup_steps: int = 0,
        arithmetic: Arithmetic | None = None,
    ) -> None:
        self._arithmetic = arithmetic or Arithmetic()
        self._exchange: Callable[[str, list[np.ndarray], float], np.ndarray]
        self._exchange = getattr(self, f"_{exchange}")
        self._codec, self._feedback, self._seed = codec, feedback, seed
        self._shapes, self._size, self._owner_step = dict(shapes), size, owner_step
        self._warmup_steps = warmup_steps
        self._hosts = Hosts(size, local)
        self._owners = {"two_shot": size, "hierarchical": local}.get(exchange, 0)
        self.step = 0
        ranks = range(size)
        whole = exchange != "hierarchical"
        counts = {name: math.prod(shape) for name, shape in self._shapes.items()}
        self.residuals: list[dict[str, np.ndarray]] = [
            {name: np.zeros(n, np.float32) for name, n in counts.items() if whole} for _ in ranks
        ]
        self.owned: list[dict[str, np.ndarray]] = [
            {name: np.zeros(counts[name], np.float32)[self.part(name, rank)] for name in counts}
            if self._owners
            else {}
            for rank in ranks
        ]
        self.states: dict[tuple[int, str], dict[str, Any]] = {}
        self._finite = True
        self._before = self.residuals, self.owned, self.states

    def shared(self, name: str) -> Shared:
        """The division of a tensor among the owners, for an exchange that has owners."""
        return shared(self._codec, self._shapes[name])

    def part(self, name: str, rank: int) -> slice:
        """The range of a tensor that a rank owns, possibly empty, in the order of :meth:`shared`."""
        number = list(self._shapes).index(name)
        return slice(*self.shared(name).shards(self._owners, number).of(rank % self._owners))

    def average(
        self, gradients: Sequence[Arrays], scale: float | None = None
    ) -> dict[str, np.ndarray]:
        """Makes one step.

        Args:
            gradients: the gradients of each rank by tensor, with the tensor's shape and any float dtype. A
                tensor that some ranks lack counts as zeros there; one that all ranks lack is not
                exchanged, and its residuals do not change.
            scale: the factor of the ranks' sum; None means 1 / ``size``.

        Returns:
            The result on every rank by tensor, with the tensor's shape, float32. If any sent number is not
            finite, the step is dropped: residuals and states are restored.
        """
        factor = 1 / self._size if scale is None else scale
        exchange, cold = self._exchange, self._warmup_steps > 0
        if cold:
            self._warmup_steps -= 1
            exchange = self._cold_start
        self._before = copy.deepcopy((self.residuals, self.owned, self.states))
        self._finite = True
        received = {}
        with np.errstate(all="ignore"):
            for name, shape in self._shapes.items():
                if not any(name in one for one in gradients):
                    continue
                zeros = np.zeros(shape)
                flat = [one.get(name, zeros).astype(np.float32).reshape(-1) for one in gradients]
                received[name] = exchange(name, flat, factor).reshape(shape)
        self.step += not cold
        if not self._finite:
            self.drop_step()
        return received

    def drop_step(self) -> None:
        """Restores the residuals and states from before the last step; the noise is not repeated."""
        self.residuals, self.owned, self.states = self._before

    def _allgather(self, name: str, gradients: list[np.ndarray], scale: float) -> np.ndarray:
        shape = self._shapes[name]
        sent = [
            self._send(name, self._codec, shape, gradient, self.residuals[rank][name], rank)
            for rank, gradient in enumerate(gradients)
        ]
        return _sum(sent) * np.float32(scale)

    def _two_shot(self, name: str, gradients: list[np.ndarray], scale: float) -> np.ndarray:
        result = np.empty_like(gradients[0])
        cut = self.shared(name)
        gradients = [transpose(gradient, cut.transposed) for gradient in gradients]
        kept = [transpose(residuals[name], cut.transposed) for residuals in self.residuals]
        for owner, (part, shape) in self._parts(name, range(self._size)):
            sent = [
                self._send(
                    name,
                    cut.codec,
                    shape,
                    gradient[part],
                    kept[rank][part],
                    two_shot.first_stream(rank, owner, self._size),
                )
                for rank, gradient in enumerate(gradients)
            ]
            average = _sum(sent) * np.float32(1 / self._size)
            if self._owner_step is not None:
                self._owner_step(average, self.states.setdefault((owner, name), {}))
            stream = two_shot.second_stream(owner, self._size)
            again = self._send(name, cut.codec, shape, average, self.owned[owner][name], stream)
            result[part] = again * np.float32(scale * self._size)
        for residuals, one in zip(self.residuals, kept, strict=True):
            residuals[name] = transpose_back(one, cut.transposed)
        return transpose_back(result, cut.transposed)

    def _cold_start(self, name: str, gradients: list[np.ndarray], scale: float) -> np.ndarray:
        """Averages in two shots without a codec, so that owners can step."""
        result = np.empty_like(gradients[0])
        cut = self.shared(name)
        gradients = [transpose(gradient, cut.transposed) for gradient in gradients]
        for owner, (part, _) in self._parts(name, range(self._size)):
            average = _sum([gradient[part] for gradient in gradients]) * np.float32(1 / self._size)
            assert self._owner_step is not None
            if np.isfinite(average).all():
                self._owner_step(average, self.states.setdefault((owner, name), {}))
            self._finite &= bool(np.isfinite(average).all())
            result[part] = average * np.float32(scale * self._size)
        return transpose_back(result, cut.transposed)

    def _hierarchical(self, name: str, gradients: list[np.ndarray], scale: float) -> np.ndarray:
        result = np.empty_like(gradients[0])
        cut = self.shared(name)
        gradients = [transpose(gradient, cut.transposed) for gradient in gradients]
        for local_rank, (part, shape) in self._parts(name, range(self._hosts.local)):
            sent = []
            for owner in self._hosts.between(local_rank):
                host = [gradients[rank][part] for rank in self._hosts.within(owner)]
                average = _sum(host) * np.float32(1 / self._hosts.local)
                kept = self.owned[owner][name]
                sent.append(self._send(name, cut.codec, shape, average, kept, owner))
            result[part] = _sum(sent) * np.float32(scale * self._hosts.local)
        return transpose_back(result, cut.transposed)

    def _integer_sum(self, name: str, gradients: list[np.ndarray], scale: float) -> np.ndarray:
        codec, feedback = self._codec, self._feedback
        assert isinstance(codec, LevelCodec)
        kept = [residuals[name] for residuals in self.residuals]
        inputs = [self._input(g, h) for g, h in zip(gradients, kept, strict=True)]
        if not inputs[0].size:
            return inputs[0]
        norms = np.max([self._arithmetic.norms(codec, x) for x in inputs], axis=0)
        self._finite &= bool(np.isfinite(norms).all())
        total = np.zeros(inputs[0].size, np.int32)
        for rank, x in enumerate(inputs):
            levels = self._arithmetic.to_levels(codec, x, norms, self._noise(name, rank))
            total += levels
            if feedback.enabled:
                sent = codec.from_levels(levels, norms)
                kept[rank][:] = feedback.carry(gradients[rank], kept[rank], sent)
        return codec.from_levels(total, norms) * np.float32(scale)

    def _parts(self, name: str, owners: range) -> list[tuple[int, tuple[slice, Shape]]]:
        """The non-empty parts and their shapes, by owner."""
        shape = self.shared(name).shards(self._owners).shape
        parts = [(owner, self.part(name, owner)) for owner in owners]
        return [(o, (p, shape(p.stop - p.start))) for o, p in parts if p.stop > p.start]

    def _send(
        self,
        name: str,
        codec: Codec,
        shape: Shape,
        numbers: np.ndarray,
        residual: np.ndarray,
        stream: int,
    ) -> np.ndarray:
        """Returns the numbers that receivers decode, shape=(n,), float32; the residual keeps the rest."""
        if not numbers.size:
            return numbers
        x = self._input(numbers, residual)
        sent = self._arithmetic.through(codec, shape, x, self._noise(name, stream))
        if self._feedback.enabled:
            residual[:] = self._feedback.carry(numbers, residual, sent)
        self._finite &= bool(np.isfinite(sent).all())
        return sent

    def _input(self, numbers: np.ndarray, residual: np.ndarray) -> np.ndarray:
        return self._feedback.compensate(numbers, residual) if self._feedback.enabled else numbers

    def _noise(self, name: str, stream: int) -> NoiseKey:
        return NoiseKey(self._seed, stream, list(self._shapes).index(name), self.step)


def _sum(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The sum in the order of the ranks, from +0, so that every receiver has the same bits."""
    total = np.zeros(parts[0].shape, np.float32)
    for part in parts:
        total += part
    return total
