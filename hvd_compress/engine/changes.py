"""The changes of residuals in a step: kept if the step is accepted, undone if it is dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from hvd_compress.engine.slots import Holder, Owned, Slot
from hvd_compress.exchanges.layout import OwnedPart
from hvd_compress.ranks.errors import ExchangeError


class Changes:
    """The changes of some gradients' residuals in one step.

    A step is dropped if some rank sent an Inf or a NaN: then no residual may count the step's gradients as
    sent. The script may also drop the step after it was accepted; see :meth:`take_back`.

    Attributes:
        accepted: whether the step was accepted, and not taken back.
    """

    def __init__(self) -> None:
        self._moved: list[Holder] = []
        self._if_accepted: list[Callable[[], None]] = []
        self._if_dropped: list[Callable[[], None]] = []
        self._on_device = False
        self.accepted = False

    def move(self, holder: Holder) -> None:
        """Makes ``holder.next_residual`` the residual when the step is accepted."""
        self._moved.append(holder)

    def when(self, accepted: Callable[[], None], dropped: Callable[[], None]) -> None:
        """Registers two functions; one is called when it is known whether the step is accepted.

        Args:
            accepted: makes a change.
            dropped: restores the state before the change, whether or not the change has been made.
        """
        self._if_accepted.append(accepted)
        self._if_dropped.append(dropped)

    def release(self, slot: Slot, gradient: torch.Tensor, loss_scale: float) -> None:
        """Adds an earlier codec's residual to the gradient, and discards it if the step is accepted."""
        if slot.residual is not None:
            rest = slot.residual.to(gradient.device) * (loss_scale / slot.residual_scale)
            self._add(rest, slot, gradient, slot)

    def release_owned(self, slot: Slot, gradient: torch.Tensor, loss_scale: float) -> None:
        """Does the same with the residual of the part that this rank owns, with the part's weight."""
        owned = slot.owned
        if owned is not None and owned.residual is not None:
            factor = owned.weight * loss_scale / owned.residual_scale
            rest = owned.spread(slot.shape, factor).to(gradient.device)
            self._add(rest, slot, gradient, owned)

    def own(
        self,
        slot: Slot,
        gradient: torch.Tensor,
        part: OwnedPart | None,
        loss_scale: float,
        *,
        keep: bool,
    ) -> None:
        """Makes ``slot.owned`` the record of the part that this rank owns in an exchange.

        Args:
            slot: the parameter's slot.
            gradient: the gradient, to which the former record's residual is added unless it is kept.
            part: the part that this rank owns; None if the exchange has no owners.
            loss_scale: the loss scale of the gradient.
            keep: whether to keep the former record's residual if its part is the same.
        """
        before = slot.owned
        if before is None and part is None:
            return
        if before is not None and before.part == part:
            if not keep:
                self.release_owned(slot, gradient, loss_scale)
            return
        self.release_owned(slot, gradient, loss_scale)
        slot.owned = None if part is None else Owned(*part)

        def restore() -> None:
            slot.owned = before

        self.when(lambda: None, restore)

    def settle(self, dropped: bool | torch.Tensor) -> None:
        """Accepts the changes, or undoes them.

        Args:
            dropped: whether the step is dropped; or a word on the residuals' device, not 0 if it is.
        """
        if isinstance(dropped, torch.Tensor):
            for holder in self._moved:
                holder.accept(dropped)
            # Objects of the host: rare enough to wait for the device.
            if self._if_accepted:
                self._call(bool(dropped.item()))
            self.accepted = self._on_device = True
            return
        if not dropped:
            for holder in self._moved:
                holder.accept()
        self._call(dropped)
        self.accepted = not dropped

    def withdraw(self) -> None:
        """Leaves residuals as they were; those released to a gradient are sent with it uncompressed."""
        self._moved.clear()
        self.settle(False)

    def counts(self) -> bool:
        """Whether residuals are known to count gradients as sent; does not wait for a device."""
        return self.accepted and bool(self._moved) and not self._on_device

    def take_back(self) -> None:
        """Undoes the changes if they were accepted; no gradient may have been encoded since then."""
        if self.accepted:
            for holder in self._moved:
                holder.take_back()
            self._call(True)
            self.accepted = False

    def _call(self, dropped: bool) -> None:
        for call in self._if_dropped if dropped else self._if_accepted:
            call()

    def _add(self, rest: torch.Tensor, slot: Slot, gradient: torch.Tensor, holder: Holder) -> None:
        gradient.add_(rest.view(slot.shape).to(gradient.dtype))
        residual, scale = holder.residual, holder.residual_scale

        def restore() -> None:
            holder.residual, holder.residual_scale = residual, scale

        self.when(holder.forget, restore)


class LastExchange:
    """The changes of the last exchange; :meth:`take_back` can undo them until the next exchange begins."""

    def __init__(self) -> None:
        self._changes: list[Changes] = []
        self._replaced = False

    def __iter__(self) -> Iterator[Changes]:
        return iter(self._changes)

    def begin(self) -> None:
        """Forgets the changes of the exchange before; called before an exchange's first gradient."""
        self._changes.clear()
        self._replaced = False

    def changes(self) -> Changes:
        """Makes a record of changes in the exchange that has begun last."""
        self._changes.append(Changes())
        return self._changes[-1]

    def replace(self) -> None:
        """Records that other residuals replace those of the last exchange."""
        self._replaced |= any(one.accepted for one in self._changes)
        self._changes.clear()

    def take_back(self) -> None:
        """Undoes the last exchange; does nothing if none was accepted, or if it was already undone.

        Raises:
            ExchangeError: residuals have been replaced since the exchange.
        """
        if self._replaced:
            raise ExchangeError(
                "drop_step: expected residuals as the last exchange left them, got others by "
                "load_state_dict(), load_resized() or rebind(): call drop_step() before these"
            )
        for changes in self._changes:
            changes.take_back()
