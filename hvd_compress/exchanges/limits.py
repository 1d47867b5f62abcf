"""The limit on the size of a message."""

from __future__ import annotations

MAX_GATHERED_BYTES = 2**31 - 1
"""The most bytes in one gather: Horovod counts them in C ints."""


def check_gather(name: str, payload_bytes: int, size: int) -> None:
    """Raises ``ValueError`` if all ranks' payloads together are too large for one gather."""
    if payload_bytes * size > MAX_GATHERED_BYTES:
        raise ValueError(
            f"{name}: expected at most {MAX_GATHERED_BYTES} bytes in one gather, got {size} ranks times "
            f"{payload_bytes}; use a codec with fewer bits or exclude the tensor"
        )


def check_message(name: str, size: int, advice: str) -> None:
    """Raises ``ValueError`` if a message is too large; the error gives the advice."""
    if size > MAX_GATHERED_BYTES:
        raise ValueError(
            f"{name}: expected at most {MAX_GATHERED_BYTES} bytes in one message, got {size}; {advice}"
        )
