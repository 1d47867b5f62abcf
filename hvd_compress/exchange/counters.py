"""What a compressor has sent, and how long its kernels took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Cumulative counts of one rank since construction or the last reset.

    Attributes:
        steps: optimizer steps whose gradients have been exchanged.
        encoded_elements: gradient elements that went through a codec.
        uncompressed_bytes: bytes of all gradients in their own dtype.
        message_bytes: bytes handed to collectives: payloads, dense gradients, tokens.
        wire_bytes: bytes this rank sends where collectives are rings: ``(K - 1)`` times the payload for
            an allgather, ``2 (K - 1) / K`` times the message for an allreduce; for an alltoall, what is
            for others.
        local_bytes: those of ``wire_bytes`` that a hierarchical exchange sends within a host.
        encode_seconds: time in encode kernels, residual included.
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

    def add_allreduce(self, size: int, message_bytes: int) -> None:
        """Counts one dense message among ``size`` ranks."""
        self.message_bytes += message_bytes
        self.wire_bytes += 2 * (size - 1) / size * message_bytes

    def add_allgather(self, size: int, message_bytes: int) -> None:
        """Counts one gathered payload among ``size`` ranks."""
        self.message_bytes += message_bytes
        self.wire_bytes += (size - 1) * message_bytes

    def add_alltoall(self, message_bytes: int, own_bytes: int) -> None:
        """Counts one message of parts for all ranks, of which ``own_bytes`` stay on this one."""
        self.message_bytes += message_bytes
        self.wire_bytes += message_bytes - own_bytes
