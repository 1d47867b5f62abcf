"""What the batches of a bucket have in common from step to step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from hvd_compress.codecs import LevelCodec, NoiseKey
from hvd_compress.engine.encode_context import EncodeContext
from hvd_compress.engine.slots import Slot
from hvd_compress.exchanges.layout import LevelLayout, Member, MessageLayout, OwnedPart, Owners
from hvd_compress.exchanges.packing import Length, packs
from hvd_compress.exchanges.registry import EXCHANGES, Group
from hvd_compress.kernels.batch import Arrays, Entry
from hvd_compress.kernels.cpu_level_batch import CpuLevelBatch, LevelEntry
from hvd_compress.kernels.interface import Batch as NativeBatch

Kept = TypeVar("Kept")


@dataclass(frozen=True, eq=False)
class Table:
    """A layout, and the kernels for its pieces.

    Attributes:
        layout: where payloads stand.
        kernels: encode and decode all pieces in one call.
    """

    layout: MessageLayout
    kernels: NativeBatch


class BucketPlan:
    """The members of a bucket, by what exchange they travel, and the tables of its messages.

    Args:
        encoder: what this rank encodes with.
        slots: the gradients' parameters; all take the same exchange.
        group: the ranks.
        like: a tensor on the gradients' device.
        lengths: of the bucket's packed messages, by name; they outlive the plan.

    Attributes:
        members: the same for layouts.
        packed: whether messages are packed, as payloads may be shorter than their places.
        owners: how ranks share the gradients out; None where they do not.
        owned: of each gradient, what this rank owns; None where ranks do not share them out.
        owned_sizes: elements of these parts.
        matrices: of each gradient that is transposed before it is shared out, its rows and columns; None
            of all others.
    """

    def __init__(
        self,
        encoder: EncodeContext,
        slots: Sequence[Slot],
        group: Group,
        like: torch.Tensor,
        lengths: dict[str, Length],
    ) -> None:
        self.slots = slots
        self.group = group
        self.exchange = slots[0].route.exchange
        self.members = [Member(slot.index, slot.shape, slot.route.codec) for slot in slots]
        self.packed = any(packs(member.codec, like.device.type) for member in self.members)
        self.owners: Owners | None = EXCHANGES[self.exchange].owners(group)
        self.owned: list[OwnedPart | None] = [None] * len(slots)
        if self.owners is not None:
            self.owned = [self.owners.owned(member) for member in self.members]
        self.owned_sizes = [part[1] - part[0] if part else 0 for part in self.owned]
        self.matrices = [
            None if self.owners is None else member.shared.transposed for member in self.members
        ]
        self._encoder = encoder
        self._like = like.new_empty(0)
        self._lengths = lengths
        self._kept: dict[str, object] = {}
        self._tables: dict[str, Table] = {}
        self._levels: tuple[LevelLayout, CpuLevelBatch] | None = None

    def table(self, name: str, layout: Callable[[], MessageLayout]) -> Table:
        """The table of a message.

        Args:
            name: the message's, among those of the exchange.
            layout: makes its layout, when it is asked for the first time.
        """
        if name not in self._tables:
            made = layout()
            entries = [
                Entry(
                    piece.codec,
                    piece.shape,
                    self.slots[piece.member].route.feedback,
                    NoiseKey(self._encoder.seed, piece.stream, self.members[piece.member].index),
                    piece.offset,
                )
                for piece in made.pieces
            ]
            arrays = self._arrays(made)
            self._tables[name] = Table(
                made, self._encoder.kernels.batch(entries, arrays, self._like)
            )
        return self._tables[name]

    def keep(self, name: str, make: Callable[[], Kept]) -> Kept:
        """What ``make`` returned when it was called for that name, the first time that it was asked for."""
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]  # type: ignore[return-value]

    def length(self, name: str, full: int) -> Length:
        """How long ranks send a packed message.

        Args:
            name: the message's, among those of the exchange.
            full: bytes of the longest that there can be.
        """
        if name not in self._lengths:
            self._lengths[name] = Length(full)
        return self._lengths[name]

    def level_table(self, layout: Callable[[], LevelLayout]) -> tuple[LevelLayout, CpuLevelBatch]:
        """The layout of an integer sum's messages, and the kernels for them; as for :meth:`table`."""
        if self._levels is None:
            made = layout()
            entries = []
            for piece, member, slot in zip(made.pieces, self.members, self.slots, strict=True):
                assert isinstance(member.codec, LevelCodec)
                entry = LevelEntry(
                    member.codec,
                    member.shape,
                    slot.route.feedback,
                    NoiseKey(self._encoder.seed, self._encoder.rank, member.index),
                    piece.bits,
                    piece.norm_offset,
                    piece.word_offset,
                )
                entries.append(entry)
            self._levels = made, CpuLevelBatch(entries, self._encoder.kernels.threads)
        return self._levels

    def _arrays(self, layout: MessageLayout) -> Arrays:
        """One for each member: its gradient, or what this rank owns of it."""
        if layout.own is None:
            sizes = [member.count for member in self.members]
            return Arrays(sizes, [(piece.member, piece.begin) for piece in layout.pieces])
        sizes = [end - begin for begin, end in layout.own]
        return Arrays(sizes, [(piece.member, 0) for piece in layout.pieces])
