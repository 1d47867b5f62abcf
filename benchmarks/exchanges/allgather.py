"""An allgather of payloads."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.exchanges.base import Answer, Clock, Coded, Work
from hvd_compress.codecs import NoiseKey
from hvd_compress.kernels.cpu import CpuKernels
from hvd_compress.kernels.oracle import OracleKernels
from hvd_compress.torch.collectives import Collectives


class AllGather(Coded):
    """Every rank's payload goes to all others, which add what they decode.

    A ring passes each payload on K - 1 times.
    """

    def prepare(self, collectives: Collectives, threads: int, elements: int) -> Work:
        """See :meth:`Exchange.prepare`."""
        kernels = CpuKernels(threads)
        shape = (elements,)
        size = self._codec.payload_bytes(shape)
        payload = torch.empty(size, dtype=torch.uint8)
        residual = torch.zeros(elements) if self._feedback.enabled else None
        result = torch.empty(elements)
        noise = NoiseKey(rank=collectives.rank)
        name = f"allgather.{self._codec!r}.{elements}"

        def work(gradient: torch.Tensor, clock: Clock) -> torch.Tensor:
            kernels.encode(
                self._codec,
                shape,
                gradient,
                payload,
                feedback=self._feedback,
                residual=residual,
                noise=noise,
            )
            clock.lap("encode")
            gathered = collectives.wait(collectives.gather_alike(payload, name))
            clock.lap("transfer")
            kernels.decode_sum(
                self._codec, shape, gathered.view(collectives.size, size), result, step=0
            )
            clock.lap("decode")
            return result

        return work

    def wire_bytes(self, elements: int, ranks: int) -> float:
        """See :meth:`Exchange.wire_bytes`."""
        return (ranks - 1) * self._codec.payload_bytes((elements,))

    def answer(self, gradients: list[np.ndarray]) -> Answer:
        """See :meth:`Exchange.answer`: the oracle's bits, and no others."""
        oracle = OracleKernels()
        shape = gradients[0].shape
        payloads = np.empty((len(gradients), self._codec.payload_bytes(shape)), np.uint8)
        for rank, gradient in enumerate(gradients):
            oracle.encode(
                self._codec,
                shape,
                gradient,
                payloads[rank],
                feedback=self._feedback,
                residual=np.zeros_like(gradient) if self._feedback.enabled else None,
                noise=NoiseKey(rank=rank),
            )
        total = np.empty_like(gradients[0])
        oracle.decode_sum(self._codec, shape, payloads, total, step=0)
        return total, 0.0
