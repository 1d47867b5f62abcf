"""Do all ranks send the same things? Asked without waiting, answered in words where they do not."""

from __future__ import annotations

import hashlib

import torch

from hvd_compress.ddp.collectives import Collectives
from hvd_compress.exchange import agreement

_LENGTH_BYTES = 8


class Agreement:
    """One comparison of the ranks' configurations.

    A gather wants messages of one length, which lines of JSON do not have. So digests travel first; only
    where these differ, the lines follow, to say what differs.

    Args:
        collectives: the ranks.
        line: this rank's configuration, serialized.
    """

    def __init__(self, collectives: Collectives, line: bytes) -> None:
        self._collectives = collectives
        self._line = line
        digest = len(line).to_bytes(_LENGTH_BYTES, "little") + hashlib.sha256(line).digest()
        self._digests, self._work = collectives.all_gather(self._message(digest))

    def settle(self) -> None:
        """Waits for the other ranks.

        Raises:
            ExchangeError: on every rank, naming what differs.
        """
        self._work.wait()
        digests = [bytes(row.tolist()) for row in self._digests]
        if len(set(digests)) == 1:
            return
        lengths = [int.from_bytes(digest[:_LENGTH_BYTES], "little") for digest in digests]
        padded = self._message(self._line.ljust(max(lengths), b"\0"))
        lines, work = self._collectives.all_gather(padded)
        work.wait()
        rows = zip(lines.cpu().numpy(), lengths, strict=True)
        agreement.check(b"".join(row[:length].tobytes() for row, length in rows))

    def _message(self, content: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self._collectives.device)
