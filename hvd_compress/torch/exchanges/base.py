"""What an exchange is: a way for one gradient at a time, in one or several collectives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from hvd_compress.exchange.counters import Counters
from hvd_compress.exchange.errors import ExchangeError
from hvd_compress.exchange.routing import Route
from hvd_compress.torch.collectives import Collectives, Handle
from hvd_compress.torch_common.encoder import Encoder
from hvd_compress.torch_common.slots import Owned, Slot


class Exchange(ABC):
    """A way from every rank's gradient to their sum on every rank.

    Attributes:
        collectives: the ranks.
        encoder: what this rank encodes with.
    """

    def __init__(self, collectives: Collectives, encoder: Encoder) -> None:
        self.collectives = collectives
        self.encoder = encoder

    @property
    def usable(self) -> bool:
        """Whether it makes sense among these ranks; the same on every one of them."""
        return True

    @abstractmethod
    def check(self, slot: Slot, route: Route) -> None:
        """Raises ``ValueError`` where a parameter's gradients cannot go this way."""

    def settings(self) -> dict[str, Any]:
        """What has to be the same on every rank, besides the routes."""
        return {}

    def prepare(self, slots: Sequence[Slot]) -> None:
        """Called when all ranks have agreed on their routes, at a place that they all reach; may wait.

        Args:
            slots: the parameters whose gradients will go this way.
        """
        return

    def flush(self) -> list[Relay]:
        """Sends what waits for others to go with it: no more will come in this step."""
        return []

    @abstractmethod
    def encode(self, slot: Slot, gradient: torch.Tensor) -> Transfer:
        """Encodes a gradient; residuals and the position in the noise move on.

        What another exchange left unsent, and this one cannot send, is added to the gradient.

        Args:
            slot: whose gradient.
            gradient: of the slot's shape, in any order of memory.
        """

    def owned(self, slot: Slot) -> Owned | None:
        """An empty record of what this rank owns of a parameter; None where the exchange has no owners."""
        return None

    def _own(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Has ``slot.owned`` be this exchange's, with a residual where there is feedback."""
        self.encoder.own(slot, gradient, self.owned(slot))


class Relay(ABC):
    """Collectives, one after the other.

    At any time it waits for one of them, and whoever notices that this one is over calls :meth:`advance`,
    which starts the next. Nothing in here waits.

    Attributes:
        handle: of the collective under way; None before the first and after the last.
        error: what went wrong, to be raised by whoever waits for the step.
    """

    single: ClassVar[bool] = False
    """Whether there is but one collective, so that nobody has to start the next."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self.handle: Handle | None = None
        self.error: Exception | None = None

    def advance(self) -> None:
        """Takes the result of the collective that is over, and starts the next one, if any.

        Never raises: an error is kept, for hooks and helpers have nobody to tell.
        """
        assert self.handle is not None
        handle, self.handle = self.handle, None
        try:
            self._arrived(self._collectives.wait(handle))
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Ends it with an error; the first one counts."""
        self.handle = None
        self.error = self.error or error

    @abstractmethod
    def _arrived(self, result: torch.Tensor) -> None:
        """:meth:`advance`, which errors leave."""


class Transfer(ABC):
    """An encoded gradient on its way through the ranks, in one step.

    Attributes:
        name: the parameter's, for messages and collectives.
        flat: the gradient's elements, shape=(n,), as they were given; the result is written over them.
        error: what went wrong, to be raised by whoever waits for the step.
    """

    error: Exception | None

    def __init__(self, name: str, flat: torch.Tensor) -> None:
        self.name = name
        self.flat = flat

    @abstractmethod
    def start(self) -> Relay | None:
        """Sends it: all ranks are known to take part in this step.

        Returns:
            The collectives that this has started; None where it waits for others to go with it.
        """

    @property
    @abstractmethod
    def payloads(self) -> Sequence[torch.Tensor] | None:
        """What tells of an Inf or a NaN that a rank sent: payloads, each shape=(k, bytes), uint8.

        They tell the same on every rank. None where the host knows already that the step is to be dropped:
        what was encoded was not sent, or was not finite.
        """

    @abstractmethod
    def take_back(self, when: torch.Tensor | None = None) -> None:
        """Undoes what sending did to this rank's state; ``flat`` still holds the gradient.

        Args:
            when: as for :meth:`hvd_compress.torch_common.pieces.Piece.take_back`.
        """

    @abstractmethod
    def write(self, scale: float) -> None:
        """Writes ``scale`` times the sum of the ranks' gradients to ``flat``.

        Raises:
            PayloadError: a payload was altered on its way.
        """

    @abstractmethod
    def count(self, counters: Counters) -> None:
        """Adds what was sent and computed to the counters."""

    @abstractmethod
    def alone(self) -> Transfer:
        """What to do in its place where some ranks do not take part: a plain sum among the others."""


class Uncompressed(Transfer, Relay):
    """The ranks' gradients, added by Horovod in place of a transfer that was not started.

    A rank that has joined adds zeros here, and nothing else can be done with it.
    """

    single: ClassVar[bool] = True

    def __init__(self, collectives: Collectives, instead_of: Transfer) -> None:
        Transfer.__init__(self, instead_of.name, instead_of.flat)
        Relay.__init__(self, collectives)
        self._instead_of = instead_of
        self._sum: torch.Tensor | None = None

    def start(self) -> Relay | None:
        """See :meth:`Transfer.start`."""
        self.handle = self._collectives.sum(self.flat.float(), f"{self.name}.dense")
        return self

    @property
    def payloads(self) -> None:
        """See :attr:`Transfer.payloads`."""
        return

    def take_back(self, when: torch.Tensor | None = None) -> None:
        """See :meth:`Transfer.take_back`."""
        self._instead_of.take_back(when)

    def write(self, scale: float) -> None:
        """See :meth:`Transfer.write`."""
        assert self._sum is not None
        self.flat.copy_(self._sum.mul_(scale))

    def count(self, counters: Counters) -> None:
        """See :meth:`Transfer.count`."""
        counters.add_allreduce(self._collectives.size, 4 * self.flat.numel())

    def alone(self) -> Transfer:
        """See :meth:`Transfer.alone`."""
        return self

    def _arrived(self, result: torch.Tensor) -> None:
        self._sum = result


class Refused(Uncompressed):
    """An error in place of a transfer that ranks which have joined would be needed for."""

    def __init__(self, collectives: Collectives, instead_of: Transfer, message: str) -> None:
        super().__init__(collectives, instead_of)
        self.error = ExchangeError(message)

    def start(self) -> None:
        """Nothing is sent."""
        return
