"""The gradients that an exchange sends together, and the exchange while it runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch
from torch.autograd import profiler

from hvd_compress.exchanges.comm import Collective, Exchanging, Scope
from hvd_compress.ranks.counters import Counters

_NO_LABEL = nullcontext()


def phase(name: str) -> AbstractContextManager[object]:
    """Labels the work in the ``with`` block as ``hvd_compress::NAME`` in the traces of ``torch.profiler``.

    Without a profiler, this is only the test whether there is one.

    Args:
        name: ``"encode"``, ``"send"``, ``"average"`` or ``"decode"``.
    """
    if not profiler._is_profiler_enabled:
        return _NO_LABEL
    return profiler.record_function(f"hvd_compress::{name}")


@contextmanager
def timed(name: Literal["encode", "decode"], counters: Counters) -> Iterator[None]:
    """Labels the work in the ``with`` block like :func:`phase`, and adds its time to the counters."""
    started = time.perf_counter()
    try:
        with phase(name):
            yield
    finally:
        field = f"{name}_seconds"
        setattr(counters, field, getattr(counters, field) + time.perf_counter() - started)


class Content:
    """The gradients that an exchange sends together.

    Args:
        deferred: whether the host must not wait for the gradients' device.

    Attributes:
        error: the first error on this rank; None without one.
        nonfinite: whether some rank sent an Inf or a NaN, or a sum became one, as far as the host knows.
        word: a word on the device, shape=(1,), int32, not 0 if some rank sent an Inf or a NaN, or a sum
            became one; None unless only the device knows.
    """

    error: Exception | None = None
    nonfinite = False
    word: torch.Tensor | None = None

    def __init__(self, deferred: bool) -> None:
        self._deferred = deferred
        self._counts = Counters()

    def write(self, scale: float) -> None:
        """Writes ``scale`` times the sum of the ranks' gradients over the gradients."""
        raise NotImplementedError

    def settle(self, dropped: bool | torch.Tensor) -> None:
        """Ends the step; ``dropped`` as from :func:`hvd_compress.engine.batch.judge`."""

    def see(self, finite: torch.Tensor) -> None:
        """Drops the step if some number was not finite: loss scalers skip such a step.

        ``finite`` says whether all were, shape=(), bool, on the gradients' device.
        """
        if self._deferred:
            word = finite.logical_not().int().view(1)
            self.word = word if self.word is None else self.word | word
        else:
            self.nonfinite |= not bool(finite)

    def note(self, collective: Collective) -> None:
        """Counts the bytes of a collective; called with every collective that the exchange asks for."""
        # Not the collective itself: its message must not be kept until the step is over.
        collective.count(self._counts)

    def count(self, counters: Counters) -> None:
        """Adds the bytes sent, the elements encoded and the times to the counters."""
        counters.add(self._counts)


class Run:
    """A running exchange of gradients that are sent together.

    Args:
        exchanging: the generator. The constructor runs it up to its first collective, so that it encodes.
        content: the gradients, which count every collective that the exchange asks for.
        stages: the scopes of the exchange's collectives, in order.
        remainders: the scopes of the additional collectives if messages were too short.
        name: the name of the exchange's collectives, the same on every rank; empty where they have none.
        number: the exchange's position in an order that is the same on every rank.

    Attributes:
        content, stages, remainders, name: the arguments of these names.
        stage: the number of collectives that are over, without remainders.
        request: the collective that the exchange waits for; None at the end.
        error: the error of the generator or of a collective; None without one.
    """

    def __init__(
        self,
        exchanging: Exchanging,
        content: Content,
        stages: Sequence[Scope] = ("all",),
        remainders: Sequence[Scope] = (),
        *,
        name: str = "",
        number: int = 0,
    ) -> None:
        self.content = content
        self.stages, self.remainders = stages, remainders
        self.name = name
        self.number = number
        self.stage = 0
        self.request: Collective | None = None
        self.error: Exception | None = None
        self._exchanging = exchanging
        self._go_on(lambda: next(exchanging))

    @property
    def label(self) -> str:
        """The name of the collective that the exchange waits for."""
        remainder = self.request is not None and self.request.remainder
        return f"{self.name}, stage {self.stage}" + ", remainder" * remainder

    @property
    def place(self) -> tuple[int, bool, int]:
        """The position of the collective that the exchange waits for, in the order in which ranks wait."""
        remainder = self.request is not None and self.request.remainder
        return self.stage, remainder, self.number

    def resume(self, result: torch.Tensor) -> None:
        """Continues with a collective's result, to the next collective or to the end; never raises."""
        self._go_on(lambda: self._exchanging.send(result))

    def fail(self, error: Exception) -> None:
        """Ends the exchange with an error; only the first error is kept."""
        self.request = None
        self.error = self.error or error

    @torch.no_grad()
    def _go_on(self, step: Callable[[], Collective]) -> None:
        try:
            self._ask(step())
            while self.request is not None and self.request.own is not None:
                self._ask(self._exchanging.send(self.request.own))
        except StopIteration:
            self.request = None
        except Exception as error:
            self.fail(error)

    def _ask(self, request: Collective) -> None:
        # A remainder belongs to the stage before, whether some ranks of a host need one or not.
        if self.request is not None and not request.remainder:
            self.stage += 1
        self.request = request
        self.content.note(request)
