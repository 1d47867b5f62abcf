"""A call of ``all_reduce`` that another thread makes."""

from __future__ import annotations

from concurrent.futures import Future

from hvd_compress.distributed.work import Work


class Begun:
    """A call in progress, used like :class:`~hvd_compress.distributed.work.Work`.

    Args:
        call: the future of the other thread's call.
    """

    def __init__(self, call: Future[Work]) -> None:
        self._call = call

    def wait(self) -> None:
        """Waits for the call and its work, and raises the error of either."""
        self._call.result().wait()

    def settle(self, *, dropped: bool) -> None:
        """Settles residuals after :meth:`wait` has raised; if the call itself raised, nothing was sent."""
        if self._call.exception() is None:
            self._call.result().settle(dropped=dropped)
