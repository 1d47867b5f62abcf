"""Integers in Horovod's allreduce."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.exchanges.base import Answer, Clock, Coded, Work
from hvd_compress.codecs import LevelCodec, NoiseKey
from hvd_compress.exchange import integer_sum
from hvd_compress.kernels.cpu_levels import CpuLevels
from hvd_compress.torch.collectives import Collectives


class IntegerSum(Coded):
    """The ranks' levels, made with common norms, in Horovod's allreduce.

    Both messages go round a ring: the norms, and the levels in lanes.
    """

    takes = LevelCodec
    _codec: LevelCodec

    def prepare(self, collectives: Collectives, threads: int, elements: int) -> Work:
        """See :meth:`Exchange.prepare`."""
        kernels = CpuLevels(threads)
        shape = (elements,)
        codec = integer_sum.check("gradient", self._codec, collectives.size)
        bits = integer_sum.bits_of(codec, collectives.size)
        own = torch.empty(codec.layout(shape).scales)
        words = torch.empty(codec.level_words(shape, bits), dtype=torch.int32)
        residual = torch.zeros(elements) if self._feedback.enabled else None
        result = torch.empty(elements)
        noise = NoiseKey(rank=collectives.rank)
        name = f"integer sum.{codec!r}.{elements}"

        def work(gradient: torch.Tensor, clock: Clock) -> torch.Tensor:
            kernels.norms(codec, shape, gradient, own, feedback=self._feedback, residual=residual)
            clock.lap("encode")
            norms = collectives.wait(collectives.maximum(own, f"{name} norms"))
            clock.lap("transfer")
            kernels.encode(
                codec,
                shape,
                gradient,
                norms,
                words,
                bits=bits,
                feedback=self._feedback,
                residual=residual,
                noise=noise,
            )
            clock.lap("encode")
            total = collectives.wait(collectives.sum(words, f"{name} levels"))
            clock.lap("transfer")
            kernels.decode(codec, shape, norms, total, result, bits=bits)
            clock.lap("decode")
            return result

        return work

    def wire_bytes(self, elements: int, ranks: int) -> float:
        """See :meth:`Exchange.wire_bytes`."""
        bits = integer_sum.bits_of(self._codec, ranks)
        shape = (elements,)
        words = self._codec.layout(shape).scales + self._codec.level_words(shape, bits)
        return 2 * (ranks - 1) / ranks * 4 * words

    def answer(self, gradients: list[np.ndarray]) -> Answer:
        """See :meth:`Exchange.answer`: the oracle's bits, and no others."""
        codec = self._codec
        norms = np.max([codec.norms(gradient) for gradient in gradients], axis=0)
        total = np.zeros(gradients[0].shape, np.int32)
        for rank, gradient in enumerate(gradients):
            total += codec.to_levels(gradient, norms, NoiseKey(rank=rank))
        return codec.from_levels(total, norms), 0.0
