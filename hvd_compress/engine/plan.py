"""A bucket: its plan, which stays the same between steps, and its residuals in one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import torch

from hvd_compress.codecs import NoiseKey, PowerSGD
from hvd_compress.engine.executors import Columns, Executors
from hvd_compress.engine.owner_steps import OwnerStep
from hvd_compress.engine.parameters import Slot
from hvd_compress.engine.residuals import Factor, FixedColumns, Holder, LastExchange, Pair
from hvd_compress.exchanges import low_rank
from hvd_compress.exchanges.comm import Group
from hvd_compress.exchanges.layout import USED, Member, MessageLayout, OwnedPart, Owners
from hvd_compress.exchanges.packing import Length
from hvd_compress.exchanges.registry import EXCHANGES
from hvd_compress.kernels.batch import Arrays, Batch, Entry
from hvd_compress.kernels.cpu_arrays import FixedArrays

Value = TypeVar("Value")


@dataclass(frozen=True, eq=False)
class Table:
    """A layout, and the kernels for its pieces.

    Attributes:
        layout: the places of the payloads.
        kernels: the kernels that encode and decode all pieces in one call.
        tail: the bytes behind the payloads if all gradients were used, on the gradients' device.
    """

    layout: MessageLayout
    kernels: Batch
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


@dataclass(eq=False)
class Common:
    """The kernels, the ranks and the settings that all plans of one compressor share.

    Attributes:
        kernels: the kernels that encode and decode.
        group: the ranks.
        seed: the seed of the noise.
        owner_step: changes averages on the owners of parts; None for no change.
        last: receives the changes of each exchange.
        loss_scale: the loss scale of this step's gradients.
    """

    kernels: Executors
    group: Group
    seed: int = 0
    owner_step: OwnerStep | None = None
    last: LastExchange = field(default_factory=LastExchange)
    loss_scale: float = 1.0


class BucketPlan:
    """The members of a bucket, their exchange, and the tables of the bucket's messages.

    Args:
        common: the settings that all plans of a compressor share.
        slots: the gradients' slots, whose routes are of one kind.
        like: a tensor on the gradients' device.
        lengths: the lengths of the bucket's packed messages, by name, which outlive the plan.

    Attributes:
        common: the argument of that name.
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

    def __init__(
        self, common: Common, slots: Sequence[Slot], like: torch.Tensor, lengths: dict[str, Length]
    ) -> None:
        self.common = common
        self.slots = slots
        self.group = common.group
        self.exchange = slots[0].route.exchange
        self.inner = slots[0].route.inner is not None
        self.members = [
            Member(slot.index, slot.shape, slot.route.codec, slot.route.inner) for slot in slots
        ]
        self.packed = any(member.codec.varies for member in self.members)
        self.deferred = common.kernels.deferred(like) is not None
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
        self._lengths = lengths
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
                NoiseKey(self.common.seed, piece.stream, self.members[piece.member].index),
                piece.offset,
            )
            for piece in layout.pieces
        ]
        kernels = self.common.kernels.batch(entries, self._arrays(layout), self._like)
        tail = self._like.new_zeros(layout.size - layout.end, dtype=torch.uint8)
        flags = layout.flags - layout.end
        tail[flags : flags + len(self.members)] = USED
        return Table(layout, kernels, tail)

    def keep(self, name: str, make: Callable[[], Value]) -> Value:
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

    def first_factor(self, position: int) -> torch.Tensor:
        """The right factor of a gradient in the first step: shape=(columns, rank), float32."""

        def make() -> torch.Tensor:
            member = self.members[position]
            assert isinstance(member.codec, PowerSGD)
            rank, seed = member.codec.rank, self.common.seed
            numbers = low_rank.first(member.shape, rank, seed, member.index)
            return torch.from_numpy(numbers).to(self._like.device)

        return self.keep(f"first factor {position}", make)

    def _arrays(self, layout: MessageLayout) -> Arrays:
        """One array for each member: the member's gradient, or this rank's part of it."""
        if layout.own:
            return Arrays(self.owned_sizes, [(piece.member, 0) for piece in layout.pieces])
        sizes = [member.count for member in self.members]
        return Arrays(sizes, [(piece.member, piece.begin) for piece in layout.pieces])


class BucketResiduals:
    """Takes up the residuals of a bucket's gradients, and accepts or undoes their changes.

    Residuals that neither the exchange nor the codecs use are added to the gradients at once.

    Args:
        plan: the plan of the bucket.
        gradients: the gradients of the :class:`~hvd_compress.engine.batch.Batch`.
        unused: the positions of the gradients whose parameters this rank's backward pass did not reach.
        encoded: whether anything is encoded; if not, all residuals are added to the gradients.

    Attributes:
        changes: the record of each gradient's changes.
        averages: the residuals of the parts that this rank owns, and the arrays for the next ones; empty if
            ranks do not divide gradients.
    """

    def __init__(
        self,
        plan: BucketPlan,
        gradients: Sequence[torch.Tensor],
        unused: Sequence[int],
        *,
        encoded: bool,
    ) -> None:
        self._plan, self._gradients = plan, gradients
        self._unused, self._encoded = unused, encoded
        # One record for all used gradients, whose changes are kept or undone together.
        self.changes = [plan.common.last.changes()] * len(gradients)
        for position in unused:
            self.changes[position] = plan.common.last.changes()
        self._taken_up: list[Columns] = []
        # Here, and not between the collectives: memory belongs to the stream that it is made in.
        self.averages: Columns = (), ()
        owned = [slot.owned for slot in plan.slots if slot.owned is not None]
        if plan.keeps_residuals and encoded:
            if plan.owners is None and not owned:
                return
            again = len(owned) == len(plan.slots) and self._again("averages", owned)
            if again:
                self.averages = self._take_up("averages", owned, again)
                return
        self._release(plan.common.loss_scale)
        if plan.owners is not None:
            owned = [slot.owned for slot in plan.slots if slot.owned is not None]
            self.averages = self._take_up("averages", owned)

    def take_up(self) -> Columns:
        """The slots' residuals, and the arrays for the next ones; None where there is no feedback."""
        columns = self._take_up("gradients", self._plan.slots)
        self._compare(self._gradients, columns[0])
        return columns

    def beside(self, averages: Sequence[torch.Tensor]) -> Columns:
        """Returns :attr:`averages`, the residuals to encode the averages of owned parts with."""
        self._compare(averages, self.averages[0])
        return self.averages

    def take_up_factors(self, ranks: Sequence[int]) -> list[Pair]:
        """The slots' right factors, and the arrays for the next ones.

        Args:
            ranks: the number of columns of each gradient's factor.
        """
        pairs = [self._take_up_factor(*one) for one in enumerate(ranks)]
        self._taken_up.append(([before for before, _ in pairs], [after for _, after in pairs]))
        return pairs

    def settle(self, dropped: bool | torch.Tensor, used: Sequence[bool]) -> None:
        """Accepts the next residuals, or undoes all changes.

        Args:
            dropped: whether the step is dropped; or a word on the gradients' device that is not 0 if it is.
            used: whether some rank used each parameter; the other parameters' residuals stay.
        """
        if isinstance(dropped, torch.Tensor) and self._taken_up:
            # Of parameters that no rank used, too: their next residuals are discarded.
            self._plan.common.kernels.restore(self._taken_up, dropped)
        for changes, one in dict(zip(self.changes, used, strict=True)).items():
            changes.settle(dropped if one else True)

    def withdraw(self) -> None:
        """Leaves residuals as they were; called instead of :meth:`settle` if nothing was sent."""
        for changes in dict.fromkeys(self.changes):
            changes.withdraw()

    def _compare(
        self, values: Sequence[torch.Tensor], residuals: Sequence[torch.Tensor | None]
    ) -> None:
        names = [slot.name for slot in self._plan.slots]
        self._plan.common.last.stale.compare(names, values, residuals)

    def _take_up_factor(self, position: int, rank: int) -> Pair:
        slot, changes = self._plan.slots[position], self.changes[position]
        if slot.factor is None or slot.factor.rank != rank:
            factor = Factor(rank, residual=self._plan.first_factor(position).clone())
            changes.assign(slot, factor=factor)
            slot.factor = factor
        changes.moved.append(slot.factor)
        return slot.factor.take_up(1.0, self._gradients[0].device, self._plan.common.kernels.order)

    def _release(self, scale: float) -> None:
        plan = self._plan
        keeps = plan.slots[0].route.residuals
        for position, slot in enumerate(plan.slots):
            gradient, changes = self._gradients[position], self.changes[position]
            enabled = self._encoded and plan.residual_dtypes[position] is not None
            if plan.owners is not None or slot.owned is not None:
                changes.own(slot, gradient, plan.owned[position], scale, keep=enabled)
            if slot.residual is not None and not (enabled and keeps):
                changes.release(slot, gradient, scale)

    def _again(self, role: str, holders: Sequence[Holder]) -> FixedColumns | None:
        """The columns of the last exchange, if it had these residuals for the same purpose."""
        return self._plan.common.last.columns_again(
            (self._plan, role), holders, self._plan.common.loss_scale
        )

    def _take_up(
        self, role: str, holders: Sequence[Holder], columns: FixedColumns | None = None
    ) -> FixedColumns:
        """Residuals of gradients or of averages: ``columns``, or those of the last exchange, or others."""
        dtypes = self._plan.residual_dtypes if self._encoded else [None] * len(holders)
        if columns is None and self._encoded:
            columns = self._again(role, holders)
        if columns is None:
            common, device = self._plan.common, self._gradients[0].device
            pairs = [
                (None, None)
                if dtype is None
                else holder.take_up(common.loss_scale, device, common.kernels.order, dtype)
                for holder, dtype in zip(holders, dtypes, strict=True)
            ]
            columns = (
                FixedArrays(before for before, _ in pairs),
                FixedArrays(after for _, after in pairs),
            )
        if not self._unused and None not in dtypes:
            self.changes[0].moved += holders
        else:
            for changes, holder, dtype in zip(self.changes, holders, dtypes, strict=True):
                if dtype is not None:
                    changes.moved.append(holder)
        if any(dtypes):
            self._plan.common.last.columns[self._plan, role] = columns
            self._taken_up.append(columns)
        return columns
