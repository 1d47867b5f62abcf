"""The exchange of one optimizer step's gradients, which hooks start and no hook waits for."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hvd_compress.codecs import PayloadError
from hvd_compress.engine.autograd import after_backward
from hvd_compress.engine.batch import Batch, judge
from hvd_compress.engine.batches import Batches
from hvd_compress.engine.parameters import Slot
from hvd_compress.engine.run import Content, Run
from hvd_compress.engine.uncompressed import Uncompressed
from hvd_compress.exchanges import buckets
from hvd_compress.exchanges.hosts import Hosts
from hvd_compress.ranks import token
from hvd_compress.ranks.counters import Counters
from hvd_compress.ranks.errors import ExchangeError
from hvd_compress.torch.collectives import HorovodCollectives
from hvd_compress.torch.participation import Participation
from hvd_compress.torch.progress import Poller

_log = logging.getLogger(__name__)

_TIMEOUT = 60.0
"""Seconds to wait for the participation check, which every rank normally has started already."""

_REPORTED = 60.0
"""Seconds after which a line in the log reports ranks that are waited for. Only Horovod, whose stall check
also names these ranks, ends the wait."""

_TIMEOUT_OF_SOME = 10.0
"""The same where Horovod has reduced something for only some of the ranks: the others have joined, and take
part by themselves, or they are not the optimizer's and never will."""

_MOST_SCALES = 64
"""The most factors to remember: ranks that come and go would make their number unlimited."""

_TIMEOUT_IN_BACKWARD = 5.0
"""Seconds to wait for slower ranks at the end of a backward pass; the rest is waited for later."""


class HorovodStep:
    """Sends buckets when all ranks are known to take part in a step, and collects them.

    Nothing waits in a hook, because hooks fire in another order on each rank. Messages that the hooks could
    not start are started at the end of the backward pass, the first place that all ranks reach.

    Args:
        collectives: the collectives among the ranks.
        batches: encodes buckets.
        configuration: the same as in :class:`Participation`.
        hosts: called once the ranks agree; returns the hosts that some exchange distinguishes, or None.
        settle: called with whether the step is dropped, once that is known.
        warming_up: tells whether a gradient belongs to the cold start, and is not encoded.
    """

    def __init__(
        self,
        collectives: HorovodCollectives,
        batches: Batches,
        configuration: Callable[[], dict[str, Any]],
        hosts: Callable[[], Hosts | None],
        settle: Callable[[bool | torch.Tensor], None],
        warming_up: Callable[[Slot], bool],
    ) -> None:
        self._warming_up = warming_up
        self._cold: set[Slot] = set()
        self._idle: set[Slot] = set()
        self._collectives = collectives
        self._batches = batches
        self._hosts = hosts
        self._settle = settle
        self._participation = Participation(collectives, configuration, self._prepare)
        self._progress = Poller(collectives)
        self._buckets = Buckets()
        self._held: list[Run] = []
        self._encoded = False
        # By token and participation check, which are the same in most steps.
        self._scales: dict[tuple[float, ...], float] = {}

    @property
    def busy(self) -> bool:
        """Whether gradients are being sent."""
        return self._encoded

    @property
    def complete(self) -> bool:
        """Whether all ranks take part in the step; known after :meth:`settle`."""
        return self._participation.complete

    def plan(self, slots: Iterable[Slot]) -> None:
        """Composes new buckets of gradients that will be encoded; the next step compares settings again."""
        self._participation.forget()
        self._buckets.plan(slots)

    def begin(self) -> None:
        """Called before a step's first gradient."""
        self._cold.clear()
        self._idle.clear()
        self._participation.begin()
        # Outside of a backward pass it is refused: then the first decompress will do it.
        with contextlib.suppress(RuntimeError):
            after_backward(self._at_end_of_backward)

    def add(
        self, slot: Slot, gradient: torch.Tensor, counters: Counters, *, idle: bool = False
    ) -> None:
        """Takes a gradient that is to be encoded; sends its bucket if that is complete.

        Args:
            slot: the slot of the gradient's parameter.
            gradient: the gradient, which the result overwrites.
            counters: the counters, to which encoded elements are added.
            idle: whether this rank does not train the parameter now. If no rank does, its residual stays.
        """
        self._encoded = True
        if idle:
            self._idle.add(slot)
        if self._warming_up(slot):
            self._cold.add(slot)
        bucket = self._buckets.add(slot, gradient)
        if bucket is not None:
            self._send(bucket, counters)
        # Not before the ranks agree: what follows the agreement may wait for all of them.
        if self._held and self._participation.agreed:
            self._release(0.0)

    @torch.no_grad()
    def settle(self, name: str, reduced: torch.Tensor | None) -> None:
        """Waits until all ranks are known to agree and to take part, and starts the messages held back.

        Called when Horovod has reduced something, for which all of the optimizer's ranks had to call it.

        Args:
            name: the tensor that was reduced, for the message.
            reduced: the token of the tensor, as Horovod reduced it; None for a tensor without a token.

        Raises:
            ExchangeError: ranks differ, or some of the compressor's ranks never take part.
        """
        if not self._participation.checked(0.0):
            size = self._collectives.size
            everybody = reduced is None or token.reduced_for_everybody(reduced.tolist(), size)
            if not self._participation.checked(_TIMEOUT if everybody else _TIMEOUT_OF_SOME):
                raise ExchangeError(
                    f"{name}: expected all {size} ranks of the compressor's process set, got "
                    f"only those of the optimizer: pass the same process_set to both, and make compressors "
                    f"in the same order on every rank"
                )
        while not self._release(_REPORTED):
            _log.warning(
                "%s: waiting for all ranks to compare their settings at the end of their first backward "
                "pass; some rank has not come to that in %g s",
                name,
                _REPORTED,
            )

    def scale(self, reduced: torch.Tensor, name: str) -> float:
        """The factor on the sum of the ranks' gradients that Horovod's operation implies.

        Args:
            reduced: the token, as Horovod reduced it.
            name: the tensor of the token, for the message.

        Raises:
            ExchangeError: the operation is not possible on compressed gradients; raised on every rank.
        """
        tokens = self._participation.tokens
        assert tokens is not None
        values = reduced.tolist()
        key = (*values, *tokens)
        scale = self._scales.get(key)
        if scale is None:
            try:
                scale = token.reduction_scale(values, tokens, self._collectives.size, name)
            except ExchangeError:
                self._barrier()
                raise
            if len(self._scales) >= _MOST_SCALES:
                self._scales.clear()
            self._scales[key] = scale
        return scale

    @torch.no_grad()
    def collect(self, scale: float, counters: Counters) -> None:
        """Waits for everything that was sent in this step, and writes the results over the gradients.

        One non-finite gradient makes the whole step worthless, so no residual may count it as sent.

        Args:
            scale: the factor on the sums of the ranks' gradients.
            counters: the counters, to which traffic and computation of the step are added.

        Raises:
            Exception: the error of this rank, or the message missing from another one.
        """
        for bucket in self._buckets.rest():
            self._send(bucket, counters)
        self._release(0.0)
        written: list[Content] = []
        errors: list[Exception] = []
        altered, sent = True, True
        for run in self._progress.finish():
            content = run.content
            try:
                if run.error is not None:
                    raise run.error
                content.write(scale)
                written.append(content)
            except Exception as error:
                errors.append(error)
                sent = sent and run.error is None
                altered = altered and isinstance(error, PayloadError) and content.error is None
        self._encoded = False
        if errors:
            # All ranks find the error, unless a payload was altered in transit. If this rank could not even
            # send zeros, for lack of memory, the others wait for its message and never reach a barrier.
            if not altered and sent:
                self._barrier()
            raise errors[0]
        dropped = judge(written)
        for content in written:
            content.settle(dropped)
            content.count(counters)
        self._settle(dropped)
        arrived = self._buckets.end()
        if arrived is not None:
            self._buckets.plan(arrived)

    def _send(self, bucket: HorovodBucket, counters: Counters) -> None:
        for encoded, name in ((True, bucket.name), (False, f"{bucket.name} cold")):
            slots, gradients = bucket.sorted(lambda slot: (slot in self._cold) != encoded)  # noqa: B023
            if not slots:
                continue
            used = [slot not in self._idle for slot in slots]
            run = self._batches.begin(
                slots, gradients, used, counters, encoded=encoded, name=name, number=bucket.number
            )
            self._held.append(run)

    def _release(self, timeout: float) -> bool:
        if not self._participation.known(timeout):
            return False
        held, self._held = self._held, []
        for run in held:
            self._progress.submit(run if self._participation.complete else self._uncompressed(run))
        return True

    def _uncompressed(self, run: Run) -> Run:
        """A plain sum among the ranks that take part, where some do not, in place of an exchange."""
        batch = run.content
        assert isinstance(batch, Batch)
        batch.withdraw()
        content = Uncompressed(batch.gradients, torch.float32, deferred=batch.plan.deferred)
        exchanging = content.exchange(self._batches.comm)
        plain = Run(exchanging, content, name=f"{run.name} uncompressed", number=run.number)
        if self._batches.common.owner_step is not None:
            names = ", ".join(slot.name for slot in batch.plan.slots)
            plain.fail(
                ExchangeError(
                    f"{names}: expected all {self._collectives.size} ranks to take part in a step with an "
                    f"owner_step, got some that have called hvd.join(); the parts that they own cannot be "
                    f"stepped"
                )
            )
        return plain

    def _prepare(self) -> None:
        hosts = self._hosts()
        if hosts is not None:
            self._collectives.register(hosts)

    def _barrier(self) -> None:
        if self._participation.complete:  # A rank that has joined comes to none.
            self._collectives.barrier()

    def _at_end_of_backward(self) -> None:
        self._release(_TIMEOUT_IN_BACKWARD)


@dataclass(eq=False)
class HorovodBucket:
    """Gradients that travel together.

    Attributes:
        name: the name of the bucket, the same on every rank.
        number: its position among the step's buckets, the same on every rank.
        wanted: the number of gradients that complete the bucket.
        gradients: the gradients that have arrived, by slot.
    """

    name: str
    number: int
    wanted: int
    gradients: dict[Slot, torch.Tensor] = field(default_factory=dict)

    def sorted(self, which: Callable[[Slot], bool]) -> tuple[tuple[Slot, ...], list[torch.Tensor]]:
        """Slots and gradients of the slots that ``which`` selects, in the order of the parameters."""
        slots = tuple(sorted(filter(which, self.gradients), key=lambda slot: slot.index))
        return slots, [self.gradients[slot] for slot in slots]


class Buckets:
    """The buckets of a step.

    They are composed of the parameters that had a gradient in the last step. Horovod's optimizer exchanges
    the same gradients on every rank, so the buckets are the same everywhere. A gradient that was not in the
    last step is a latecomer, and has its own bucket.
    """

    def __init__(self) -> None:
        self._buckets: dict[Slot, HorovodBucket] = {}
        self._waiting: dict[str, HorovodBucket] = {}
        self._arrived: set[Slot] = set()
        self._count = 0

    def plan(self, slots: Iterable[Slot]) -> None:
        """Composes new buckets of gradients that will be encoded."""
        self._buckets = {}
        self._count = 0
        kinds: dict[tuple[str, torch.device, torch.dtype], list[Slot]] = {}
        for slot in slots:
            parameter = slot.parameter
            kind = slot.route.kind, parameter.device, parameter.dtype
            kinds.setdefault(kind, []).append(slot)
        for members in kinds.values():
            by_index = {slot.index: slot for slot in members}
            for numbers in buckets.compose((slot.index, slot.count) for slot in members):
                bucket = HorovodBucket(f"bucket {self._count}", self._count, len(numbers))
                self._buckets.update({by_index[number]: bucket for number in numbers})
                self._count += 1

    def add(self, slot: Slot, gradient: torch.Tensor) -> HorovodBucket | None:
        """Adds a gradient; returns its bucket if that is complete now."""
        self._arrived.add(slot)
        planned = self._buckets.get(slot)
        if planned is None:
            planned = HorovodBucket(f"latecomer {slot.index}", self._count + slot.index, 1)
        bucket = self._waiting.get(planned.name)
        if bucket is None:
            bucket = self._waiting[planned.name] = replace(planned, gradients={})
        bucket.gradients[slot] = gradient
        return None if len(bucket.gradients) < bucket.wanted else self._waiting.pop(bucket.name)

    def rest(self) -> list[HorovodBucket]:
        """The buckets that wait for gradients which do not arrive in this step."""
        return [self._waiting.pop(name) for name in sorted(self._waiting)]

    def end(self) -> set[Slot] | None:
        """Ends a step; returns the parameters whose gradients arrived if they are not the planned ones."""
        arrived, self._arrived = self._arrived, set()
        return None if arrived == self._buckets.keys() else arrived
