"""Residuals, and their changes in a step: kept if the step is accepted, undone if it is dropped."""

from __future__ import annotations

import copy
import math
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch

from hvd_compress.codecs.base import Shape, as_matrix
from hvd_compress.engine.executors import HostWord
from hvd_compress.exchanges.layout import OwnedPart
from hvd_compress.kernels.cpu_arrays import FixedArrays
from hvd_compress.ranks.errors import ExchangeError

Pair = tuple[torch.Tensor, torch.Tensor]
"""A residual, and the array for the next one."""

FixedColumns = tuple[FixedArrays, FixedArrays]
"""Columns of residuals (:data:`~hvd_compress.engine.executors.Columns`) with known addresses."""

_FAR = 1e4
"""The norm of a residual, in norms of its gradient, that codecs do not reach in ordinary training."""

_NORM_PART = 1 << 22

_SAMPLE = 512
"""The approximate number of elements that are compared."""


@dataclass(eq=False, kw_only=True)
class Holder:
    """A residual, and the one that replaces it if the current step counts.

    Attributes:
        residual: the values that have been computed and not yet sent, shape=(n,), float32 or bfloat16;
            None before the first step and without error feedback.
        residual_scale: the loss scale that is contained in the residual.
        next_residual: the array for the residual after the current step, like ``residual``; None before
            the first step. :meth:`swap` swaps the two.
    """

    residual: torch.Tensor | None = None
    residual_scale: float = 1.0
    next_residual: torch.Tensor | None = None

    @property
    def count(self) -> int:
        """The number of elements in the residual."""
        raise NotImplementedError

    def take_up(
        self,
        loss_scale: float,
        device: torch.device,
        order: Callable[[torch.Tensor], None],
        dtype: torch.dtype = torch.float32,
    ) -> Pair:
        """The residual in the units of the next gradient, zeros at first, and the array for the next one.

        Args:
            loss_scale: the loss scale of the next gradient.
            device: the device of the next gradient; the model may have moved.
            order: a function that is called before a residual is copied from another device; see
                :meth:`Batch.order`.
            dtype: the dtype of residuals; a float32 one becomes the nearest bfloat16 numbers.
        """
        residual, following = self.residual, self.next_residual
        if residual is None:
            self.residual = residual = torch.zeros(self.count, dtype=dtype, device=device)
            self.residual_scale = loss_scale
        elif residual.device != device or residual.dtype != dtype:
            order(residual)
            self.residual = residual = residual.to(device, dtype)
        if self.residual_scale != loss_scale:
            residual.mul_(loss_scale / self.residual_scale)
            self.residual_scale = loss_scale
        if following is None or following.device != device or following.dtype != dtype:
            self.next_residual = following = torch.empty_like(residual)
        return residual, following

    def swap(self) -> None:
        """Accepts the residual that the step has written, or undoes that before the next encoding."""
        self.residual, self.next_residual = self.next_residual, self.residual

    def __getstate__(self) -> dict[str, Any]:
        # What the next step writes first is not worth its memory in a copy.
        return {**self.__dict__, "next_residual": None}

    def forget(self) -> None:
        """Discards the residual and the array for the next one."""
        self.residual = self.next_residual = None


@dataclass(eq=False)
class Owned(Holder):
    """The record of a parameter's part that this rank owns.

    Attributes:
        begin: the part's first element, in row-major order of the gradient, or of its transposed matrix.
        end: the element behind the last one of the part.
        weight: the amount that a unit of ``residual`` would have added to the sum of all ranks' gradients.
        transposed: whether elements are in the order of the gradient's transposed matrix.
        state: the state of the owner step: tensors of shape (end - begin,), and numbers.
    """

    begin: int
    end: int
    weight: int
    transposed: bool = False
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of elements in the part."""
        return self.end - self.begin

    def spread(self, shape: Shape, factor: float) -> torch.Tensor:
        """``factor`` times the residual at its places in the gradient, with zeros elsewhere.

        The residual must not be None. The result has shape=(n,), float32, and is on the residual's device.
        """
        assert self.residual is not None
        return in_place(self.residual.float() * factor, self.begin, shape, self.transposed)

    def copy_state(self, device: torch.device) -> dict[str, Any]:
        """Copies the state of the owner step, with the part's tensors on a device."""
        return {
            key: value.to(device, copy=True) if self.has_elements(value) else copy.deepcopy(value)
            for key, value in self.state.items()
        }

    def has_elements(self, value: Any) -> bool:
        """Whether a value in :attr:`state` is a tensor with a number for each element of the part."""
        return torch.is_tensor(value) and value.shape == (self.count,)

    @property
    def part(self) -> OwnedPart:
        """The part that this record describes."""
        return self.begin, self.end, self.weight, self.transposed


@dataclass(eq=False)
class Factor(Holder):
    """The right factor of a gradient's last low-rank approximation, the same on every rank.

    The factor is kept and replaced like a residual: shape=(columns, rank), float32.

    Attributes:
        rank: the number of the factor's columns.
    """

    rank: int

    @property
    def count(self) -> int:
        """The number of elements in the factor, which is never None."""
        assert self.residual is not None
        return self.residual.numel()


@dataclass(eq=False, kw_only=True)
class Kept(Holder):
    """The residuals and the factor that a compressor keeps for one parameter between steps.

    Attributes:
        owned: the record of the part that this rank owns; None if the exchange has no owners.
        factor: the right factor of the last low-rank approximation; None without one.
    """

    owned: Owned | None = None
    factor: Factor | None = None

    @property
    def shape(self) -> Shape:
        """The shape of the parameter."""
        raise NotImplementedError


def norm_of(slots: Iterable[Kept], device: torch.device) -> torch.Tensor:
    """The l2 norm of all residuals together, without loss scaling, shape=(), float64.

    The result is on a device, for which the host does not wait.
    """
    norms = [torch.zeros((), dtype=torch.float64, device=device)]
    for slot in slots:
        for holder in (slot, slot.owned):
            if holder is None or holder.residual is None:
                continue
            # In parts: PyTorch copies them to float64.
            for part in holder.residual.reshape(-1).split(_NORM_PART):
                norm = torch.linalg.vector_norm(part, dtype=torch.float64)
                norms.append((norm / holder.residual_scale).to(device))
    return torch.linalg.vector_norm(torch.stack(norms))


def in_place(part: torch.Tensor, begin: int, shape: Shape, transposed: bool) -> torch.Tensor:
    """A part's elements at their places in the gradient, with zeros elsewhere.

    Args:
        part: the elements of the part, shape=(n_part,).
        begin: the part's first element, in the order in which ranks divide the gradient.
        shape: the gradient's shape.
        transposed: whether that order is the one of the transposed matrix.

    Returns:
        The elements in row-major order of the gradient, shape=(n,).
    """
    whole = part.new_zeros(math.prod(shape))
    whole[begin : begin + part.numel()] = part
    return transpose_back(whole, as_matrix(shape)) if transposed else whole


def transpose(x: torch.Tensor, matrix: tuple[int, int]) -> torch.Tensor:
    """A copy of a matrix's elements in the order of its columns, shape=(n,), contiguous.

    Args:
        x: the elements in row-major order, in any shape and memory layout.
        matrix: the numbers of rows and columns.
    """
    columns = x.reshape(matrix).t()
    return x.new_empty(columns.shape).copy_(columns).view(-1)


def transpose_back(x: torch.Tensor, matrix: tuple[int, int]) -> torch.Tensor:
    """The inverse of :func:`transpose`."""
    return transpose(x, (matrix[1], matrix[0]))


class Changes:
    """The changes of some gradients' residuals in one step.

    A step is dropped if some rank sent an Inf or a NaN: then no residual may count the step's gradients as
    sent. The script may also drop the step after it was accepted; see :meth:`take_back`.

    Attributes:
        moved: the holders whose next residual becomes the residual if the step is accepted.
        accepted: whether the step was accepted, and not taken back.
    """

    def __init__(self) -> None:
        self.moved: list[Holder] = []
        self._assigned: list[tuple[object, dict[str, Any], dict[str, Any]]] = []
        self._on_device = False
        self.accepted = False

    def assign(self, owner: object, **values: Any) -> None:
        """Sets attributes if the step is accepted, or resets them to their present values if it is not."""
        self._assigned.append((owner, values, {name: getattr(owner, name) for name in values}))

    def release(self, slot: Kept, gradient: torch.Tensor, loss_scale: float) -> None:
        """Adds an earlier codec's residual to the gradient, and discards it if the step is accepted."""
        if slot.residual is not None:
            rest = slot.residual.to(gradient.device, torch.float32)
            rest = rest * (loss_scale / slot.residual_scale)
            self._add(rest, slot, gradient, slot)

    def release_owned(self, slot: Kept, gradient: torch.Tensor, loss_scale: float) -> None:
        """Does the same with the residual of the part that this rank owns, with the part's weight."""
        owned = slot.owned
        if owned is not None and owned.residual is not None:
            factor = owned.weight * loss_scale / owned.residual_scale
            rest = owned.spread(slot.shape, factor).to(gradient.device)
            self._add(rest, slot, gradient, owned)

    def own(
        self,
        slot: Kept,
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
        owned = None if part is None else Owned(*part)
        self.assign(slot, owned=owned)
        slot.owned = owned

    def settle(self, dropped: bool | torch.Tensor) -> None:
        """Accepts the changes, or undoes them.

        Args:
            dropped: whether the step is dropped; or a word on the residuals' device, not 0 if it is. The
                caller has then given the next residuals the values that accepted ones will have.
        """
        if isinstance(dropped, torch.Tensor):
            for holder in self.moved:
                holder.swap()
            # Objects of the host: rare enough to wait for the device.
            if self._assigned:
                self._assign(bool(dropped.item()))
            self.accepted = self._on_device = True
            return
        if not dropped:
            for holder in self.moved:
                holder.swap()
        self._assign(dropped)
        self.accepted = not dropped

    def withdraw(self) -> None:
        """Leaves residuals as they were; those released to a gradient are sent with it uncompressed."""
        self.moved.clear()
        self.settle(False)

    def counts(self) -> bool:
        """Whether residuals are known to count gradients as sent; does not wait for a device."""
        return self.accepted and bool(self.moved) and not self._on_device

    def take_back(self) -> None:
        """Undoes the changes if they were accepted; no gradient may have been encoded since then."""
        if self.accepted:
            for holder in self.moved:
                holder.swap()
            self._assign(dropped=True)
            self.accepted = False

    def _assign(self, dropped: bool) -> None:
        for owner, values, former in self._assigned:
            for name, value in (former if dropped else values).items():
                setattr(owner, name, value)

    def _add(self, rest: torch.Tensor, slot: Kept, gradient: torch.Tensor, holder: Holder) -> None:
        gradient.add_(rest.view(slot.shape).to(gradient.dtype))
        scale = holder.residual_scale
        self.assign(holder, residual=None, residual_scale=scale, next_residual=None)


class Stale:
    """Warns once if a residual is far larger than its gradient, as after a return to an earlier model.

    A sample of one gradient in each bucket is compared with one of its residual. The host does not wait for
    a device: it reads the device's answer later, and compares nothing until then.
    """

    def __init__(self) -> None:
        self._asked: tuple[str, HostWord] | None = None
        self._warned = False
        self._warning = (
            threading.Lock()
        )  # Threads of several buckets may find one at the same time.

    def compare(
        self,
        names: Sequence[str],
        values: Sequence[torch.Tensor],
        residuals: Sequence[torch.Tensor | None],
    ) -> None:
        """Compares a bucket's largest gradient, or average, with its residual.

        Args:
            names: the names of the parameters.
            values: the gradients or averages, in any shape and dtype.
            residuals: their residuals, shape=(n,), with the same loss scale; None without feedback.
        """
        if self._warned or not self._answered():
            return
        place = max(range(len(values)), key=lambda position: values[position].numel())
        residual = residuals[place]
        if residual is None:
            return
        stride = max(residual.numel() // _SAMPLE, 1)
        usual, rest = (
            torch.linalg.vector_norm(one.ravel()[::stride], dtype=torch.float32)
            for one in (values[place], residual)
        )
        # Zeros say nothing about the residual.
        if usual.is_cpu:
            self._tell(names[place], 0 < _FAR * usual.item() < rest.item())
        else:
            self._asked = names[place], HostWord(torch.logical_and(rest > _FAR * usual, usual))

    def _answered(self) -> bool:
        """Whether no device is being waited for; tells its answer if that has arrived."""
        if self._asked is None:
            return True
        name, word = self._asked
        far = word.read()
        if far is None:
            return False
        self._asked = None
        self._tell(name, bool(far))
        return not far

    def _tell(self, name: str, far: bool) -> None:
        with self._warning:
            first, self._warned = far and not self._warned, self._warned or far
        if first:
            warnings.warn(
                f"{name}: expected a residual of the size of gradients, got one of more than {_FAR:g} "
                f"times the norm of its gradient: if the model has returned to an earlier state, call "
                f"compressor.reset() on every rank when it does so, or error feedback adds gradients of "
                f"the steps that it has forgotten; if not, ignore this warning",
                UserWarning,
                stacklevel=2,
            )


class LastExchange:
    """The changes of the last exchange; :meth:`take_back` can undo them until the next exchange begins.

    Attributes:
        columns: the residuals that buckets have taken up in this exchange, by plan and role.
        stale: compares residuals with gradients.
    """

    def __init__(self) -> None:
        self.stale = Stale()
        self._changes: list[Changes] = []
        self._replaced = False
        self.columns: dict[tuple[object, str], FixedColumns] = {}
        self._former = self.columns

    def __iter__(self) -> Iterator[Changes]:
        return iter(self._changes)

    def begin(self) -> None:
        """Forgets the changes of the exchange before; called before an exchange's first gradient."""
        self._changes.clear()
        self._replaced = False
        self._former, self.columns = self.columns, {}

    def changes(self) -> Changes:
        """Makes a record of changes in the exchange that has begun last."""
        self._changes.append(Changes())
        return self._changes[-1]

    def columns_again(
        self, key: tuple[object, str], holders: Sequence[Holder], loss_scale: float
    ) -> FixedColumns | None:
        """The columns of the exchange before, whose arrays need no check.

        None if holders have others now, or if a script has moved some to other memory.

        Args:
            key: the plan and the role of the holders.
            holders: the holders.
            loss_scale: the loss scale of the next gradients.
        """
        columns = self._former.get(key)
        if columns is None or {holder.residual_scale for holder in holders} != {loss_scale}:
            return None
        if not (columns[0].unmoved() and columns[1].unmoved()):
            return None
        now = [holder.residual for holder in holders]
        following = [holder.next_residual for holder in holders]
        for before, after in (columns, columns[::-1]):  # A dropped step leaves them as they were.
            if all(map(is_, now, before)) and all(map(is_, following, after)):
                return before, after
        return None

    def replace(self) -> None:
        """Records that other residuals replace those of the last exchange."""
        self._replaced |= any(one.accepted for one in self._changes)
        self._changes.clear()
        self.columns.clear()

    def take_back(self) -> None:
        """Undoes the last exchange; does nothing if none was accepted, or if it was already undone.

        Raises:
            ExchangeError: residuals have been replaced since the exchange.
        """
        if self._replaced:
            raise ExchangeError(
                "drop_step: expected residuals as the last exchange left them, got others by "
                "load_state_dict(), load_resized(), rebind() or reset(): call drop_step() before these"
            )
        for changes in self._changes:
            changes.take_back()
