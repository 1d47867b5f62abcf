"""Plans of buckets, which stay the same between steps, and the batches made from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch

from hvd_compress.codecs import LevelCodec, NoiseKey, PowerSGD
from hvd_compress.engine.batch import Batch
from hvd_compress.engine.cold_start import cold_start
from hvd_compress.engine.comm import Comm, Exchanging
from hvd_compress.engine.executors import Executors
from hvd_compress.engine.owner_steps import OwnerStep
from hvd_compress.engine.residuals import LastExchange
from hvd_compress.engine.slots import Slot
from hvd_compress.exchanges import integer_sum, low_rank
from hvd_compress.exchanges.base import Group
from hvd_compress.exchanges.layout import USED, Member, MessageLayout, OwnedPart, Owners
from hvd_compress.exchanges.packing import Length, describe
from hvd_compress.exchanges.registry import EXCHANGES
from hvd_compress.kernels.batch import Arrays, Entry
from hvd_compress.kernels.cpu_level_batch import CpuLevelBatch, LevelEntry
from hvd_compress.kernels.interface import Batch as NativeBatch

Kept = TypeVar("Kept")

_MOST_PLANS = 256
"""The most plans to keep: with other gradients missing in each step, their number would be unlimited."""

_MOST_BUCKETS = 1024
"""The most buckets whose message lengths are kept, for the same reason."""


@dataclass(frozen=True, eq=False)
class Table:
    """A layout, and the kernels for its pieces.

    Attributes:
        layout: the places of the payloads.
        kernels: the kernels that encode and decode all pieces in one call.
        tail: the bytes behind the payloads if all gradients were used, on the gradients' device.
    """

    layout: MessageLayout
    kernels: NativeBatch
    tail: torch.Tensor


@dataclass(frozen=True)
class Cuts:
    """The parts of a bucket's gradients that ranks own, without empty ones.

    Attributes:
        lengths: the number of elements in each part of each gradient, in the order of the elements.
        by_owner: all parts in the order of their owners: the gradient's position, and the part's number.
        counts: the number of elements in each owner's parts.
    """

    lengths: list[list[int]]
    by_owner: list[tuple[int, int]]
    counts: list[int]


class BucketPlan:
    """The members of a bucket, their exchange, and the tables of the bucket's messages.

    Args:
        cache: the kernels, the ranks and the rest that all plans of a compressor share.
        slots: the gradients' slots, whose routes are of one kind.
        like: a tensor on the gradients' device.

    Attributes:
        cache: the argument of that name.
        members: the bucket's members, for layouts.
        inner: whether the ranks of a host encode gradients with codecs of their own.
        packed: whether messages are packed, because payloads may be shorter than their places.
        deferred: whether only the gradients' device knows what its kernels have found.
        owners: the ranks that divide the gradients; None if ranks do not divide them.
        owned: this rank's part of each gradient; None if ranks do not divide gradients.
        owned_sizes: the number of elements in each of these parts.
        transposed: the rows and columns, by position, of the gradients that are transposed before ranks
            divide them.
        residual_dtypes: the dtype of each gradient's residuals; None without feedback.
        keeps_residuals: whether every gradient has feedback, and the exchange keeps this rank's residuals.
    """

    def __init__(self, cache: BatchCache, slots: Sequence[Slot], like: torch.Tensor) -> None:
        self.cache = cache
        self.slots = slots
        self.group = cache.group
        self.exchange = slots[0].route.exchange
        self.inner = slots[0].route.inner is not None
        self.members = [
            Member(slot.index, slot.shape, slot.route.codec, slot.route.inner) for slot in slots
        ]
        self.packed = any(member.codec.varies for member in self.members)
        self.deferred = cache.kernels.deferred(like) is not None
        self.owners: Owners | None = EXCHANGES[self.exchange].owners(self.group)
        self.owned: list[OwnedPart | None] = [None] * len(slots)
        if self.owners is not None:
            self.owned = [self.owners.owned(member) for member in self.members]
        self.owned_sizes = [part[1] - part[0] if part else 0 for part in self.owned]
        self.transposed = {
            number: matrix
            for number, member in enumerate(self.members if self.owners is not None else ())
            if (matrix := member.shared.transposed) is not None
        }
        feedbacks = [slot.route.feedback for slot in slots]
        self.residual_dtypes: list[torch.dtype | None] = [
            getattr(torch, one.residual_dtype) if one.enabled else None for one in feedbacks
        ]
        self.keeps_residuals = None not in self.residual_dtypes and slots[0].route.residuals
        self._like = like.new_empty(0)
        self._lengths = cache.lengths_of(slots)
        self._kept: dict[str, object] = {}

    @property
    def names(self) -> str:
        """The names of the gradients, for messages."""
        return ", ".join(slot.name for slot in self.slots)

    @cached_property
    def cuts(self) -> Cuts:
        """The parts of the gradients; ranks must divide gradients."""
        owners, lengths, placed = self.owners, [], []
        assert owners is not None
        counts = [0] * owners.size
        for position, member in enumerate(self.members):
            parts = [(*owners.part(member, owner), owner) for owner in range(owners.size)]
            parts = sorted(part for part in parts if part[0] < part[1])
            lengths.append([end - begin for begin, end, _ in parts])
            for number, (begin, end, owner) in enumerate(parts):
                placed.append((owner, position, number))
                counts[owner] += end - begin
        return Cuts(lengths, [(position, number) for _, position, number in sorted(placed)], counts)

    def table(self, name: str, layout: Callable[[], MessageLayout]) -> Table:
        """The table of a message.

        Args:
            name: the message's name among the messages of the exchange.
            layout: makes the message's layout; called only for a new name.
        """
        return self.keep(f"table {name}", lambda: self._table(layout()))

    def _table(self, layout: MessageLayout) -> Table:
        entries = [
            Entry(
                piece.codec,
                piece.shape,
                self.slots[piece.member].route.feedback,
                NoiseKey(self.cache.seed, piece.stream, self.members[piece.member].index),
                piece.offset,
            )
            for piece in layout.pieces
        ]
        kernels = self.cache.kernels.batch(entries, self._arrays(layout), self._like)
        tail = self._like.new_zeros(layout.size - layout.end, dtype=torch.uint8)
        flags = layout.flags - layout.end
        tail[flags : flags + len(self.members)] = USED
        return Table(layout, kernels, tail)

    def keep(self, name: str, make: Callable[[], Kept]) -> Kept:
        """The result of ``make`` for a name; ``make`` is called only for a new name."""
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]  # type: ignore[return-value]

    def length(self, name: str, full: int) -> Length:
        """The length in which ranks send a packed message.

        Args:
            name: the message's name among the messages of the exchange.
            full: the length of the longest possible message in bytes.
        """
        if name not in self._lengths:
            self._lengths[name] = Length(full)
        return self._lengths[name]

    @cached_property
    def level_table(self) -> tuple[integer_sum.LevelLayout, CpuLevelBatch]:
        """The layout of an integer sum's messages, and the kernels for them."""
        made = integer_sum.layout(self.members, self.group.size)
        entries = []
        for piece, member, slot in zip(made.pieces, self.members, self.slots, strict=True):
            assert isinstance(member.codec, LevelCodec)
            noise = NoiseKey(self.cache.seed, self.group.rank, member.index)
            entry = LevelEntry(member.codec, member.shape, slot.route.feedback, noise, *piece)
            entries.append(entry)
        return made, CpuLevelBatch(entries, self.cache.kernels.threads)

    def first_factor(self, position: int) -> torch.Tensor:
        """The right factor of a gradient in the first step: shape=(columns, rank), float32."""

        def make() -> torch.Tensor:
            member = self.members[position]
            assert isinstance(member.codec, PowerSGD)
            rank, seed = member.codec.rank, self.cache.seed
            numbers = low_rank.first(member.shape, rank, seed, member.index)
            return torch.from_numpy(numbers).to(self._like.device)

        return self.keep(f"first factor {position}", make)

    def _arrays(self, layout: MessageLayout) -> Arrays:
        """One array for each member: the member's gradient, or this rank's part of it."""
        if layout.own:
            return Arrays(self.owned_sizes, [(piece.member, 0) for piece in layout.pieces])
        sizes = [member.count for member in self.members]
        return Arrays(sizes, [(piece.member, piece.begin) for piece in layout.pieces])


class BatchCache:
    """Makes the batches of one compressor, and holds what they share.

    Args:
        kernels: the kernels that encode and decode.
        group: the ranks.
        seed: the seed of the noise.
        owner_step: changes averages on the owners of parts; None for no change.
        last: receives the changes of each exchange.

    Attributes:
        kernels, group, seed, owner_step, last: the arguments of these names.
        loss_scale: the loss scale of this step's gradients.
        comm: the collectives among the ranks.
    """

    def __init__(
        self,
        kernels: Executors,
        group: Group,
        seed: int = 0,
        owner_step: OwnerStep | None = None,
        last: LastExchange | None = None,
    ) -> None:
        self.kernels, self.group, self.seed = kernels, group, seed
        self.owner_step, self.last = owner_step, LastExchange() if last is None else last
        self.loss_scale = 1.0
        self.comm = Comm(group)
        self._plans: dict[tuple[object, ...], BucketPlan] = {}
        # A device may have met errors with them, which their kernels explain in a later step.
        self._forgotten: deque[BucketPlan] = deque(maxlen=_MOST_PLANS)
        self._lengths: dict[tuple[object, ...], dict[str, Length]] = {}

    def begin_step(self) -> None:
        """Forgets lengths if there are too many; called before a step's first gradient.

        Lengths are forgotten nowhere else: between steps, all ranks have made the same batches.
        """
        if len(self._lengths) > _MOST_BUCKETS:
            self._lengths.clear()
            self.forget_plans()  # They hold lengths, too.

    def forget_plans(self) -> None:
        """Forgets all plans; called when the routes of gradients change.

        Lengths are kept: they belong to a bucket and its codecs, and a rank may call this method alone.
        """
        self._forgotten.extend(self._plans.values())
        self._plans.clear()

    def lengths(self) -> str:
        """A short hash of the known lengths of the ranks' messages, which ranks compare."""
        return describe(self._lengths)

    def make(
        self,
        slots: Sequence[Slot],
        gradients: Sequence[torch.Tensor],
        used: Sequence[bool] | None = None,
        *,
        encoded: bool = True,
    ) -> tuple[Batch, Exchanging]:
        """Makes the batch of one bucket, and its exchange, which has not begun.

        Args:
            slots: the gradients' slots; all use the same exchange.
            gradients: the same as in :class:`Batch`, all on one device.
            used: the same as in :class:`Batch`.
            encoded: whether gradients are encoded. If not, owners apply the owner step to averages of
                uncompressed gradients (the cold start of an owner step, which only ``two_shot`` has).
        """
        device = gradients[0].device
        key = (device, *(slot.index for slot in slots))
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MOST_PLANS:
                self.forget_plans()
            plan = self._plans[key] = BucketPlan(self, slots, gradients[0])
        batch = Batch(plan, gradients, used, encoded=encoded)
        return batch, self.exchange(batch) if encoded else cold_start(batch, self.comm)

    def exchange(self, batch: Batch) -> Exchanging:
        """The exchange of a batch, which has not begun."""
        return EXCHANGES[batch.plan.exchange].run(batch, self.comm)

    def lengths_of(self, slots: Iterable[Slot]) -> dict[str, Length]:
        """The lengths of a bucket's messages, by name; they outlive the bucket's plan."""
        key = tuple(
            (slot.index, slot.shape, slot.route.exchange, slot.route.codec) for slot in slots
        )
        return self._lengths.setdefault(key, {})
