"""torch.distributed's collectives within one process group."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from hvd_compress.exchanges.comm import Collective
from hvd_compress.process_group.private import is_unregistered, make_group
from hvd_compress.process_group.shutdown import close, hold, note_collectives, release_with
from hvd_compress.ranks.errors import ExchangeError

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""``all_gather_single``, or the function under its name before PyTorch 2.13."""

_REPORTED = 10.0
"""The time in seconds after which a message in the log names the ranks of a new group that still waits.
Only the group's own timeout ends the wait."""

_WAITING = "making a process group of ranks %s; some rank has not come to that in %g s"

_log = logging.getLogger(__name__)

Over = Callable[[Exception | None], None]
"""A function that any thread calls once when an operation has ended, with the error or with None."""


class Collectives:
    """Asynchronous collectives among the ranks of a process group.

    Collectives have no names, so all ranks have to start them in the same order. This class is for tensors
    in CPU memory; :mod:`hvd_compress.process_group.device_collectives` has classes for other tensors.

    Args:
        group: the process group; None is the default group.
        device: the device of the tensors.

    Attributes:
        meeting: the device of messages that the host reads, such as settings that ranks compare.

    Raises:
        ExchangeError: torch.distributed is not initialized, or this rank is not in the group.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ) -> None:
        initialized = dist.is_available() and dist.is_initialized()
        if not (initialized or is_unregistered(group)):
            raise ExchangeError(
                "expected torch.distributed.init_process_group() before a compressor is used, got no "
                "process group"
            )
        self._group = group
        self.device = self.meeting = device
        self.rank = dist.get_rank(group) if group is None else _rank_in(group)
        self.size = dist.get_world_size(group)
        if self.rank < 0:
            raise ExchangeError("expected a process group with this rank in it, got one without")
        note_collectives()

    def start(self, collective: Collective) -> tuple[torch.Tensor, dist.Work]:
        """Starts a collective of an exchange among these ranks.

        Returns:
            The tensor for the result, as :class:`Collective` describes it, and the work to wait for.
        """
        message = collective.message
        if collective.kind == "all_gather":
            rows = message.new_empty((self.size, message.numel()))
            return rows, _all_gather(rows.view(-1), message, group=self._group, async_op=True)
        if collective.kind == "all_reduce":
            op = dist.ReduceOp.SUM if collective.op == "sum" else dist.ReduceOp.MAX
            return message, dist.all_reduce(message, op, group=self._group, async_op=True)
        own = collective.sizes[self.rank]
        rows = message.new_empty((self.size, own))
        work = dist.all_to_all_single(
            rows.view(-1),
            message,
            output_split_sizes=[own] * self.size,
            input_split_sizes=list(collective.sizes),
            group=self._group,
            async_op=True,
        )
        return rows, work

    def all_gather(self, message: torch.Tensor) -> tuple[torch.Tensor, dist.Work]:
        """Starts an all_gather of a tensor, shape=(n,), the same n on every rank.

        Returns:
            The tensor for the ranks' messages, shape=(ranks, n), and the work to wait for.
        """
        return self.start(Collective("all_gather", message, self.size, self.rank, "all"))

    def gather_numbers(self, *numbers: int) -> list[list[int]]:
        """Every rank's numbers, by rank; as many on every rank. Waits for them."""
        own = torch.tensor(numbers, dtype=torch.int64, device=self.meeting)
        rows, work = self.all_gather(own)
        work.wait()
        told: list[list[int]] = rows.tolist()
        return told

    def among(self, ranks: Sequence[int]) -> Collectives:
        """Collectives in a new process group of some of these ranks, this rank included.

        All ranks of this group have to call it equally often, each time for groups without a common rank.
        Waits until the ranks of the new group have called it. The new group has the timeout of this group.

        Args:
            ranks: the numbers of the new group's ranks in this group.
        """
        everywhere = dist.get_process_group_ranks(self.group)
        report = threading.Timer(_REPORTED, _log.warning, (_WAITING, list(ranks), _REPORTED))
        report.daemon = True
        report.start()
        try:
            group = make_group(self.group, [everywhere[rank] for rank in ranks], self.device)
        finally:
            report.cancel()
        made = self._of(group)
        release_with(made, group)
        # A rank that freed the group now would end the connecting of another.
        made.gather_numbers(0)
        return made

    def when_over(self, work: dist.Work, over: Over) -> None:
        """Calls ``over`` when a collective has ended.

        The process group's thread calls it; or this thread at once, if the collective has already ended.
        """
        # Not a variable: where it is over, an error in what is called keeps this frame in its traceback.
        call = [functools.partial(_tell, [over])]
        hold(work, call[0], self.group)
        work.get_future().add_done_callback(call.pop())

    def lags(self, last: bool) -> bool:
        """Whether :meth:`when_over` is better called after the next bucket's first collective has started.

        Args:
            last: whether the collective is the last one of its exchange.
        """
        return False

    def gather(self, message: torch.Tensor) -> torch.Tensor | None:
        """The ranks' messages, shape=(ranks, n), on the first rank, None on the others; waits for them.

        Args:
            message: this rank's message, shape=(n,), the same n on every rank.
        """
        rows = message.new_empty((self.size, message.numel())) if self.rank == 0 else None
        received = None if rows is None else list(rows)
        dist.gather(message, received, group=self._group, group_dst=0)
        return rows

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Copies one rank's tensor to every rank, and waits for it."""
        dist.broadcast(tensor, group=self._group, group_src=source)

    def close(self) -> None:
        """Closes this rank's connections, if the backend allows it; nothing can be sent afterwards.

        Ranks that wait for this rank then get an error before their timeout.
        """
        close(self.group)

    def behind(self) -> AbstractContextManager[None]:
        """A context for work that follows a step's collectives, such as the calls of ``over``."""
        return nullcontext()

    def begin_step(self) -> None:
        """Called before the first work of a step, which has to follow the work of earlier steps."""
        return

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of the ranks."""
        group = self._group or dist.group.WORLD
        assert group is not None
        return group

    def _of(self, group: dist.ProcessGroup) -> Collectives:
        return Collectives(group, self.device)


def message(content: bytes, length: int, device: torch.device) -> torch.Tensor:
    """Bytes as a tensor, padded with zeros at the end, shape=(length,), uint8."""
    return torch.frombuffer(bytearray(content.ljust(length, b"\0")), dtype=torch.uint8).to(device)


def contents(rows: torch.Tensor, lengths: Sequence[int]) -> list[bytes]:
    """The bytes of gathered messages without padding.

    Args:
        rows: the messages, shape=(ranks, bytes of the longest message), uint8.
        lengths: the number of bytes in each message.
    """
    pairs = zip(rows.cpu().numpy(), lengths, strict=True)
    return [row[:length].tobytes() for row, length in pairs]


def _rank_in(group: dist.ProcessGroup) -> int:
    return group.rank() if is_unregistered(group) else dist.get_rank(group)


def _tell(held: list[Over], done: torch.futures.Future) -> None:
    over = held.pop()
    try:
        try:
            done.value()
        except Exception as error:
            over(error)
        else:
            over(None)
    finally:
        # It may have the last reference to the owner of this thread's process group. As long as the
        # callback is there, the group is not freed.
        del over
