"""The collectives of one optimizer step, started from hooks and waited for outside of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hvd_compress.exchange import agreement, token
from hvd_compress.exchange.errors import ExchangeError
from hvd_compress.torch.collectives import Collectives, Handle
from hvd_compress.torch.courier import Courier
from hvd_compress.torch.exchanges.base import Relay, Transfer
from hvd_compress.torch_common.executors import Executors, any_nonfinite
from hvd_compress.torch_common.slots import Slot

_PATIENCE = 60.0
"""Seconds for collectives that every rank has started already, if all is well."""

_PATIENCE_IN_BACKWARD = 20.0
"""Seconds for slower ranks at the end of a backward pass; what is not there then is waited for later."""


@dataclass(eq=False)
class Sent:
    """A gradient between compress and decompress.

    Attributes:
        slot: whose gradient.
        gradient: the tensor that compress was given; decompress gives it back.
        transfer: its way through the ranks.
        collected: whether it has come back.
        dropped: whether the step's residuals have to be taken back.
        unread: the same in a word on the device, not 0 if so, which the host has not read; None where
            ``dropped`` says it all.
    """

    slot: Slot
    gradient: torch.Tensor
    transfer: Transfer
    collected: bool = False
    dropped: bool = False
    unread: torch.Tensor | None = None


class Step:
    """Starts transfers when all ranks are known to take part in a step, and collects them.

    A gather among ranks of which one has joined would bring Horovod down, so that payloads are held back
    until a roll call has come back: a sum of a few bytes, started by the step's first gradient. Nothing
    waits in a hook, because hooks fire in another order on each rank; what the hooks leave to be started
    is started at the end of the backward pass, the first place that all ranks reach.

    Args:
        collectives: the ranks.
        configuration: called before the first step, and until the ranks agree; compared between them.
        executors: the kernels.
        prepare: called once they agree, by every rank; may wait for the others.
        flush: called when nothing more will be sent in a step; starts what has waited for more.
    """

    def __init__(
        self,
        collectives: Collectives,
        configuration: Callable[[], dict[str, Any]],
        executors: Executors,
        prepare: Callable[[], None],
        flush: Callable[[], list[Relay]],
    ) -> None:
        self._collectives = collectives
        self._configuration = configuration
        self._executors = executors
        self._prepare = prepare
        self._flush = flush
        self._settings = b""
        self._agreement: Handle | None = None
        self._agreed = False
        self._calling: Handle | None = None
        self._courier = Courier(collectives)
        self._pending: list[Sent] = []
        self._held: list[Sent] = []
        self.roll_call: list[float] | None = None

    @property
    def busy(self) -> bool:
        """Whether gradients are on their way."""
        return bool(self._pending)

    def forget_agreement(self) -> None:
        """Has the ranks compare their configurations again in the next step."""
        self._agreed, self._agreement = False, None

    def begin(self) -> None:
        """Called with every gradient, encoded or not, before it is sent."""
        if not self._agreed and self.roll_call is None and self._calling is None:
            # As it is before the step's first gradient is encoded.
            self._settings = agreement.serialize(self._configuration())
            self._call_roll()

    def add(self, sent: Sent) -> None:
        """Sends one gradient, now or as soon as all ranks are known to take part."""
        self._pending.append(sent)
        self._held.append(sent)
        if self.roll_call is None and self._calling is None:
            self._call_roll()
        elif self._agreed:
            self._release(0.0)

    def settle(self, name: str) -> None:
        """Waits until all ranks are known to agree and to take part, and has started what was held back.

        Called when Horovod has reduced something, for which all of the optimizer's ranks had to come here.

        Args:
            name: the tensor that was reduced, for the message.

        Raises:
            ExchangeError: ranks differ, or some of the compressor's ranks never come.
        """
        if not self._release(_PATIENCE):
            raise ExchangeError(
                f"{name}: expected all {self._collectives.size} ranks of the compressor's process set, got "
                f"only those of the optimizer: pass the same process_set to both"
            )

    def scale(self, reduced: torch.Tensor, name: str) -> float:
        """The factor on the sum of the ranks' gradients that Horovod's operation stands for.

        Args:
            reduced: the token, as Horovod reduced it.
            name: the tensor whose token it is, for the message.

        Raises:
            ExchangeError: on every rank, an operation that cannot be done on compressed gradients.
        """
        assert self.roll_call is not None
        try:
            return token.reduction_scale(
                reduced.tolist(), self.roll_call, self._collectives.size, name
            )
        except ExchangeError:
            if self._complete():
                self._collectives.meet()
            raise

    def collect(self) -> None:
        """Waits for everything sent in this step, and sees whether the step will have to be dropped.

        Horovod asks for the first result after it has sent all gradients. One non-finite gradient makes
        the whole step worthless, so that no residual may count it as sent.
        """
        pending, self._pending = self._pending, []
        for relay in self._flush():
            self._courier.carry(relay)
        self._courier.wait()
        errors = [sent.transfer.error for sent in pending if sent.transfer.error is not None]
        if errors:
            if self._complete():  # A rank that has joined does not come to meetings.
                self._collectives.meet()
            raise errors[0]
        dropped, unread = self._judge([sent.transfer for sent in pending])
        for sent in pending:
            sent.collected, sent.dropped, sent.unread = True, dropped, unread

    def end(self) -> None:
        """Called when the next gradient belongs to a new step."""
        self.roll_call = None

    def _judge(self, transfers: list[Transfer]) -> tuple[bool, torch.Tensor | None]:
        """Whether the step has to be dropped; or a word on the one device that knows."""
        payloads: list[torch.Tensor] = []
        for transfer in transfers:
            if transfer.payloads is None:
                return True, None
            payloads += transfer.payloads
        unread = self._executors.flags(payloads) if payloads else None
        return unread is None and any(map(any_nonfinite, payloads)), unread

    def _call_roll(self) -> None:
        values = torch.tensor(token.make(self._collectives.rank))
        self._calling = self._collectives.sum(values, "roll call")
        self._visit_end_of_backward()

    def _agree(self, patience: float) -> bool:
        if self._agreement is None:
            message = torch.frombuffer(bytearray(self._settings), dtype=torch.uint8)
            self._agreement = self._collectives.gather(message, "configuration")
        if not self._collectives.done(self._agreement, patience):
            return False
        gathered = self._collectives.wait(self._agreement)
        try:
            agreement.check(gathered.numpy().tobytes())
        except ExchangeError:
            self._collectives.meet()
            raise
        self._prepare()
        self._agreed = True
        return True

    def _release(self, patience: float) -> bool:
        if self._calling is not None:
            if not self._collectives.done(self._calling, patience):
                return False
            self.roll_call = self._collectives.wait(self._calling).tolist()
            self._calling = None
        # A gather, like those that follow: a rank that has joined could take no part in it.
        if not self._agreed and self._complete() and not self._agree(patience):
            return False
        held, self._held = self._held, []
        for sent in held:
            if not self._complete():
                sent.transfer = sent.transfer.alone()
            relay = sent.transfer.start()
            if relay is not None:
                self._courier.carry(relay)
        return True

    def _complete(self) -> bool:
        return self.roll_call is None or token.everybody(self.roll_call, self._collectives.size)

    def _visit_end_of_backward(self) -> None:
        # Outside of a backward pass it is refused: then the first decompress will do it.
        with contextlib.suppress(RuntimeError):
            torch.autograd.Variable._execution_engine.queue_callback(self._at_end_of_backward)

    def _at_end_of_backward(self) -> None:
        self._release(_PATIENCE_IN_BACKWARD)
