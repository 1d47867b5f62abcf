"""Counts of a compressor's traffic, and of the time in its kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Kind = Literal["all_gather", "all_to_all", "all_reduce"]
"""A kind of collective."""


def sent_bytes(kind: Kind, ranks: int, message_bytes: float) -> float:
    """The number of bytes that a rank sends in a collective where collectives are rings.

    Args:
        kind: the kind of collective.
        ranks: the number of ranks that take part.
        message_bytes: bytes that a rank contributes; in an ``all_to_all``, bytes for each rank.
    """
    if kind == "all_reduce":
        return 2 * (ranks - 1) / ranks * message_bytes
    return (ranks - 1) * message_bytes


def _quotient(count: float, among: int) -> float:
    return count / among if among else math.nan


@dataclass
class Counters:
    """Cumulative counts of one rank since construction or the last reset.

    Attributes:
        steps: optimizer steps whose gradients have been exchanged.
        encoded_elements: gradient elements that went through a codec.
        uncompressed_bytes: bytes of all gradients in their own dtype.
        message_bytes: bytes handed to collectives: payloads, uncompressed gradients, tokens.
        wire_bytes: bytes this rank sends where collectives are rings: ``(K - 1)`` times the payload for
            an allgather, ``2 (K - 1) / K`` times the message for an allreduce; for an alltoall, the parts
            for other ranks.
        local_bytes: the part of ``wire_bytes`` that a hierarchical exchange sends within a host.
        encode_seconds: time in encode kernels, including residuals.
        decode_seconds: time in decode kernels.
    """

    steps: int = 0
    encoded_elements: int = 0
    uncompressed_bytes: int = 0
    message_bytes: int = 0
    wire_bytes: float = 0.0
    local_bytes: float = 0.0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def ratio(self) -> float:
        """``message_bytes`` divided by ``uncompressed_bytes``; NaN before the first gradient."""
        return _quotient(self.message_bytes, self.uncompressed_bytes)

    @property
    def per_step(self) -> Counters:
        """All counts divided by ``steps``, as floats; NaN before the first step."""
        mean = Counters()
        for name, count in vars(self).items():
            setattr(mean, name, _quotient(count, self.steps))
        return mean

    def metrics(self, residual_norm: float) -> dict[str, float]:
        """The numbers of a dashboard by name: sent bytes a step, the ratio, the residuals' norm."""
        return {
            "compression/bytes_per_step": self.per_step.wire_bytes,
            "compression/ratio": self.ratio,
            "compression/residual_norm": residual_norm,
        }

    def shown(self, name: str, route: object) -> str:
        """A compressor's ``repr``: class, route, steps and ratio."""
        ratio = f"{self.ratio:.1%} of the bytes" if self.uncompressed_bytes else "nothing exchanged"
        return f"<{name} {route}: {self.steps} step{'s' * (self.steps != 1)}, {ratio}>"

    def add_allreduce(self, size: int, message_bytes: int) -> None:
        """Counts one uncompressed message among ``size`` ranks."""
        self.message_bytes += message_bytes
        self.wire_bytes += sent_bytes("all_reduce", size, message_bytes)

    def add_allgather(self, size: int, message_bytes: int) -> None:
        """Counts one gathered payload among ``size`` ranks."""
        self.message_bytes += message_bytes
        self.wire_bytes += sent_bytes("all_gather", size, message_bytes)

    def add_alltoall(self, message_bytes: int, own_bytes: int) -> None:
        """Counts one message of parts for all ranks, of which ``own_bytes`` stay on this one."""
        self.message_bytes += message_bytes
        self.wire_bytes += message_bytes - own_bytes

    def add(self, other: Counters) -> None:
        """Adds all counts of another object."""
        for name, more in vars(other).items():
            setattr(self, name, getattr(self, name) + more)
