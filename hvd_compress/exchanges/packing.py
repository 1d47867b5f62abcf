"""Messages whose payloads are shorter than their places, and how long all ranks send them.

A layout (:mod:`hvd_compress.exchanges.layout`) gives every payload the place of the longest payload that
its codec can write. A packed message holds a head, the payloads one directly behind the other, and the
flags::

    head, 16 bytes | payload | payload | ... | flags

The ranks' messages in a collective must have one length, and no rank knows what the others need. So the
ranks remember what all of them have needed in earlier steps (:class:`Length`), which gives the same number
on every rank. A rank that needs more sends the rest in a second collective, which all ranks take part in,
because they all read the heads.
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hvd_compress.codecs import Codec, PayloadError
from hvd_compress.codecs.base import round_up
from hvd_compress.codecs.payload import FLAGS_OFFSET, HEADER_BYTES, length_in
from hvd_compress.exchanges.layout import ALIGNMENT, MessageLayout, Piece

HEAD_BYTES = 16

_HEAD = struct.Struct("<4I")
_MESSAGE, _WAITING = 1, 2
_NONE = bytes(HEAD_BYTES)
_WORD = struct.Struct("<I")
_NO_PAYLOAD = b"\xff" * HEADER_BYTES

_STEPS = 16
"""Steps that a length is chosen from: needs that change a little from step to step change no length."""

_HEADROOM = 16
"""One part in so many is added to the largest need."""

_CLASSES = 16
"""Lengths between a power of two and the next one."""


def packs(codec: Codec, device_type: str) -> bool:
    """Whether a codec's payloads are sent without the space behind them.

    Payloads that a CUDA device has encoded are sent in their places: only the device knows their lengths.
    A processor that reads these, and then the heads of what all ranks have sent, waits twice for the
    device in each exchange, so that a backward pass no longer runs ahead of its collectives.

    Args:
        codec: the codec.
        device_type: where gradients are: PyTorch's name for the type of the device.
    """
    return codec.varies and device_type == "cpu"


class Length:
    """How many bytes the ranks send of one message in the next step.

    All ranks that take part call :meth:`see` with the same numbers, and so get the same length.

    Args:
        full: of the longest message that there can be, in bytes; the length before anything was seen.

    Attributes:
        full: as given.
        bytes: the length.
    """

    def __init__(self, full: int) -> None:
        self.full = full
        self.bytes = full
        self._needed: deque[int] = deque(maxlen=_STEPS)

    def see(self, needed: int) -> None:
        """Notes how many bytes the rank with the longest message needed; 0 where no rank sent one."""
        if needed:
            self._needed.append(needed)
            largest = max(self._needed)
            self.bytes = agreed(largest, self.full)

    @property
    def seen(self) -> list[int]:
        """What the length is chosen from."""
        return list(self._needed)


def agreed(needed: int, full: int) -> int:
    """The length of the next messages, of which the longest has needed so many bytes lately."""
    return min(full, class_of(needed + needed // _HEADROOM))


def class_of(needed: int) -> int:
    """The shortest length for so many bytes: a multiple of 1/16 of a power of two, and of 16 bytes."""
    grain = max(ALIGNMENT, (1 << max(0, needed - 1).bit_length()) // (2 * _CLASSES))
    return round_up(needed, grain)


def describe(lengths: Mapping[tuple[object, ...], Mapping[str, Length]]) -> str:
    """What lengths are chosen from, in a few characters: ranks that have seen the same get the same.

    Args:
        lengths: by bucket, and by the message's name. Those that no rank has sent yet do not count, nor do
            those of some of the ranks.
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
    """What stands in front of a packed message. A sender that failed sends zeros.

    Attributes:
        needed: bytes of the message, its head included; 0 where the sender has failed.
        received: of an owner's averages, ``needed`` of the longest part that it has received; else 0.
        waiting: whether the sender needs the rest of parts before it can make the message.
    """

    needed: int
    received: int = 0
    waiting: bool = False

    def to_bytes(self) -> bytes:
        """The 16 bytes."""
        words = (
            self.needed // ALIGNMENT,
            self.received // ALIGNMENT,
            _WAITING if self.waiting else _MESSAGE,
        )
        return _HEAD.pack(*words, _check(words))

    @classmethod
    def read(cls, message: np.ndarray, full: int) -> Head:
        """Reads what a packed message begins with.

        Args:
            message: shape=(bytes,), uint8.
            full: bytes that it can need at most.

        Raises:
            PayloadError: no rank can have written it.
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
    """Where the payloads and the flags of one message stand when it is not packed.

    Args:
        pieces: in the order of their offsets.
        begin: of the message, in the bytes that the pieces' offsets count.
        flags: where flags begin, bytes from the message's beginning.
        size: of the message, in bytes.

    Attributes:
        size: as given.
        full: bytes of the longest packed message; 0 where there is nothing to send.
    """

    def __init__(self, pieces: Sequence[Piece], begin: int, flags: int, size: int) -> None:
        self._places = [(piece.offset - begin, piece.size) for piece in pieces]
        offsets = np.array([offset for offset, _ in self._places], np.int64)
        self._flag_words = (offsets + FLAGS_OFFSET) // 4
        self._flags = flags
        self.size = size
        self.full = HEAD_BYTES + size if size else 0

    def pack(self, message: np.ndarray, least: int, received: int = 0) -> np.ndarray:
        """Packs a message.

        Args:
            message: shape=(size,), uint8.
            least: bytes of the result, if it does not need more; zeros stand at its end.
            received: for the head.

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
            packed: shape=(bytes,), uint8; zeros where the sender has failed.
            message: shape=(size,), uint8; written over. What is no payload's stays. Where payloads do not
                fit, their places get bytes that no decoder takes: who decodes names the payload.
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
    """Of a message that all ranks get."""
    return Places(layout.pieces, 0, layout.flags, layout.size)


def places_by_owner(layout: MessageLayout, owner: MessageLayout) -> list[Places]:
    """Of each owner's message in a layout of all of them.

    Args:
        layout: as :meth:`hvd_compress.exchanges.layout.Owners.gathered` makes it.
        owner: of one owner's message.
    """
    begins = range(0, layout.size, owner.size)
    return [
        Places(_within(layout, begin, begin + owner.size), begin, owner.flags, owner.size)
        for begin in begins
    ]


def places_by_section(layout: MessageLayout) -> list[Places]:
    """Of each rank's section of a message for an ``all_to_all``."""
    found, begin = [], 0
    for size in layout.sections:
        found.append(Places(_within(layout, begin, begin + size), begin, size, size))
        begin += size
    return found


def _within(layout: MessageLayout, begin: int, end: int) -> list[Piece]:
    return [piece for piece in layout.pieces if begin <= piece.offset < end]


def _check(words: Sequence[int]) -> int:
    """As the payload's checksum, in 32 bits."""
    return sum(word * (2 * i + 1) for i, word in enumerate(words)) & 0xFFFFFFFF
