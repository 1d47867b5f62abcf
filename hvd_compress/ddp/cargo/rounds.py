"""Cargo that takes several collectives, each started when the one before is over."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch.distributed as dist

from hvd_compress.ddp.cargo.base import Cargo, Exchange, Item
from hvd_compress.ddp.collectives import Collectives, Over
from hvd_compress.ddp.lane import Lane

Begin = Callable[[Collectives], dist.Work]
"""Starts a collective in a group."""

Round = Callable[[], Begin]
"""Works out what a collective will send, from what the one before has brought. Has no turn to wait for."""

_Leg = tuple[Round, Lane, int]


class InRounds(Exchange):
    """Each round of every bucket has a lane: first ones are started by hooks, the others in no such order.

    Attributes:
        lanes: one a round, once prepared.
    """

    lanes: Sequence[Lane] = ()

    def prepare(self) -> None:
        """See :meth:`Exchange.prepare`: makes process groups."""
        # Not before: with other settings, a rank would not come, and this one wait for it.
        if not self.lanes:
            self.lanes = [Lane(group) for group in self._groups()]

    def _groups(self) -> Sequence[Collectives]:
        """Process groups for the rounds: no two have the same."""
        return [self.collectives, self.collectives.another()]


class Rounds(Cargo):
    """The encoded gradients of one bucket, in rounds.

    Args:
        items: the gradients.
        exchange: whose lanes they take; there is one for each of :meth:`_rounds`.
    """

    def __init__(self, items: Sequence[Item], exchange: InRounds) -> None:
        super().__init__(items)
        self._exchange = exchange

    def send(self, over: Over) -> None:
        """See :meth:`Cargo.send`."""
        lanes = self._exchange.lanes
        rounds = zip(self._rounds(), lanes, strict=True)
        self._go_on([(work_out, lane, lane.take_a_turn()) for work_out, lane in rounds], over)

    @abstractmethod
    def _rounds(self) -> Sequence[Round]:
        """What there is to do, in this order."""

    @abstractmethod
    def _finish(self) -> Exception | None:
        """Takes what the last round has brought; the error that there was in any, to be raised."""

    def _go_on(self, legs: Sequence[_Leg], over: Over) -> None:
        if not legs:
            with self._exchange.collectives.behind():
                over(self._finish())
            return
        (work_out, lane, turn), *rest = legs
        begin = work_out()
        lane.start(turn, lambda group: self._begin(begin, group, rest, over))

    def _begin(self, begin: Begin, group: Collectives, rest: Sequence[_Leg], over: Over) -> None:
        try:
            work = begin(group)
        except Exception as error:
            over(error)
        else:
            group.when_over(work, lambda error: self._arrived(error, rest, over))

    def _arrived(self, error: Exception | None, rest: Sequence[_Leg], over: Over) -> None:
        if error is not None:
            over(error)
            return
        try:
            self._go_on(rest, over)
        except Exception as problem:
            over(problem)
