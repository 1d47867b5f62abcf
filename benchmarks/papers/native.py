"""The CPU kernels as the arithmetic of simulated ranks: the numbers of the references, sooner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import numpy as np

from hvd_compress.codecs import Codec, NoiseKey
from hvd_compress.exchanges.simulation import Arithmetic
from hvd_compress.kernels.batch import Entry
from hvd_compress.kernels.cpu_batch import CpuBatch

Watch = Callable[[Codec, tuple[int, ...], NoiseKey, np.ndarray], None]
"""A function of the codec, the tensor's shape, its position in the noise, and the payload, shape=(bytes,),
uint8."""


class Native(Arithmetic):
    """The arithmetic of a real exchange: payloads are written, checked and read.

    Error feedback is left to :class:`hvd_compress.exchanges.reference.Simulation`, which calls this.

    Args:
        watch: a function that is called with every payload, or None.
    """

    def __init__(self, watch: Watch | None = None) -> None:
        self._watch = watch

    def through(
        self, codec: Codec, shape: tuple[int, ...], x: np.ndarray, noise: NoiseKey
    ) -> np.ndarray:
        payload = np.empty((1, codec.payload_bytes(shape)), np.uint8)
        batch = _batch(codec, shape, replace(noise, step=0))
        batch.encode([x], [None], [None], [noise.step], payload[0])
        if self._watch is not None:
            self._watch(codec, shape, noise, payload[0])
        decoded = np.empty(x.size, np.float32)
        batch.decode_sum([decoded], [noise.step], payload)
        return decoded


@lru_cache(maxsize=4096)
def _batch(codec: Codec, shape: tuple[int, ...], noise: NoiseKey) -> CpuBatch:
    return CpuBatch([Entry(codec, shape, noise=noise)])
