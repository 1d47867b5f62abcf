"""Collectives that are started when others are over, which is in another order on each rank."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hvd_compress.ddp.collectives import Collectives

Begin = Callable[[Collectives], None]


class Lane:
    """A process group of its own, and turns.

    Collectives of torch.distributed have no names: ranks must start those of a group in the same order. So
    those that hooks start have one group, and those that follow them another, in which each waits until
    those before it have been started. Who comes early leaves word, and does not wait.

    Args:
        collectives: the ranks, in a group that no other lane uses.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._lock = threading.Lock()
        self._turns = 0
        self._next = 0
        self._ready: dict[int, Begin] = {}
        self._starting = False

    def take_a_turn(self) -> int:
        """A number, to be taken in the same order on every rank."""
        self._turns += 1
        return self._turns - 1

    def start(self, turn: int, begin: Begin) -> None:
        """Calls ``begin`` with the group, now or when the turns before have come; never two at a time."""
        with self._lock:
            self._ready[turn] = begin
        while True:
            # Not under the lock: what is begun may be over at once, and call this for another turn.
            with self._lock:
                if self._starting or self._next not in self._ready:
                    return
                now = self._ready.pop(self._next)
                self._starting = True
            try:
                now(self._collectives)
            finally:
                with self._lock:
                    self._next += 1
                    self._starting = False
