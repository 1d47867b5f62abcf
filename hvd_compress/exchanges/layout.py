"""Where the payloads of a bucket's gradients stand in its messages.

A bucket is a list of :class:`Member`. A message holds one payload for each of its :class:`Piece`. Behind
the payloads, a byte for each member, its flag, tells whether the sender used the parameter in its backward
pass.
Payloads are multiples of 16 bytes, and so are all offsets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from hvd_compress.codecs import Codec, LevelCodec
from hvd_compress.codecs.base import Shape, round_up
from hvd_compress.exchanges import integer_sum, two_shot
from hvd_compress.exchanges.hosts import Hosts
from hvd_compress.exchanges.shards import Shards, Shared, shared

ALIGNMENT = 16
"""Bytes. Gathers of messages of other lengths are slow on NCCL."""

USED, CHANGED = 1, 2
"""Values of a member's flag, which is 0 of a parameter that the sender has not used: it has used it; it has
changed how gradients travel, and sends zeros in the place of payloads to ask whether all ranks have."""


@dataclass(frozen=True)
class Member:
    """One gradient of a bucket.

    Attributes:
        index: the parameter's number, the tensor's id in the noise.
        shape: the parameter's.
        codec: what the gradient is encoded with.
    """

    index: int
    shape: Shape
    codec: Codec

    @cached_property
    def count(self) -> int:
        """The gradient's elements."""
        return math.prod(self.shape)

    @cached_property
    def shared(self) -> Shared:
        """How ranks share the gradient out."""
        return shared(self.codec, self.shape)


@dataclass(frozen=True)
class Piece:
    """A range of a gradient that is encoded as a tensor of its own.

    Attributes:
        member: the gradient's position in the bucket.
        codec: what encodes it.
        begin: the range's first element, in row-major order, of the transposed matrix where
            :attr:`Member.shared` says so.
        end: one behind its last element.
        shape: of the tensor that is encoded.
        stream: the rank in the noise key.
        offset: of the payload in the message, in bytes.
        size: of the payload, in bytes.
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
    """One message's pieces.

    Attributes:
        pieces: in the order of their offsets.
        flags: where the members' flags begin, in bytes; behind all payloads.
        size: of the message, in bytes.
        sections: of an all_to_all, the bytes for each rank.
        own: this rank's part of every gradient, where arrays hold these and not whole gradients; else None.
    """

    pieces: tuple[Piece, ...]
    flags: int
    size: int
    sections: tuple[int, ...] = ()
    own: tuple[tuple[int, int], ...] | None = None


def whole(members: Sequence[Member], stream: int) -> MessageLayout:
    """Every gradient as one payload.

    Args:
        members: the bucket's.
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
"""A range of a gradient, begin and end; what a unit of its average adds to the sum of all ranks'; and
whether elements are in the order of the transposed matrix."""


@dataclass(frozen=True)
class Owners:
    """Ranks that share every gradient out: each owns a part, and may keep a residual of its average.

    Attributes:
        size: how many there are.
        own: this rank's number among them.
        weight: what one unit of an average adds to the sum of all ranks' gradients.
    """

    size: int
    own: int
    weight: int

    def owned(self, member: Member) -> OwnedPart:
        """What this rank owns of a gradient."""
        return (*self.part(member), self.weight, member.shared.transposed is not None)

    def part(self, member: Member, owner: int | None = None) -> tuple[int, int]:
        """The range [begin, end) of a gradient that an owner, or this rank, owns.

        Args:
            member: the gradient.
            owner: a number among the owners; None is this rank.
        """
        return self._shards(member).of(self.own if owner is None else owner)

    def message(self, members: Sequence[Member], stream: int) -> MessageLayout:
        """What this rank sends of its averages; as long as the longest of the owners' messages."""
        pieces, _ = self._parts(members, self.own, 0, stream)
        longest = max(self._parts(members, owner, 0, 0)[1] for owner in range(self.size))
        return replace(_with_flags(pieces, longest, len(members)), own=self.ranges(members))

    def received(self, members: Sequence[Member]) -> MessageLayout:
        """What each rank has sent to this one as an owner. Noise is not for decoding: streams are 0."""
        pieces, end = self._parts(members, self.own, 0, 0)
        return MessageLayout(tuple(pieces), end, end, own=self.ranges(members))

    def ranges(self, members: Sequence[Member]) -> tuple[tuple[int, int], ...]:
        """This rank's part [begin, end) of every gradient."""
        return tuple(self.part(member) for member in members)

    def gathered(self, members: Sequence[Member], stride: int) -> MessageLayout:
        """All owners' messages, ``stride`` bytes apart. Noise is not for decoding: streams are 0."""
        pieces: list[Piece] = []
        for owner in range(self.size):
            pieces += self._parts(members, owner, owner * stride, 0)[0]
        return MessageLayout(tuple(pieces), 0, self.size * stride)

    def _parts(
        self, members: Sequence[Member], owner: int, offset: int, stream: int
    ) -> tuple[list[Piece], int]:
        """One owner's pieces from an offset on, and where they end."""
        pieces = []
        for position, member in enumerate(members):
            begin, end = self.part(member, owner)
            if begin < end:
                shape, codec = self._shards(member).shape(end - begin), member.shared.codec
                size = codec.payload_bytes(shape)
                pieces.append(Piece(position, codec, begin, end, shape, stream, offset, size))
                offset += size
        return pieces, offset

    def _shards(self, member: Member) -> Shards:
        return member.shared.shards(self.size, member.index)


def shards(members: Sequence[Member], rank: int, size: int) -> MessageLayout:
    """Every rank's part of every gradient, by owner: the first message of two shots, without flags."""
    owners = Owners(size, rank, size)
    pieces: list[Piece] = []
    ends = [0]
    for owner in range(size):
        stream = two_shot.first_stream(rank, owner, size)
        parts, end = owners._parts(members, owner, ends[-1], stream)
        pieces += parts
        ends.append(end)
    sections = tuple(end - begin for begin, end in pairwise(ends))
    return MessageLayout(tuple(pieces), ends[-1], ends[-1], sections)


def own_stream(rank: int, size: int) -> int:
    """The rank in the noise key of an owner's averages in two shots."""
    return two_shot.second_stream(rank, size)


def host_owners(rank: int, hosts: Hosts) -> Owners:
    """Who owns what on a rank's host."""
    return Owners(hosts.local, hosts.local_rank(rank), hosts.local)


@dataclass(frozen=True)
class LevelPiece:
    """A gradient as levels that ranks add.

    Attributes:
        member: the gradient's position in the bucket.
        bits: of a lane.
        norm_offset: of its norms in the message of norms, in float32 numbers.
        norms: how many.
        word_offset: of its levels in the message of levels, in words of 4 bytes.
        words: how many.
    """

    member: int
    bits: int
    norm_offset: int
    norms: int
    word_offset: int
    words: int


@dataclass(frozen=True)
class LevelLayout:
    """A bucket's two messages in an integer sum.

    Attributes:
        pieces: one a gradient.
        norms: float32 numbers in the message of norms: behind the norms, a flag for each gradient.
        words: in the message of levels: behind the levels, one that counts the ranks, and a check.
    """

    pieces: tuple[LevelPiece, ...]
    norms: int
    words: int


def levels(members: Sequence[Member], size: int) -> LevelLayout:
    """Every gradient's norms and levels, for sums of ``size`` ranks."""
    pieces = []
    norm_offset = word_offset = 0
    for position, member in enumerate(members):
        codec = member.codec
        assert isinstance(codec, LevelCodec)
        bits = integer_sum.bits_of(codec, size)
        norms, words = codec.layout(member.shape).scales, codec.level_words(member.shape, bits)
        pieces.append(LevelPiece(position, bits, norm_offset, norms, word_offset, words))
        norm_offset += norms
        word_offset += words
    words = word_offset + integer_sum.EXTRA_WORDS
    return LevelLayout(tuple(pieces), norm_offset + len(members), words)


def _with_flags(pieces: Sequence[Piece], end: int, members: int) -> MessageLayout:
    return MessageLayout(tuple(pieces), end, end + round_up(members, ALIGNMENT))
