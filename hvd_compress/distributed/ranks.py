"""The ranks of ``all_reduce``, which compare what they are about to send in every call."""

from __future__ import annotations

import contextlib
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from hvd_compress.process_group.agreement import (
    Comparisons,
    known_comparisons,
    make_comparisons,
)
from hvd_compress.process_group.collectives import Over
from hvd_compress.process_group.device_collectives import meeting_place
from hvd_compress.process_group.driver import Driver
from hvd_compress.process_group.ranks import GroupRanks
from hvd_compress.process_group.step import Bucket, Step
from hvd_compress.ranks.errors import ExchangeError


class CallRanks(GroupRanks):
    """The ranks of a process group, whose threads send what all ranks have agreed on.

    Args:
        process_group: the ranks; None is the group of the first call, or the default group.

    Attributes:
        under_way: the calls that have not been waited for.
        comparisons: the line of the comparisons, or None before the first call.
        drops: the number of calls of ``drop_step()``.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__(process_group)
        self.under_way: list[Bucket] = []
        self.move(process_group)

    def move(self, process_group: dist.ProcessGroup | None) -> None:
        """Begins anew in another process group, which :meth:`join` then joins."""
        self.process_group = process_group
        self.comparisons: Comparisons | None = None
        self._calls = self.drops = 0

    @property
    def busy(self) -> bool:
        """Whether a call has not been waited for."""
        return bool(self.under_way)

    def take(self, group: dist.ProcessGroup | None) -> None:
        """Takes the process group of a call, if there is none yet.

        Raises:
            ValueError: there is another one.
        """
        if group is None or group is (self.process_group or dist.group.WORLD):
            return
        if self.joined or self.process_group is not None:
            raise ValueError(
                "all_reduce.group: expected the process group of the compressor, got another one: make a "
                "compressor for each group"
            )
        self.process_group = group

    def begin_call(self, device: torch.device | None, *, first: bool) -> bool:
        """Connects the ranks for a call with tensors on a device; None for a call without a tensor.

        Args:
            device: the device of the tensors.
            first: whether no call has had tensors yet.

        Returns:
            Whether :attr:`device` may be another one than before.
        """
        if self.comparisons is None:
            self.connect(device or meeting_place(self.process_group))
            self.comparisons = known_comparisons(self.collectives) or Comparisons(self.collectives)
            return True
        # Another compressor among these ranks may have made them.
        self.comparisons = known_comparisons(self.collectives) or self.comparisons
        if self._driver is None and first and device is not None and device != self.device:
            self.connect(device)  # Earlier calls have failed, perhaps without a tensor.
            return True
        return False

    @property
    def driver(self) -> Driver:
        """The driver, in groups of its own; every rank makes it when all ranks agree."""
        if self._driver is None:
            self.comparisons = make_comparisons(self.collectives)
            ranks = self.collectives.among(range(self.group.size))
            self._driver = Driver(ranks, self.group)
        return self._driver

    def forget_agreement(self) -> None:
        """Does nothing: every call compares."""

    def compare(self, settings: dict[str, Any], over: Over | None = None) -> None:
        """Compares what the ranks are about to do; does not wait if ``over`` is there to get the result.

        Raises:
            ExchangeError: the settings differ (raised on every rank).
        """
        assert self.comparisons is not None
        # A compressor that was made anew on some ranks only would have no process groups yet.
        counted = {"calls before": self._calls, "calls of drop_step": self.drops}
        self._calls += 1
        if over is not None:
            self.comparisons.start({**settings, **counted}, over)
            return
        answers: SimpleQueue[Exception | None] = SimpleQueue()
        self.comparisons.start({**settings, **counted}, answers.put)
        error = answers.get()
        if error is not None:
            raise error

    def tell(self, problem: Exception) -> None:
        """Makes the other ranks raise an error, too; their own calls may be right."""
        with contextlib.suppress(ExchangeError):
            self.compare({"error": f"{type(problem).__name__}: {problem}"})

    def send(
        self, bucket: Bucket, exchanges: set[tuple[str, bool]], settings: dict[str, Any]
    ) -> None:
        """Sends a packed bucket when the ranks are known to agree on the settings of the call.

        Args:
            bucket: the bucket.
            exchanges: see :meth:`.Driver.prepare`. With new ones, this method waits for the other ranks.
            settings: the settings that the ranks compare.
        """
        if self._driver is not None and exchanges <= self._driver.prepared:
            self.compare(settings, lambda error: self._go(bucket, error))
            return
        self.compare(settings)
        self.finish()
        self.driver.prepare(exchanges)
        self._go(bucket, None)

    def finish(self) -> None:
        """Waits for the results, or the errors, of the calls under way."""
        for bucket in self.under_way:
            with contextlib.suppress(Exception):
                bucket.future.wait()

    def close(self) -> None:
        """Closes the connections to the other ranks."""
        for one in (self.comparisons, self._driver):
            if one is not None:
                one.close()

    def _go(self, bucket: Bucket, error: Exception | None) -> None:
        """Sends a packed bucket; called by a process group's thread, or by the caller's thread."""
        try:
            if error is not None:
                raise error
            Step(self.collectives, self.driver).send_alone(bucket)
        except Exception as problem:
            bucket.resolve(problem)
