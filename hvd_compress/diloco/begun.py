"""A call of ``all_reduce`` that another thread makes."""

from __future__ import annotations

from concurrent.futures import Future

from hvd_compress.distributed.work import Work


class Begun:
    """A call that is under way, as :class:`~hvd_compress.distributed.work.Work`.

    Args:
        call: the other thread's.
    """

    def __init__(self, call: Future[Work]) -> None:
        self._call = call

    def wait(self) -> None:
        """Waits, and raises what the call raised, or its work."""
        self._call.result().wait()

    def settle(self, *, dropped: bool) -> None:
        """Settles residuals after :meth:`wait` has raised; nothing was sent if the call itself has."""
        if self._call.exception() is None:
            self._call.result().settle(dropped=dropped)
