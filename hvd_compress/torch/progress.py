"""Horovod's driver of exchanges: polls collectives, and resumes an exchange when one is over."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator

from hvd_compress.engine.run import Run, phase
from hvd_compress.ranks import threads
from hvd_compress.torch.collectives import Handle, HorovodCollectives

_SHORTEST_PAUSE, _LONGEST_PAUSE = 100e-6, 1e-3


class Poller:
    """Resumes exchanges whose collectives can only be polled, like Horovod's.

    Between two hooks of a backward pass, and after the last hook, a progress thread notices when a
    collective is over. The thread polls all running collectives, and sleeps for up to a millisecond if none
    is over; if none is running, the thread waits on a condition. At the end of the step, the caller of
    :meth:`finish` replaces the thread, and waits in the collectives themselves. The thread is started with
    the first exchange of several stages.

    No order of hooks can block the ranks: :meth:`finish` waits for the lowest stage first, then for its
    remainders, and among exchanges in the same stage for the lowest number, so that some rank can always
    continue.

    Args:
        collectives: starts the collectives.
    """

    def __init__(self, collectives: HorovodCollectives) -> None:
        self._state = _ProgressState(collectives)
        self._thread: threading.Thread | None = None

    def submit(self, run: Run) -> None:
        """Starts an exchange's first collective, and returns at once.

        Args:
            run: the exchange.
        """
        self._state.submit(run)
        if len(run.stages) > 1 and self._thread is None:
            close = self._state.close
            self._thread = threads.start(self._state.serve, close, name="hvd_compress progress")
            weakref.finalize(self, close).atexit = False  # Then it ends with the other threads.

    def finish(self) -> Iterator[Run]:
        """Yields every submitted exchange as soon as it has ended or failed."""
        return self._state.finish()


class _ProgressState:
    """The state that a progress thread and its owner share; the thread must not keep the owner alive."""

    def __init__(self, collectives: HorovodCollectives) -> None:
        self._collectives = collectives
        self._changed = threading.Condition()
        self._under_way: dict[Run, Handle] = {}
        self._over: list[Run] = []
        self._working = 0
        self._finishing = self._closed = False

    def submit(self, run: Run) -> None:
        with self._changed:
            self._start(run)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def serve(self) -> None:
        pause = _SHORTEST_PAUSE
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or (self._under_way and not self._finishing)
                )
                if self._closed:
                    return
                ready = next((p for p, handle in self._under_way.items() if _is_over(handle)), None)
                taken = None if ready is None else self._take(ready)
            if taken is None:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            else:
                self._resume(*taken)
                pause = _SHORTEST_PAUSE

    def finish(self) -> Iterator[Run]:
        with self._changed:
            self._finishing = True
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._over or self._under_way or not self._working
                    )
                    over, self._over = self._over, []
                    if not over and not self._under_way:
                        return
                    if not over:
                        taken = self._take(min(self._under_way, key=lambda p: p.place))
                if over:
                    yield from over
                else:
                    self._resume(*taken)
        finally:
            with self._changed:
                self._finishing = False
                self._changed.notify_all()

    def _take(self, run: Run) -> tuple[Run, Handle]:
        self._working += 1
        return run, self._under_way.pop(run)

    def _resume(self, run: Run, handle: Handle) -> None:
        # Without the lock: an owner's work takes long, and hooks must be able to submit meanwhile.
        try:
            result = handle.wait()
        except Exception as error:
            run.fail(error)
        else:
            run.resume(result)
        with self._changed:
            self._start(run)
            self._working -= 1
            self._changed.notify_all()

    def _start(self, run: Run) -> None:
        if run.request is not None:
            try:
                with phase("send"):
                    handle = self._collectives.start(run.request, run.label)
                self._under_way[run] = handle
                return
            except Exception as error:
                run.fail(error)
        self._over.append(run)


def _is_over(handle: Handle) -> bool:
    try:
        return handle.done()
    except Exception:
        return True  # Waiting for it raises the same error, which is kept there.
