"""Horovod's own allreduce."""

from __future__ import annotations

from typing import Any, ClassVar

import horovod.torch as hvd
import numpy as np
import torch

from benchmarks.compressions import Compression
from benchmarks.exchanges.base import Answer, Clock, Exchange, Work
from hvd_compress.exchanges.steps import all_reduce
from hvd_compress.torch.collectives import HorovodCollectives


class AllReduce(Exchange):
    """Horovod's allreduce of float32, or of float16 with Horovod's ``Compression.fp16``.

    A ring sends each of the K parts of a message 2 (K - 1) times: K - 1 times to sum it, and K - 1 times
    to distribute the sum.
    """

    parts = ("encode", "transfer", "decode")
    _KINDS: ClassVar[dict[str, tuple[Any, type[np.floating[Any]]]]] = {
        "none": (hvd.Compression.none, np.float32),
        "fp16": (hvd.Compression.fp16, np.float16),
    }

    def __init__(self, kind: str) -> None:
        self.config = {"compression": kind}
        self._horovod, self._dtype = self._KINDS[kind]

    @classmethod
    def of(cls, compression: Compression) -> Exchange:
        """The exchange with a compression.

        Raises:
            ValueError: the compression is neither ``none`` nor ``fp16``, or has settings.
        """
        if compression.name not in cls._KINDS or compression.options:
            raise ValueError(f"expected one of {', '.join(cls._KINDS)}, got {compression.text!r}")
        return cls(compression.name)

    def prepare(self, collectives: HorovodCollectives, threads: int, elements: int) -> Work:
        name = f"allreduce.{self.config['compression']}.{elements}"

        def work(gradient: torch.Tensor, clock: Clock) -> torch.Tensor:
            message, ctx = self._horovod.compress(gradient)
            clock.lap("encode")
            total = collectives.all_reduce(message, name).wait()
            clock.lap("transfer")
            result = self._horovod.decompress(total, ctx)
            clock.lap("decode")
            return result

        return work

    def wire_bytes(self, elements: int, ranks: int) -> float:
        return all_reduce(elements, np.dtype(self._dtype).itemsize).sent(ranks)

    def answer(self, gradients: list[np.ndarray]) -> Answer:
        """The sum in float64, and a bound of the error if gradients and partial sums are rounded once."""
        total = np.asarray(np.sum(gradients, axis=0, dtype=np.float64))
        magnitude = np.asarray(np.sum(np.abs(gradients), axis=0, dtype=np.float64))
        number = np.finfo(self._dtype)
        rounding = float(number.eps) / 2 * magnitude + float(number.smallest_subnormal) / 2
        return total, 2 * len(gradients) * rounding
