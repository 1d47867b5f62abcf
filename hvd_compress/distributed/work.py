"""A call of ``all_reduce`` in progress."""

from __future__ import annotations

from collections.abc import Callable

from hvd_compress.process_group.step import Bucket


class Work:
    """The result of ``all_reduce(..., async_op=True)``; used like ``torch.distributed.Work``.

    Args:
        bucket: the call's tensors.
        over: a function that is called once, at the end of :meth:`wait`.
        check: a function that is called once before ``over``, unless the call has failed; may raise an
            error.
    """

    def __init__(
        self, bucket: Bucket, over: Callable[[], None], check: Callable[[], None] | None = None
    ) -> None:
        self._bucket = bucket
        self._over: Callable[[], None] | None = over
        self._check = check

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would return, or raise, at once."""
        return self._bucket.future.done()

    def settle(self, *, dropped: bool) -> None:
        """Settles residuals after :meth:`wait` has raised; other ranks may have received this rank's data.

        Args:
            dropped: whether no rank uses the results.
        """
        self._bucket.settle(dropped)

    def wait(self) -> bool:
        """Waits until the tensors hold the results; has to be called before their next ``all_reduce``.

        On a CUDA device, the current stream waits, and the host does not.

        Returns:
            True.

        Raises:
            ExchangeError: the ranks' calls differ, or another rank has failed.
            PayloadError: a payload was altered in transit.
        """
        try:
            self._bucket.future.wait()
            check, self._check = self._check, None
            if check is not None:
                check()
        finally:
            over, self._over = self._over, None
            if over is not None:
                over()
        return True
