"""Residuals that a bucket has had in the exchange before are not checked again; all others are."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch

from hvd_compress.codecs import OneBit
from hvd_compress.engine.batches import Batches
from hvd_compress.engine.executors import Executors
from hvd_compress.engine.parameters import Slot, slots_of
from hvd_compress.engine.plan import Common
from hvd_compress.engine.residuals import Holder
from hvd_compress.engine.run import Run
from hvd_compress.exchanges.comm import Group
from hvd_compress.exchanges.routing import Route

SHAPES = ((70,), (8, 40))


class Rank:
    """A rank without others.

    Args:
        exchange: the name of the exchange.
        forgets: whether every exchange checks all residuals.
    """

    def __init__(self, exchange: str, *, forgets: bool = False) -> None:
        self.slots = slots_of([(str(shape), torch.zeros(shape)) for shape in SHAPES])
        for slot in self.slots:
            slot.route = Route(OneBit(64), exchange=exchange)
        self.cache = Batches(Common(Executors(1), Group(0, 1)))
        self._forgets = forgets

    def step(self, number: int, *, dropped: bool = False) -> list[torch.Tensor]:
        """Exchanges gradients, and returns what comes of them."""
        if self._forgets:
            self.cache.common.last.columns.clear()
        self.cache.common.last.begin()
        made = torch.Generator().manual_seed(number)
        gradients = [torch.randn(shape, generator=made) for shape in SHAPES]
        batch, exchanging = self.cache.make(self.slots, gradients)
        pending = Run(exchanging, batch, name="bucket")
        assert pending.request is None and pending.error is None
        batch.write(1.0)
        batch.settle(dropped)
        return gradients

    def residuals(self) -> list[torch.Tensor]:
        """The residuals of gradients and of averages."""
        holders = [one for slot in self.slots for one in (slot, slot.owned) if one is not None]
        return [one.residual for one in holders if one.residual is not None]


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[Holder]:
    """The holders whose residuals are checked, in the order of the checks."""
    checked: list[Holder] = []
    real = Holder.take_up

    def noted(self: Holder, *arguments: object) -> object:
        checked.append(self)
        return real(self, *arguments)

    monkeypatch.setattr(Holder, "take_up", noted)
    return checked


@pytest.mark.parametrize("exchange", ("allgather", "two_shot"))
def test_the_same_residuals_are_not_checked_again(exchange: str, checks: list[Holder]) -> None:
    rank, other = Rank(exchange), Rank(exchange, forgets=True)
    for number, dropped in enumerate((False, False, True, True, False, False)):
        checks.clear()
        got = rank.step(number, dropped=dropped)
        assert bool(checks) == (number == 0)
        assert all(map(torch.equal, got, other.step(number, dropped=dropped)))
        assert all(map(torch.equal, rank.residuals(), other.residuals()))


def load(rank: Rank, slot: Slot) -> None:
    slot.residual = torch.full((slot.count,), 0.5)


def load_bfloat16(rank: Rank, slot: Slot) -> None:
    slot.residual = torch.full((slot.count,), 0.5, dtype=torch.bfloat16)


def lose_the_next(rank: Rank, slot: Slot) -> None:
    slot.next_residual = None


def swap(rank: Rank, slot: Slot) -> None:
    """As the bucket's other residuals have not."""
    slot.swap()


def scale(rank: Rank, slot: Slot) -> None:
    rank.cache.common.loss_scale = 8.0


@pytest.mark.parametrize("change", (load, load_bfloat16, lose_the_next, swap, scale))
@pytest.mark.parametrize("exchange", ("allgather", "two_shot"))
def test_other_residuals_are_checked(
    exchange: str, change: Callable[[Rank, Slot], None], checks: list[Holder]
) -> None:
    rank, other = Rank(exchange), Rank(exchange, forgets=True)
    for number in range(6):
        if number == 3:
            for one in (rank, other):
                change(one, one.slots[1])
        checks.clear()
        got = rank.step(number)
        assert (rank.slots[1] in checks) == (number in (0, 3))
        assert all(map(torch.equal, got, other.step(number)))
        assert all(map(torch.equal, rank.residuals(), other.residuals()))


def test_former_residuals_are_freed_two_exchanges_later() -> None:
    rank = Rank("two_shot")
    rank.step(0)
    former = [weakref.ref(one) for one in rank.residuals()]
    assert len(former) == 4
    for slot in rank.slots:
        slot.forget()
        slot.owned = None
    rank.step(1)
    rank.step(2)
    gc.collect()
    assert not any(one() is not None for one in former)
