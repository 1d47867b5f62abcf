"""The places of a bucket's payloads in its messages.

A bucket is a list of :class:`Member`. A message holds one payload for each :class:`Piece`, and behind the
payloads one byte for each member, its flag, which tells whether the sender used the parameter in its
backward pass. The sizes and offsets of payloads are multiples of 16 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from hvd_compress.codecs import Codec
from hvd_compress.codecs.base import Shape, round_up
from hvd_compress.exchanges.shards import Shards, Shared, shared

ALIGNMENT = 16
"""Message lengths are multiples of this number of bytes: gathers of other lengths are slow with NCCL."""

USED = 1
"""The value of a member's flag if the sender used the parameter; otherwise, the flag is 0."""


@dataclass(frozen=True)
class Member:
    """One gradient of a bucket.

    Attributes:
        index: the parameter's number, which is the tensor's id in the noise.
        shape: the parameter's shape.
        codec: the codec that encodes the gradient.
        inner: the codec that encodes it within a host, in a hierarchical exchange; None without one.
    """

    index: int
    shape: Shape
    codec: Codec
    inner: Codec | None = None

    @cached_property
    def count(self) -> int:
        """The number of elements in the gradient."""
        return math.prod(self.shape)

    @cached_property
    def shared(self) -> Shared:
        """The division of the gradient among ranks."""
        return shared(self.codec, self.shape)


@dataclass(frozen=True)
class Piece:
    """A range of a gradient that is encoded as a separate tensor.

    Attributes:
        member: the gradient's position in the bucket.
        codec: the codec that encodes the range.
        begin: the first element of the range in row-major order, in the transposed matrix if
            :attr:`Member.shared` transposes the gradient.
        end: the element behind the last one of the range.
        shape: the shape of the tensor that is encoded.
        stream: the rank in the noise key.
        offset: the offset of the payload in the message, in bytes.
        size: the size of the payload, in bytes.
    """

    member: int
    codec: Codec
    begin: int
    end: int
    shape: Shape
    stream: int
    offset: int
    size: int


@dataclass(frozen=True)
class MessageLayout:
    """The pieces of one message.

    Attributes:
        pieces: the pieces in the order of their offsets.
        flags: the offset of the members' flags in bytes, behind all payloads.
        size: the size of the message, in bytes.
        sections: the bytes for each rank in an all_to_all; otherwise empty.
        own: whether arrays hold this rank's parts of gradients, and not whole gradients.
    """

    pieces: tuple[Piece, ...]
    flags: int
    size: int
    sections: tuple[int, ...] = ()
    own: bool = False

    @cached_property
    def end(self) -> int:
        """The end of the last payload, in bytes."""
        return self.pieces[-1].offset + self.pieces[-1].size if self.pieces else 0

    @cached_property
    def elements(self) -> int:
        """The number of elements in all pieces."""
        return sum(piece.end - piece.begin for piece in self.pieces)


def whole(members: Sequence[Member], stream: int) -> MessageLayout:
    """The layout of a message with one payload for every gradient.

    Args:
        members: the members of the bucket.
        stream: the rank in the noise keys.
    """
    pieces: list[Piece] = []
    offset = 0
    for position, member in enumerate(members):
        size = member.codec.payload_bytes(member.shape)
        pieces.append(
            Piece(position, member.codec, 0, member.count, member.shape, stream, offset, size)
        )
        offset += size
    return _with_flags(pieces, offset, len(members))


OwnedPart = tuple[int, int, int, bool]
"""A range of a gradient, begin and end; the amount that a unit of the range's average adds to the sum of
all ranks' gradients; and whether elements are in the order of the transposed matrix."""


@dataclass(frozen=True)
class Owners:
    """The ranks that divide every gradient: each owns a part, and may keep a residual of its average.

    Attributes:
        size: the number of owners.
        own: this rank's number among the owners.
        weight: the amount that one unit of an average adds to the sum of all ranks' gradients.
    """

    size: int
    own: int
    weight: int

    def owned(self, member: Member) -> OwnedPart:
        """The part of a gradient that this rank owns."""
        return (*self.part(member), self.weight, member.shared.transposed is not None)

    def part(self, member: Member, owner: int | None = None) -> tuple[int, int]:
        """The range [begin, end) of a gradient that an owner owns.

        Args:
            member: the gradient.
            owner: the owner's number; None means this rank.
        """
        return self._shards(member).of(self.own if owner is None else owner)

    def sections(
        self, members: Sequence[Member], stream: Callable[[int], int], *, inner: bool = False
    ) -> MessageLayout:
        """The layout of a message with every part of every gradient, by owner, without flags.

        Args:
            members: the members of the bucket.
            stream: returns the rank in the noise keys of an owner's parts.
            inner: whether parts are encoded by :attr:`Member.inner`.
        """
        pieces: list[Piece] = []
        ends = [0]
        for owner in range(self.size):
            parts, end = self._parts(members, owner, ends[-1], stream(owner), inner)
            pieces += parts
            ends.append(end)
        sections = tuple(end - begin for begin, end in pairwise(ends))
        return MessageLayout(tuple(pieces), ends[-1], ends[-1], sections)

    def message(self, members: Sequence[Member], stream: int) -> MessageLayout:
        """The layout of this rank's message of averages, as long as the longest owner's message."""
        pieces, _ = self._parts(members, self.own, 0, stream)
        longest = max(self._parts(members, owner, 0, 0)[1] for owner in range(self.size))
        return replace(_with_flags(pieces, longest, len(members)), own=True)

    def received(
        self, members: Sequence[Member], *, inner: bool = False, stream: int = 0
    ) -> MessageLayout:
        """The layout of each message that this rank receives as an owner, as :meth:`sections`.

        Args:
            members: the members of the bucket.
            inner: whether parts are encoded by :attr:`Member.inner`.
            stream: the rank in the noise keys, for a message of averages of the same layout; decoding needs
                no noise.
        """
        pieces, end = self._parts(members, self.own, 0, stream, inner)
        return MessageLayout(tuple(pieces), end, end, own=True)

    def gathered(self, members: Sequence[Member], stride: int) -> MessageLayout:
        """The layout of all owners' messages, ``stride`` bytes apart.

        Decoding needs no noise: streams are 0.
        """
        pieces: list[Piece] = []
        for owner in range(self.size):
            pieces += self._parts(members, owner, owner * stride, 0)[0]
        return MessageLayout(tuple(pieces), 0, self.size * stride)

    def _parts(
        self,
        members: Sequence[Member],
        owner: int,
        offset: int,
        stream: int,
        inner: bool = False,
    ) -> tuple[list[Piece], int]:
        """One owner's pieces from an offset on, and the offset of their end."""
        pieces = []
        for position, member in enumerate(members):
            begin, end = self.part(member, owner)
            if begin < end:
                shape = self._shards(member).shape(end - begin)
                codec = member.inner if inner and member.inner else member.shared.codec
                size = codec.payload_bytes(shape)
                pieces.append(Piece(position, codec, begin, end, shape, stream, offset, size))
                offset += size
        return pieces, offset

    def _shards(self, member: Member) -> Shards:
        return member.shared.shards(self.size, member.index)


def _with_flags(pieces: Sequence[Piece], end: int, members: int) -> MessageLayout:
    return MessageLayout(tuple(pieces), end, end + round_up(members, ALIGNMENT))
