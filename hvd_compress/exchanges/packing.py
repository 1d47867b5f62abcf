"""Packed messages, for payloads that are shorter than their places, and the messages' common length.

A layout (:mod:`hvd_compress.exchanges.layout`) gives every payload a place for the longest payload that
its codec can write. A packed message holds a head, the payloads without gaps, and the flags::

    head, 16 bytes | payload | payload | ... | flags

The ranks' messages in a collective must have the same length, and no rank knows what length the others
need. So every rank derives the length from what the ranks needed in earlier steps (:class:`Length`); all
ranks get the same length. A rank that needs more sends the rest in a second collective, in which all ranks
take part, because they all read the heads.
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from hvd_compress.codecs import PayloadError
from hvd_compress.codecs.base import HEADER_BYTES, round_up
from hvd_compress.codecs.payload import FLAGS_OFFSET, length_in
from hvd_compress.exchanges.layout import ALIGNMENT, MessageLayout

HEAD_BYTES = 16

_HEAD = struct.Struct("<4I")
_MESSAGE, _WAITING = 1, 2
_NONE = bytes(HEAD_BYTES)
_WORD = struct.Struct("<I")
_NO_PAYLOAD = b"\xff" * HEADER_BYTES

_STEPS = 16
"""The number of latest steps that determine a length, so that small changes do not change the length."""

_HEADROOM = 16
"""The divisor of the largest need that gives the spare bytes."""

_CLASSES = 16
"""The number of lengths between a power of two and the next one."""


class Length:
    """The number of bytes of one message that the ranks send in the next step.

    All ranks that take part call :meth:`see` with the same numbers, and so get the same length.

    Args:
        full: the length of the longest possible message in bytes, which is used until :meth:`see` is
            called.

    Attributes:
        full: the length of the longest possible message in bytes.
        bytes: the length of the next message in bytes.
    """

    def __init__(self, full: int) -> None:
        self.full = full
        self.bytes = full
        self._needed: deque[int] = deque(maxlen=_STEPS)

    def see(self, needed: int) -> None:
        """Records the bytes that the rank with the longest message needed; 0 if no rank sent a message."""
        if needed:
            self._needed.append(needed)
            largest = max(self._needed)
            self.bytes = agreed(largest, self.full)

    @property
    def seen(self) -> list[int]:
        """The recorded needs that determine the length."""
        return list(self._needed)


def agreed(needed: int, full: int) -> int:
    """The length of the next messages, if the longest recent one needed ``needed`` bytes."""
    return min(full, class_of(needed + needed // _HEADROOM))


def class_of(needed: int) -> int:
    """The shortest length for ``needed`` bytes: a multiple of 1/16 of a power of two, and of 16 bytes."""
    grain = max(ALIGNMENT, (1 << max(0, needed - 1).bit_length()) // (2 * _CLASSES))
    return round_up(needed, grain)


def describe(lengths: Mapping[tuple[object, ...], Mapping[str, Length]]) -> str:
    """A short hash of the needs that determine lengths: the same on ranks with the same needs.

    Args:
        lengths: the lengths by bucket and by the message's name. Messages that no rank has sent yet, and
            messages among only some of the ranks, are ignored.
    """
    seen = sorted(
        f"{bucket} {name} {length.seen}"
        for bucket, messages in lengths.items()
        for name, length in messages.items()
        if length.seen and name != "cross"
    )
    return hashlib.sha256("\n".join(seen).encode()).hexdigest()[:8] if seen else "none"


@dataclass(frozen=True)
class Head:
    """The head of a packed message. A sender that failed sends zeros.

    Attributes:
        needed: the bytes of the message with its head; 0 if the sender has failed.
        received: ``needed`` of the longest part that the sender has received as an owner, in a message of
            averages; otherwise 0.
        waiting: whether the sender needs the rest of parts before it can make the message.
    """

    needed: int
    received: int = 0
    waiting: bool = False

    def to_bytes(self) -> bytes:
        """The head as 16 bytes."""
        words = (
            self.needed // ALIGNMENT,
            self.received // ALIGNMENT,
            _WAITING if self.waiting else _MESSAGE,
        )
        return _HEAD.pack(*words, _check(words))

    @classmethod
    def read(cls, message: np.ndarray, full: int) -> Head:
        """Reads the head of a packed message.

        Args:
            message: the packed message, shape=(bytes,), uint8.
            full: the most bytes that the message can need.

        Raises:
            PayloadError: no rank can have written the head.
        """
        head = message[:HEAD_BYTES].tobytes()
        if head == _NONE:
            return cls(0)
        *words, check = _HEAD.unpack(head)
        needed, received, state = words
        if check != _check(words) or state not in (_MESSAGE, _WAITING) or needed * ALIGNMENT > full:
            raise PayloadError(
                f"packed message: expected a head with a valid check and at most {full} bytes, got "
                f"{head.hex()}"
            )
        return cls(needed * ALIGNMENT, received * ALIGNMENT, state == _WAITING)


class Places:
    """The places of the payloads and the flags in one message that is not packed.

    Args:
        layout: the layout of one or several messages, one behind the other.
        begin: the offset of the message in the layout, in bytes.
        size: the size of the message, in bytes.
        flags: the offset of the flags in the message, in bytes.

    Attributes:
        size: the size of the message, in bytes.
        full: the bytes of the longest packed message; 0 if there is nothing to send.
    """

    def __init__(self, layout: MessageLayout, begin: int, size: int, flags: int) -> None:
        self._places = [
            (piece.offset - begin, piece.size)
            for piece in layout.pieces
            if begin <= piece.offset < begin + size
        ]
        offsets = np.array([offset for offset, _ in self._places], np.int64)
        self._flag_words = (offsets + FLAGS_OFFSET) // 4
        self._flags = flags
        self.size = size
        self.full = HEAD_BYTES + size if size else 0

    def pack(self, message: np.ndarray, least: int, received: int = 0) -> np.ndarray:
        """Packs a message.

        Args:
            message: the message, shape=(size,), uint8.
            least: the minimum length of the result in bytes; zeros fill the space at the end.
            received: the value of ``received`` in the head.

        Returns:
            The packed message, shape=(bytes,), uint8.
        """
        flags = message.view("<u4")[self._flag_words].tolist()
        parts = [
            message[offset : offset + length_in(word, size)]
            for (offset, size), word in zip(self._places, flags, strict=True)
        ]
        parts.append(message[self._flags :])
        needed = HEAD_BYTES + sum(map(len, parts))
        head = Head(needed, received).to_bytes()
        packed = np.empty(max(needed, least), np.uint8)
        np.concatenate([np.frombuffer(head, np.uint8), *parts], out=packed[:needed])
        packed[needed:] = 0
        return packed

    def unpack(self, packed: np.ndarray, message: np.ndarray) -> None:
        """Puts a packed message's payloads in their places.

        Args:
            packed: the packed message, zeros if the sender has failed; shape=(bytes,), uint8.
            message: the result, shape=(size,), uint8. Bytes outside payloads and flags stay as they are.
                If payloads do not fit, their places get bytes that every decoder rejects, so that the
                decoder's error names the payload.
        """
        if packed[:HEAD_BYTES].tobytes() == _NONE:
            message[:] = 0
            return
        # Slices of memoryviews take less than half the time of NumPy's.
        source, target = packed.data, message.data
        at, end = HEAD_BYTES, len(packed) - (self.size - self._flags)
        for offset, size in self._places:
            length = 0
            if at + HEADER_BYTES <= end:
                length = length_in(_WORD.unpack_from(source, at + FLAGS_OFFSET)[0], size)
            if HEADER_BYTES <= length <= min(size, end - at):
                target[offset : offset + length] = source[at : at + length]
                at += length
            else:
                target[offset : offset + HEADER_BYTES] = _NO_PAYLOAD
                at = end
        target[self._flags :] = source[at : at + self.size - self._flags]


def places(layout: MessageLayout) -> Places:
    """The places in a message that all ranks receive."""
    return Places(layout, 0, layout.size, layout.flags)


def places_by_owner(layout: MessageLayout, owner: MessageLayout) -> list[Places]:
    """The places in each owner's message, in a layout of all owners' messages.

    Args:
        layout: the layout from :meth:`hvd_compress.exchanges.layout.Owners.gathered`.
        owner: the layout of one owner's message.
    """
    begins = range(0, layout.size, owner.size)
    return [Places(layout, begin, owner.size, owner.flags) for begin in begins]


def places_by_section(layout: MessageLayout) -> list[Places]:
    """The places in each rank's section of a message for an ``all_to_all``."""
    begins = accumulate(layout.sections, initial=0)
    return [
        Places(layout, begin, size, size)
        for begin, size in zip(begins, layout.sections, strict=False)
    ]


def _check(words: Sequence[int]) -> int:
    """A checksum like the payload's, but in 32 bits."""
    return sum(word * (2 * i + 1) for i, word in enumerate(words)) & 0xFFFFFFFF
