"""Who notices that a collective is over, so that the next one can start."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable

import torch

from hvd_compress.torch.collectives import Collectives
from hvd_compress.torch.exchanges.base import Relay

_SHORTEST_PAUSE, _LONGEST_PAUSE = 50e-6, 1e-3


class Courier:
    """Carries relays from one collective to the next.

    One of a single collective needs no help: it is waited for at the end. One of several is watched
    by a helper thread, because between two hooks of a backward pass, and behind the last one, there is
    nobody else to notice. The helper is there from the first such relay on. It sleeps while there is
    none; while there are some, it looks at all of them every millisecond at most, and never waits for a
    certain one: ranks may start them in another order, and Horovod ends them in an order of its own.

    Args:
        collectives: the ranks.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._single: list[Relay] = []
        self._desk: _Desk | None = None

    def carry(self, relay: Relay) -> None:
        """Takes over a relay that has been started. Returns at once."""
        if relay.single:
            self._single.append(relay)
            return
        if self._desk is None:
            self._desk = _Desk()
            weakref.finalize(self, self._desk.close)
        self._desk.put(relay)

    def wait(self) -> None:
        """Returns when every relay has come to its end, or to an error."""
        single, self._single = self._single, []
        for relay in single:
            while relay.handle is not None:
                relay.advance()  # Waits, sleeping.
        if self._desk is not None:
            self._desk.wait()


class _Desk:
    """Where a courier and its helper meet; the helper must not keep the courier alive."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._new: list[Relay] = []
        self._outstanding = 0
        self._closed = False
        self._thread = threading.Thread(
            target=self._serve, name="hvd_compress courier", daemon=True
        )
        self._thread.start()

    def put(self, relay: Relay) -> None:
        with self._changed:
            self._new.append(relay)
            self._outstanding += 1
            self._changed.notify_all()

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._outstanding == 0)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._new)
                if not self._new:
                    return
            self._work()

    @torch.no_grad()
    def _work(self) -> None:
        under_way: list[Relay] = []
        pause = _SHORTEST_PAUSE
        while True:
            with self._changed:
                under_way += self._new
                self._new.clear()
                if not under_way:
                    return
            moved = _advance(under_way)
            left = [relay for relay in under_way if relay.handle is not None]
            with self._changed:
                self._outstanding -= len(under_way) - len(left)
                self._changed.notify_all()
            under_way = left
            if moved:
                pause = _SHORTEST_PAUSE
            else:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)


def _advance(relays: Iterable[Relay]) -> bool:
    """Has every relay whose collective is over go on; whether there was one."""
    moved = False
    for relay in relays:
        try:
            over = relay.handle is not None and Collectives.done(relay.handle)
        except Exception as error:  # Horovod was shut down.
            relay.fail(error)
        else:
            if over:
                relay.advance()
                moved = True
    return moved
