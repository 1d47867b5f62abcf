"""The buckets of one step: sent as they are handed over, decoded as they come back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from hvd_compress.engine.batch import judge
from hvd_compress.process_group.agreement import Agreement
from hvd_compress.process_group.bucket import Bucket
from hvd_compress.process_group.collectives import Collectives
from hvd_compress.process_group.launcher import Launcher


class Step:
    """Sends buckets and finishes them; nothing waits while gradients are still being computed.

    A step is what is dropped as a whole: a backward pass, or one call of ``all_reduce``. Buckets are
    decoded as they come. But one non-finite gradient makes the whole step worthless, so that no residual
    may count it as sent, and this is known with the last bucket only. Residuals are settled before the last
    bucket's future is completed, and so before the next step.

    On a CUDA device all of this is put behind the buckets' collectives in a stream, when the last one is
    added at the latest, and futures are complete for the host before anything has been done.

    Args:
        collectives: the ranks.
        launcher: starts the buckets' collectives.
        agreement: a comparison under way, or None; until it is settled, everything is held back, because
            ranks that differ would mix up each other's messages.
        prepare: called once they agree, by every rank, before anything is sent; may wait for the others.
        settled: called once with all buckets, when all are back and their residuals are settled.
        anywhere: says whether the step is dropped on any rank that has to drop it together with this one,
            from whether the exchanges of this one say so.

    Attributes:
        last_index: of the latest bucket.
    """

    def __init__(
        self,
        collectives: Collectives,
        launcher: Launcher,
        agreement: Agreement | None,
        prepare: Callable[[], None],
        settled: Callable[[Sequence[Bucket]], None],
        anywhere: Callable[[bool | torch.Tensor], bool | torch.Tensor] = lambda dropped: dropped,
    ) -> None:
        self._collectives = collectives
        self._launcher = launcher
        self._agreement = agreement
        self._prepare = prepare
        self._settled = settled
        self._anywhere = anywhere
        self._buckets: list[Bucket] = []
        self._lock = threading.Lock()
        self._outstanding = 1  # close() is the last to be counted off.
        self._error: Exception | None = None
        self.last_index = -1

    def add(self, bucket: Bucket) -> None:
        """Sends one bucket, in the order of the buckets, which is the same on every rank."""
        self._buckets.append(bucket)
        if self._agreement is None:
            self._send(bucket)

    def send_alone(self, bucket: Bucket) -> None:
        """Sends the one bucket of a step, in place of :meth:`add` and :meth:`close`; without an agreement.

        With these two, a bucket that came back in between would be complete before residuals are settled,
        and the next step could begin. With this method, residuals are settled first.
        """
        assert self._agreement is None
        self._buckets.append(bucket)
        self._outstanding -= 1  # There is no close() to be counted off.
        self._send(bucket)

    def close(self) -> None:
        """Called after the last bucket.

        Here an agreement is waited for: every rank comes here without waiting for another one before, and
        has started it.

        Raises:
            ExchangeError: ranks differ.
        """
        if self._agreement is not None:
            self._agreement.settle()
            self._prepare()
            for bucket in self._buckets:
                self._send(bucket)
        with self._collectives.behind():
            self._count_off()
        if self._error is not None:
            self._fail(self._error)  # Buckets added since then would wait for ever.

    def wait(self) -> None:
        """Waits for all buckets, and raises what went wrong with one of them as what it was."""
        for bucket in self._buckets:
            bucket.future.wait()

    def _send(self, bucket: Bucket) -> None:
        bucket.waiting = len(bucket.parts)
        with self._lock:
            self._outstanding += 1
        if not bucket.parts:
            with self._collectives.behind():
                self._finish(bucket)
        for part in bucket.parts:
            self._launcher.submit(
                part.pending,
                part.stages,
                part.remainders,
                lambda error: self._returned(bucket, error),
            )

    def _returned(self, bucket: Bucket, error: Exception | None) -> None:
        # Called by a process group's thread, or at once where a collective is over already.
        if error is None:
            with self._lock:
                bucket.waiting -= 1
                complete = bucket.waiting == 0
            try:
                if complete:
                    self._finish(bucket)
                return
            except Exception as problem:
                error = problem
        self._fail(error)

    @torch.no_grad()
    def _finish(self, bucket: Bucket) -> None:
        bucket.write()
        self._count_off()
        self._resolve(bucket)

    @torch.no_grad()
    def _count_off(self) -> None:
        with self._lock:
            self._outstanding -= 1
            over = self._outstanding == 0
        if over:
            contents = [part.content for bucket in self._buckets for part in bucket.parts]
            dropped = self._anywhere(judge(contents))
            for bucket in self._buckets:
                bucket.judge(dropped)
            self._settled(self._buckets)

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._error = self._error or error
        for bucket in self._buckets:
            self._resolve(bucket, self._error)

    def _resolve(self, bucket: Bucket, error: Exception | None = None) -> None:
        bucket.resolve(error)
