"""What a step does to residuals: counted when the step is accepted, undone when it is not."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hvd_compress.engine.slots import Holder, Owned, Slot
from hvd_compress.exchanges.layout import OwnedPart


class Changes:
    """The changes of some gradients' residuals in one step.

    A step is dropped when some rank sent an Inf or a NaN: then no residual may count its gradients as sent.
    """

    def __init__(self) -> None:
        self._moved: list[Holder] = []
        self._if_accepted: list[Callable[[], None]] = []
        self._if_not: list[Callable[[], None]] = []

    def move(self, holder: Holder) -> None:
        """Has ``holder.next_residual`` be the residual once the step is accepted."""
        self._moved.append(holder)

    def when(self, accepted: Callable[[], None], otherwise: Callable[[], None]) -> None:
        """Calls one of the two once it is known whether the step is accepted."""
        self._if_accepted.append(accepted)
        self._if_not.append(otherwise)

    def release(self, slot: Slot, gradient: torch.Tensor, loss_scale: float) -> None:
        """Adds what an earlier codec left unsent to the gradient, and forgets it once that is sent."""
        if slot.residual is not None:
            rest = slot.residual.to(gradient.device) * (loss_scale / slot.residual_scale)
            self._add(rest, slot, gradient, slot)

    def release_owned(self, slot: Slot, gradient: torch.Tensor, loss_scale: float) -> None:
        """The same for what this rank has added up for all ranks: now it is this rank's to send."""
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
        """Has ``slot.owned`` be the record of an exchange.

        Args:
            slot: of the parameter.
            gradient: gets what was added up for another exchange.
            part: what this rank owns; None where the exchange has no owners.
            loss_scale: of the gradient.
            keep: whether what was added up and not sent stays with the record; if not, it goes with the
                gradient.
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
            dropped: whether the step does not count; or a word of the residuals' device, not 0 if so.
        """
        if isinstance(dropped, torch.Tensor):
            for holder in self._moved:
                holder.accept(dropped)
            # Objects of the host: rare enough to wait for the device.
            if self._if_accepted:
                self._call(bool(dropped.item()))
            return
        if not dropped:
            for holder in self._moved:
                holder.accept()
        self._call(dropped)

    def withdraw(self) -> None:
        """Leaves residuals as they were; what was released to a gradient travels with it uncompressed."""
        self._call(False)

    def _call(self, dropped: bool) -> None:
        for call in self._if_not if dropped else self._if_accepted:
            call()

    def _add(self, rest: torch.Tensor, slot: Slot, gradient: torch.Tensor, holder: Holder) -> None:
        gradient.add_(rest.view(slot.shape).to(gradient.dtype))
        self.when(holder.forget, lambda: None)
