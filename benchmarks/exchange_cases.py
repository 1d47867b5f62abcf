"""What the exchange benchmark measures: for each exchange its steps, its traffic and its right answer."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import horovod.torch as hvd
import numpy as np
import torch

from benchmarks.compressions import Compression, option
from hvd_compress.codecs import Codec, LevelCodec, NoiseKey
from hvd_compress.codecs.registry import SCHEMES
from hvd_compress.exchange import integer_sum
from hvd_compress.kernels.cpu import CpuKernels
from hvd_compress.kernels.cpu_levels import CpuLevels
from hvd_compress.kernels.oracle import OracleKernels
from hvd_compress.torch.collectives import Collectives

Answer = tuple[np.ndarray, np.ndarray | float]
"""A sum, shape=(n,), dtype float64 or float32, and how far from it a result may be."""

FLOAT_BYTES = 4


class Clock:
    """Seconds of one exchange, part by part."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        """Ends a part, and begins the next one."""
        now = time.perf_counter()
        self.parts[part] = self.parts.get(part, 0.0) + now - self._last
        self._last = now


Work = Callable[[torch.Tensor, Clock], torch.Tensor]
"""Sums a gradient, shape=(n,), float32, over the ranks, and tells the clock when each part is done."""


class Exchange(ABC):
    """One way to sum float32 gradients over all ranks.

    To add one: a class with its name, its parts, and these four methods, and its line in
    :data:`EXCHANGES`.

    Attributes:
        parts: what the time is divided into, in order.
        config: what makes it differ from others of its class, for the JSON.
    """

    parts: ClassVar[tuple[str, ...]]
    config: dict[str, Any]

    @classmethod
    @abstractmethod
    def of(cls, compression: Compression) -> Exchange:
        """The exchange with that compression.

        Raises:
            ValueError, TypeError: it takes no such compression.
        """

    @abstractmethod
    def prepare(self, collectives: Collectives, threads: int, elements: int) -> Work:
        """Allocates what exchanges of tensors of that size need; residuals are zero."""

    @abstractmethod
    def wire_bytes(self, elements: int, ranks: int) -> float:
        """Bytes that a rank sends, and receives, where all ranks send equally much."""

    @abstractmethod
    def answer(self, gradients: list[np.ndarray]) -> Answer:
        """What the first exchange of these gradients, one a rank, must come to."""

    def algorithm_bandwidth(self, elements: int, seconds: float) -> float:
        """Bytes of float32 gradient that are summed in a second, whatever travels for them."""
        return FLOAT_BYTES * elements / seconds

    def bus_bandwidth(self, elements: int, ranks: int, seconds: float) -> float:
        """Bytes that each rank sends in a second: what to compare with the rate of its link."""
        return self.wire_bytes(elements, ranks) / seconds


class AllReduce(Exchange):
    """Horovod's allreduce of float32, or of float16 by its own ``Compression.fp16``.

    A ring sends each of the K parts of a message 2 (K - 1) times: K - 1 times to be added up, and
    K - 1 times to be handed out.
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
        """See :meth:`Exchange.of`."""
        if compression.name not in cls._KINDS or compression.options:
            raise ValueError(
                f"allreduce: expected one of {', '.join(cls._KINDS)}, got {compression.text!r}"
            )
        return cls(compression.name)

    def prepare(self, collectives: Collectives, threads: int, elements: int) -> Work:
        """See :meth:`Exchange.prepare`."""
        name = f"allreduce.{self.config['compression']}.{elements}"

        def work(gradient: torch.Tensor, clock: Clock) -> torch.Tensor:
            message, ctx = self._horovod.compress(gradient)
            clock.lap("encode")
            total = collectives.wait(collectives.sum(message, name))
            clock.lap("transfer")
            result = self._horovod.decompress(total, ctx)
            clock.lap("decode")
            return result

        return work

    def wire_bytes(self, elements: int, ranks: int) -> float:
        """See :meth:`Exchange.wire_bytes`."""
        return 2 * (ranks - 1) / ranks * np.dtype(self._dtype).itemsize * elements

    def answer(self, gradients: list[np.ndarray]) -> Answer:
        """See :meth:`Exchange.answer`: each rank's gradient is rounded once, and each partial sum."""
        total = np.asarray(np.sum(gradients, axis=0, dtype=np.float64))
        magnitude = np.asarray(np.sum(np.abs(gradients), axis=0, dtype=np.float64))
        number = np.finfo(self._dtype)
        rounding = float(number.eps) / 2 * magnitude + float(number.smallest_subnormal) / 2
        return total, 2 * len(gradients) * rounding


class AllGather(Exchange):
    """Every rank's payload goes to all others, which add what they decode.

    A ring passes each payload on K - 1 times.
    """

    parts = ("encode", "transfer", "decode")

    def __init__(self, name: str, codec: Codec) -> None:
        self.config = codec.to_config()
        self._codec, self._feedback = codec, SCHEMES[name].feedback

    @classmethod
    def of(cls, compression: Compression) -> Exchange:
        """See :meth:`Exchange.of`."""
        if compression.name not in SCHEMES:
            raise ValueError(
                f"allgather: expected one of {', '.join(SCHEMES)}, got {compression.text!r}"
            )
        return cls(compression.name, SCHEMES[compression.name].codec(**compression.options))

    def prepare(self, collectives: Collectives, threads: int, elements: int) -> Work:
        """See :meth:`Exchange.prepare`."""
        kernels = CpuKernels(threads)
        shape = (elements,)
        size = self._codec.payload_bytes(shape)
        payload = torch.empty(size, dtype=torch.uint8)
        residual = torch.zeros(elements) if self._feedback.enabled else None
        result = torch.empty(elements)
        noise = _noise(collectives.rank)
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
            gathered = collectives.wait(collectives.gather(payload, name))
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
                noise=_noise(rank),
            )
        total = np.empty_like(gradients[0])
        oracle.decode_sum(self._codec, shape, payloads, total, step=0)
        return total, 0.0


class IntegerSum(Exchange):
    """The ranks' levels, made with common norms, in Horovod's allreduce.

    Both messages go round a ring: the norms, and the levels in lanes.
    """

    parts = ("encode", "transfer", "decode")

    def __init__(self, name: str, codec: LevelCodec) -> None:
        self.config = codec.to_config()
        self._codec, self._feedback = codec, SCHEMES[name].feedback

    @classmethod
    def of(cls, compression: Compression) -> Exchange:
        """See :meth:`Exchange.of`."""
        chosen = SCHEMES.get(compression.name)
        if chosen is None or not issubclass(chosen.codec, LevelCodec):
            known = [name for name, one in SCHEMES.items() if issubclass(one.codec, LevelCodec)]
            raise ValueError(
                f"integer_sum: expected one of {', '.join(known)}, got {compression.text!r}"
            )
        return cls(compression.name, chosen.codec(**compression.options))

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
        noise = _noise(collectives.rank)
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
            total += codec.to_levels(gradient, norms, _noise(rank))
        return codec.from_levels(total, norms), 0.0


EXCHANGES: dict[str, type[Exchange]] = {
    "allreduce": AllReduce,
    "allgather": AllGather,
    "integer_sum": IntegerSum,
}
"""By the name that command lines and tables call it."""


def exchange(text: str) -> Exchange:
    """Reads ``EXCHANGE:COMPRESSION[:key=value,...]``, such as ``allgather:onebit:group=512``.

    Raises:
        ValueError, TypeError: there is no such exchange, or it takes no such compression.
    """
    name, _, rest = text.partition(":")
    if name not in EXCHANGES or not rest:
        expected = ", ".join(f"{known}:COMPRESSION" for known in EXCHANGES)
        raise ValueError(f"expected one of {expected}, got {text!r}")
    codec, _, options = rest.partition(":")
    chosen = dict(option(part) for part in options.split(",") if part)
    return EXCHANGES[name].of(Compression(rest, codec, chosen))


def _noise(rank: int) -> NoiseKey:
    return NoiseKey(rank=rank)
