"""The buckets of one step, which are sent when they are handed over and decoded when results arrive."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from hvd_compress.engine.batch import judge
from hvd_compress.engine.residuals import Changes
from hvd_compress.engine.run import Run
from hvd_compress.process_group.agreement import Agreement
from hvd_compress.process_group.collectives import Collectives
from hvd_compress.process_group.driver import Driver
from hvd_compress.process_group.private import fail
from hvd_compress.ranks.counters import Counters


@dataclass(eq=False)
class Bucket:
    """A DDP bucket, or the tensors of one call, during the exchange.

    Attributes:
        result: the result of :attr:`future`: the tensors, over which the averages or sums are written.
        device: the device of the tensors.
        scale: a factor on the ranks' sums.
        runs: the exchanges of the tensors.
        changes: the changes of residuals other than those of the runs.
        waiting: the number of runs whose results have not arrived yet.
        held: whether residuals are settled by the code that waits for the results, and not when the last
            result arrives.
        dropped: with ``held``, the argument for :meth:`settle`.
        future: a future that completes when the results are written, or with the exception.
    """

    result: Any
    device: torch.device
    scale: float
    runs: list[Run] = field(default_factory=list)
    changes: Changes = field(default_factory=Changes)
    waiting: int = 0
    held: bool = False
    dropped: bool | torch.Tensor = False
    future: torch.futures.Future[Any] = field(init=False)
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        on_gpu = self.device.type != "cpu"
        self.future = torch.futures.Future(devices=[self.device] if on_gpu else None)

    def write(self) -> None:
        """Overwrites the tensors with :attr:`scale` times the sums of the ranks' tensors."""
        for run in self.runs:
            run.content.write(self.scale)

    def judge(self, dropped: bool | torch.Tensor) -> None:
        """Records whether the step is dropped, and settles residuals unless they are held."""
        self.dropped = dropped
        if not self.held:
            self.settle(dropped)

    def settle(self, dropped: bool | torch.Tensor) -> None:
        """Keeps or discards the next residuals; see :meth:`Batch.settle`."""
        self.changes.settle(dropped)
        for run in self.runs:
            run.content.settle(dropped)

    def count(self, counters: Counters) -> None:
        """Adds the traffic to the counters, when the results have arrived."""
        for run in self.runs:
            run.content.count(counters)

    def resolve(self, error: Exception | None = None) -> None:
        """Completes the future, unless it is complete."""
        with self._lock:
            if self.future.done():
                return
            if error is None:
                self.future.set_result(self.result)
            else:
                fail(self.future, functools.partial(_raise, error))


def _raise(error: Exception, _: object) -> NoReturn:
    raise error


class Step:
    """Sends buckets and decodes their results, without waiting while gradients are being computed.

    A step is the unit that is dropped as a whole: a backward pass, or one call of ``all_reduce``. Buckets
    are decoded as they arrive. However, one non-finite gradient makes the whole step invalid, so that no
    residual may count anything as sent, and only the last bucket decides this. Residuals are settled before
    the last bucket's future completes, and so before the next step.

    On a CUDA device, all this work follows the buckets' collectives in a stream; it is enqueued at the
    latest when the last bucket is added, and futures complete for the host before the work is done.

    Args:
        collectives: the collectives among the ranks.
        driver: starts the buckets' collectives.
        agreement: a comparison in progress, or None; until it is settled, nothing is sent, because ranks
            with different configurations would mix up each other's messages.
        prepare: a function that every rank calls when the ranks agree, before anything is sent, and that
            may wait for the other ranks; or None.
        settled: a function that is called once with all buckets, when all results have arrived and
            residuals are settled; or None.
        anywhere: a function for ranks that have to drop the same steps as this one: takes whether this
            rank's exchanges drop the step, and returns whether those of any of these ranks do; None means
            that there are no such ranks.

    Attributes:
        agreement: the comparison, or None.
        last_index: the index of the latest bucket.
    """

    def __init__(
        self,
        collectives: Collectives,
        driver: Driver,
        agreement: Agreement | None = None,
        prepare: Callable[[], None] | None = None,
        settled: Callable[[Sequence[Bucket]], None] | None = None,
        anywhere: Callable[[bool | torch.Tensor], bool | torch.Tensor] | None = None,
    ) -> None:
        self._collectives = collectives
        self._driver = driver
        self.agreement = agreement
        self._prepare = prepare
        self._settled = settled
        self._anywhere = anywhere
        self._buckets: list[Bucket] = []
        self._lock = threading.Lock()
        self._outstanding = 1  # close() is the last to be counted off.
        self._error: Exception | None = None
        self.last_index = -1

    def add(self, bucket: Bucket) -> None:
        """Sends one bucket; every rank has to add buckets in the same order."""
        self._buckets.append(bucket)
        if self.agreement is None:
            self._send(bucket, lags=True)

    def send_alone(self, bucket: Bucket) -> None:
        """Sends the only bucket of a step without an agreement, in place of :meth:`add` and :meth:`close`.

        If the results arrived between these two calls, the bucket would complete before residuals are
        settled, and the next step could begin. With this method, residuals are settled first.
        """
        assert self.agreement is None
        self._buckets.append(bucket)
        self._outstanding -= 1  # There is no close() to be counted off.
        self._send(bucket, lags=False)

    def close(self) -> None:
        """Ends the step; called after the last bucket.

        Waits for an agreement: every rank starts it, and calls this method without waiting for another rank
        before.

        Raises:
            ExchangeError: the ranks' configurations differ.
        """
        if self.agreement is not None:
            self.agreement.settle()
            if self._prepare is not None:
                self._prepare()
            for bucket in self._buckets:
                self._send(bucket, lags=True)
        self._driver.catch_up()
        with self._collectives.behind():
            self._count_off()
        if self._error is not None:
            self._fail(self._error)  # Buckets added since then would wait for ever.

    def wait(self) -> None:
        """Waits for all buckets, and raises the original error if one of them failed."""
        for bucket in self._buckets:
            bucket.future.wait()

    def _send(self, bucket: Bucket, *, lags: bool) -> None:
        bucket.waiting = len(bucket.runs)
        with self._lock:
            self._outstanding += 1
        if not bucket.runs:
            with self._collectives.behind():
                self._finish(bucket)
        with self._driver.turn():
            for run in bucket.runs:
                self._driver.submit(run, lambda error: self._returned(bucket, error), lags=lags)

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
        bucket.resolve()

    @torch.no_grad()
    def _count_off(self) -> None:
        with self._lock:
            self._outstanding -= 1
            over = self._outstanding == 0
        if over:
            contents = [run.content for bucket in self._buckets for run in bucket.runs]
            dropped = judge(contents)
            if self._anywhere is not None:
                dropped = self._anywhere(dropped)
            for bucket in self._buckets:
                bucket.judge(dropped)
            if self._settled is not None:
                self._settled(self._buckets)

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._error = self._error or error
        for bucket in self._buckets:
            bucket.resolve(self._error)
