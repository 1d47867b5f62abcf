"""The ranks of ``all_reduce``, which compare what they are about to send in every call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from hvd_compress.process_group.agreement import (
    Comparisons,
    known_comparisons,
    make_comparisons,
)
from hvd_compress.process_group.collectives import Collectives, Over
from hvd_compress.process_group.device_collectives import meeting_place
from hvd_compress.process_group.driver import Driver
from hvd_compress.process_group.ranks import GroupRanks
from hvd_compress.process_group.step import Bucket, Step
from hvd_compress.ranks.errors import ExchangeError


@dataclass
class Norms:
    """The norms of all ranks' residuals, which ranks tell each other without waiting.

    Attributes:
        ranks: the collectives among the ranks, in a group that nothing else uses.
        shares: the number of times that this rank has told its own.
        early: whether it told the last one before an exchange, and not after it.
        arrived: the number of this rank's share that the others' latest norms belong to.
        values: these norms, shape=(ranks,), float64.
    """

    ranks: Collectives
    shares: int = 0
    early: bool = False
    arrived: int = 0
    values: torch.Tensor = field(
        default_factory=lambda: torch.empty(0, dtype=torch.float64, device="cpu")
    )

    @property
    def complete(self) -> bool:
        """Whether the norms of all ranks have arrived since the last exchange."""
        return 0 < self.shares == self.arrived and not self.early

    def share(self, own: torch.Tensor, *, early: bool) -> None:
        """Sends this rank's norm, shape=(1,), to all ranks without waiting."""
        self.shares, self.early = self.shares + 1, early
        share = self.shares

        def keep(error: Exception | None) -> None:
            # A group has several threads, which may finish an earlier gathering last.
            if error is None and share > self.arrived:
                self.arrived, self.values = share, rows.view(-1)

        # If a rank is lost, the next exchange reports it.
        with contextlib.suppress(RuntimeError):
            rows, work = self.ranks.all_gather(own)
            self.ranks.when_over(work, keep)

    def of(self, ranks: Iterable[int]) -> str:
        """The norm of the residuals of some ranks together, in words."""
        if not self.arrived:
            return "unknown"
        together = self.values.square()[list(ranks)].sum().sqrt().item()
        return f"{together:.6g}" + ("" if self.complete else " before the last exchange")


class CallRanks(GroupRanks):
    """The ranks of a process group, whose threads send what all ranks have agreed on.

    Args:
        process_group: the ranks; None is the group of the first call, or the default group.

    Attributes:
        under_way: the calls that have not been waited for.
        comparisons: the line of the comparisons, or None before the first call.
        drops: the number of calls of ``drop_step()``.
        norms: the norms of the ranks' residuals, if ranks have met.
    """

    idle_after = "wait() of every all_reduce"

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__(process_group)
        self.under_way: list[Bucket] = []
        self.norms: Norms | None = None
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
        own = None if self.norms is None else self.norms.ranks
        for one in (self.comparisons, self._driver, own):
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
