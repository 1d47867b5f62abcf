"""The planner's measurements, with TensorFlow's tensors and collectives, outside of any graph."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from hvd_compress.codecs import NoiseKey
from hvd_compress.exchange.counters import Counters
from hvd_compress.kernels.cpu import CpuKernels
from hvd_compress.planner.measured import HALF, Coding
from hvd_compress.planner.probing import MEETING, SMALL, SMALL_BYTES, Prober, Work
from hvd_compress.tensorflow.collectives import Collectives


class TensorProber(Prober):
    """Implements :class:`Prober`, on the CPU, where the operations run.

    Args:
        collectives: the ranks, more than one.
        threads: kernel threads.
        largest: elements of the largest gradient.
        counters: count what the probes send.
    """

    def __init__(
        self,
        collectives: Collectives,
        threads: int,
        largest: int,
        counters: Callable[[], Counters],
    ) -> None:
        super().__init__(collectives.size, largest, counters)
        self._collectives = collectives
        self._kernels = CpuKernels(threads)
        with tf.device("cpu"):
            self._messages = {
                MEETING: tf.zeros([SMALL_BYTES // 4]),
                SMALL: tf.zeros([SMALL_BYTES // 4]),
                "allreduce": tf.zeros([self.message_bytes("allreduce") // 4]),
                # Zeros would be added faster than gradients.
                HALF: tf.constant(_normal(self.message_bytes(HALF) // 2).astype(np.float16)),
                "allgather": tf.zeros([self.message_bytes("allgather")], tf.uint8),
                "alltoall": tf.zeros([self.message_bytes("alltoall")], tf.uint8),
            }

    def _run(self, what: str) -> None:
        message = self._messages[what]
        name = what if what in (MEETING, SMALL) else f"probe {what}"
        if what == "allgather":
            self._collectives.gather(message, name)
        elif what == "alltoall":
            size = self._collectives.size
            self._collectives.distribute(message, [len(message) // size] * size, name)
        else:
            self._collectives.sum(message, name)

    def _work(self, coding: Coding, shape: tuple[int, ...]) -> tuple[Work, Work]:
        codec, feedback = coding
        gradient = _normal(self.elements)
        payload = np.empty(codec.payload_bytes(shape), np.uint8)
        residual = np.zeros_like(gradient) if feedback.enabled else None
        out = np.empty_like(gradient)

        def encode() -> None:
            self._kernels.encode(
                codec,
                shape,
                gradient,
                payload,
                feedback=feedback,
                residual=residual,
                noise=NoiseKey(0),
            )

        def decode() -> None:
            self._kernels.decode_sum(codec, shape, payload[None], out, step=0)

        return encode, decode


def _normal(count: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(count, np.float32)
