"""The simulated ranks of one process, which the exchanges' references use."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hvd_compress.codecs import Codec, ErrorFeedback, NoiseKey
from hvd_compress.codecs.base import Shape
from hvd_compress.exchanges.base import Exchange
from hvd_compress.exchanges.comm import Group
from hvd_compress.exchanges.hosts import Hosts
from hvd_compress.exchanges.shards import Shared, shared

OwnerStep = Callable[[np.ndarray, dict[str, Any]], None]
"""A function that changes an average in place, shape=(n,), float32, and keeps its state in a dictionary."""


class Arithmetic:
    """The arithmetic of simulated ranks: the codecs' references.

    A subclass may use kernels, which give the same numbers, to make long simulations faster.
    """

    def through(self, codec: Codec, shape: Shape, x: np.ndarray, noise: NoiseKey) -> np.ndarray:
        """Encodes and decodes ``x``, as its receivers do: shape=(n,), float32."""
        return codec.dequantize(*codec.quantize(x, shape, noise), shape)


class Ranks:
    """The ranks' codecs, noise and residuals.

    Args:
        exchange: the exchange.
        codec: the same as in the compressors.
        feedback: the same as in the compressors.
        shapes: the shapes of the tensors by name, in the order in which the compressors number them.
        size: the number of ranks.
        local: the number of ranks on each host; only ``hierarchical`` uses it.
        seed: the seed of the noise.
        owner_step: the same as in the compressors; only ``two_shot`` supports it.
        warmup_steps: the same as in the compressors.
        inner: the same as in the compressors' :class:`~hvd_compress.Route`.
        arithmetic: the arithmetic of the ranks; None means the codecs' references.

    Attributes:
        codec: the codec.
        inner: the codec within hosts; None without one.
        arithmetic: the arithmetic of the ranks.
        hosts: the ranks on their hosts.
        shapes: the shapes of the tensors by name.
        seed: the seed of the noise.
        step: the position in the noise, which is the number of steps so far.
        residuals: the residuals of each rank by tensor, shape=(n,), float32; empty if ranks keep none.
        owned: the residuals of each rank's own parts by tensor, shape=(n_part,), float32, in the order of
            :meth:`shared`; empty if the exchange has no owners.
        states: the states of the owner steps, by owner and tensor; those of a low-rank exchange, by 0 and
            tensor.
    """

    def __init__(
        self,
        exchange: Exchange,
        codec: Codec,
        feedback: ErrorFeedback,
        shapes: Mapping[str, Shape],
        size: int,
        *,
        local: int = 1,
        seed: int = 0,
        owner_step: OwnerStep | None = None,
        warmup_steps: int = 0,
        inner: Codec | None = None,
        arithmetic: Arithmetic | None = None,
    ) -> None:
        self.codec, self.inner, self.arithmetic = codec, inner, arithmetic or Arithmetic()
        self.shapes, self.hosts = dict(shapes), Hosts(size, local)
        self._exchange, self._feedback, self.seed = exchange, feedback, seed
        self._size, self._owner_step, self._warmup_steps = size, owner_step, warmup_steps
        owners = self._exchange.owners(Group(0, size, self.hosts))
        self._owners = owners.size if owners else 0
        self.step = 0
        self._finite, self._cold = True, False
        self.reset()

    def reset(self) -> None:
        """Sets residuals to zero and forgets the states; the noise goes on."""
        ranks = range(self._size)
        counts = {name: math.prod(shape) for name, shape in self.shapes.items()}
        encoded = {name: n for name, n in counts.items() if self.codec.encodes(self.shapes[name])}
        kept = encoded if self._exchange.residuals or self.inner else {}
        self.residuals: list[dict[str, np.ndarray]] = [
            {name: np.zeros(n, np.float32) for name, n in kept.items()} for _ in ranks
        ]
        self.owned: list[dict[str, np.ndarray]] = [
            {name: np.zeros(counts[name], np.float32)[self.part(name, rank)] for name in counts}
            if self._owners
            else {}
            for rank in ranks
        ]
        self.states: dict[tuple[int, str], dict[str, Any]] = {}

    def shared(self, name: str) -> Shared:
        """The division of a tensor among the owners, for an exchange that has owners."""
        return shared(self.codec, self.shapes[name])

    def part(self, name: str, rank: int) -> slice:
        """The range of a tensor that a rank owns, possibly empty, in the order of :meth:`shared`."""
        number = list(self.shapes).index(name)
        return slice(*self.shared(name).shards(self._owners, number).of(rank % self._owners))

    def parts(self, name: str) -> Iterator[tuple[int, slice, Shape]]:
        """The owners of non-empty parts of a tensor, their parts, and the shapes of these."""
        shards = self.shared(name).shards(self._owners)
        for owner in range(self._owners):
            part = self.part(name, owner)
            if part.stop > part.start:
                yield owner, part, shards.shape(part.stop - part.start)

    def send(
        self,
        name: str,
        x: np.ndarray,
        residual: np.ndarray,
        stream: int,
        part: Shape | None = None,
        inner: Codec | None = None,
    ) -> np.ndarray:
        """Returns the numbers that receivers decode, shape=(n,), float32; the residual keeps the rest.

        In warm-up steps with an owner step, no codec changes the numbers.

        Args:
            name: the tensor.
            x: the numbers to send, shape=(n,), float32.
            residual: the sender's residual, shape=(n,), float32.
            stream: the rank in the noise key.
            part: the shape of an owner's part; None if the numbers are the whole tensor.
            inner: the part's codec in place of the tensor's.
        """
        if self._cold or not x.size:
            self.see(x)
            return x
        codec, shape = self.codec, self.shapes[name]
        if part is not None:
            codec, shape = inner or self.shared(name).codec, part
        compensated, noise = self.compensate(x, residual), self.noise(name, stream)
        sent = self.arithmetic.through(codec, shape, compensated, noise)
        self.carry(x, residual, sent, noise)
        self.see(sent)
        return sent

    def compensate(self, numbers: np.ndarray, residual: np.ndarray) -> np.ndarray:
        """The numbers to encode, with the residual added if there is error feedback."""
        return self._feedback.compensate(numbers, residual) if self._feedback.enabled else numbers

    def carry(
        self, numbers: np.ndarray, residual: np.ndarray, sent: np.ndarray, noise: NoiseKey
    ) -> None:
        """Writes what was not sent to the residual, if there is error feedback."""
        if self._feedback.enabled:
            residual[:] = self._feedback.carry(numbers, residual, sent, noise)

    def noise(self, name: str, stream: int) -> NoiseKey:
        """The noise key of a tensor in this step."""
        return NoiseKey(self.seed, stream, list(self.shapes).index(name), self.step)

    def run_owner_step(self, owner: int, name: str, average: np.ndarray) -> None:
        """Changes the average of an owner's part in place, if it is finite and there is an owner step."""
        if self._owner_step is not None and np.isfinite(average).all():
            self._owner_step(average, self.states.setdefault((owner, name), {}))

    def see(self, numbers: np.ndarray) -> None:
        """Drops the step if a number is not finite."""
        self._finite &= bool(np.isfinite(numbers).all())

    @staticmethod
    def total(parts: Sequence[np.ndarray]) -> np.ndarray:
        """The sum in the order of the ranks, from +0, so that every receiver has the same bits."""
        return sum(parts, np.zeros_like(parts[0]))
