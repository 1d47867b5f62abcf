"""Gradients that are encoded, sent and decoded together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from hvd_compress.engine import packing
from hvd_compress.engine.executors import Columns, keep_from_reuse
from hvd_compress.engine.failures import explained
from hvd_compress.engine.plan import BucketPlan, BucketResiduals, Table
from hvd_compress.engine.residuals import transpose, transpose_back
from hvd_compress.engine.run import Content, phase, timed
from hvd_compress.engine.uncompressed import all_finite
from hvd_compress.exchanges.comm import Comm, Sending
from hvd_compress.exchanges.layout import USED, Piece
from hvd_compress.kernels.batch import BatchPayloadError
from hvd_compress.kernels.cpu_arrays import FixedArrays
from hvd_compress.ranks.counters import Counters
from hvd_compress.ranks.errors import ExchangeError


class Batch(Content):
    """The gradients of one bucket in one step, which an exchange encodes, sends and loads.

    Encoding writes the next residuals; :meth:`settle` accepts or discards them, and advances the positions
    in the noise. A rank whose work fails sends zeros, so that no other rank waits for it in vain:
    :attr:`error` keeps the error, and :meth:`write` raises it.

    Args:
        plan: the plan of the bucket.
        gradients: one gradient for each slot of the plan, with the slot's shape, all of one dtype, in any
            memory order; results are written over them.
        used: whether this rank's backward pass reached each parameter; None means all of them.
        encoded: whether anything is encoded; if not, residuals are added to the gradients.

    Attributes:
        plan: the plan of the bucket.
        residuals: the residuals of the gradients.
        gradients: the given gradients; results are written over them.
        flats: the gradients' elements in the order in which they are sent, shape=(n,) each: row-major, in
            the transposed matrix if ranks divide columns; empty after :meth:`write`.
        steps: the gradients' positions in the noise.
    """

    def __init__(
        self,
        plan: BucketPlan,
        gradients: Sequence[torch.Tensor],
        used: Sequence[bool] | None = None,
        *,
        encoded: bool = True,
    ) -> None:
        super().__init__(plan.deferred)
        self.plan: BucketPlan = plan
        self._encoded = encoded
        self._kernels = plan.common.kernels
        self.gradients = gradients
        self.order(gradients[0])
        self._used = [True] * len(gradients) if used is None else list(used)
        self._unused = [] if used is None else [n for n, one in enumerate(self._used) if not one]
        self._originals = {position: gradients[position].clone() for position in self._unused}
        self.residuals: BucketResiduals = BucketResiduals(
            plan, gradients, self._unused, encoded=encoded
        )
        flats = [gradient.ravel() for gradient in gradients]
        self._copied = [n for n, one in enumerate(gradients) if not one.is_contiguous()]
        if plan.transposed:
            for position, matrix in plan.transposed.items():
                flats[position] = transpose(gradients[position], matrix)
            self._copied = sorted({*self._copied, *plan.transposed})
        self.flats: Sequence[torch.Tensor] = FixedArrays(flats)
        self.steps = [slot.step for slot in plan.slots]
        self._write: Callable[[float], None] | None = None
        self._flags: torch.Tensor | None = None

    def encode(self, table: Table) -> torch.Tensor:
        """Encodes pieces of the gradients, with the slots' residuals.

        Args:
            table: the table of the message.

        Returns:
            The message, shape=(bytes,), uint8; zeros if the encoding fails.
        """
        return self._encode(table, self.flats, self.residuals.take_up, self.plan.transposed)

    def encode_averages(self, table: Table, averages: Sequence[torch.Tensor]) -> torch.Tensor:
        """Encodes averages of the parts that this rank owns, with the residuals of these parts.

        Args:
            table: the table of the message, whose pieces are these parts.
            averages: one average for each gradient, shape=(n,), float32.

        Returns:
            The message, shape=(bytes,), uint8; zeros if the encoding fails.
        """
        return self._encode(table, averages, lambda: self.residuals.beside(averages), {})

    def decode(
        self,
        table: Table,
        values: Sequence[torch.Tensor],
        rows: torch.Tensor,
        scale: float,
        sender: Callable[[Piece, int], int],
        *,
        role: str = "",
        word: torch.Tensor | None = None,
    ) -> bool:
        """Writes ``scale`` times the sum of every piece's payloads, of which each row has one.

        Args:
            table: the table of the message.
            values: the result, one array for each gradient, shape=(n,).
            rows: one message per row, shape=(k, bytes), uint8.
            scale: the factor of the sums.
            sender: the same as in :meth:`load`.
            role: the role in which this rank receives the payloads, for errors.
            word: a word on the device, shape=(1,), int32, for what only the device knows; see
                :class:`hvd_compress.kernels.batch.Batch`.

        Returns:
            Whether a payload was encoded from an Inf or a NaN, as far as the host knows.

        Raises:
            PayloadError: a payload was altered in transit.
            ExchangeError: a rank has sent no payload.
        """
        pieces, slots = table.layout.pieces, self.plan.slots

        def name(entry: int, row: int) -> tuple[str, int]:
            piece = pieces[entry]
            return f"{slots[piece.member].name}{role}", sender(piece, row)

        self.order(rows)
        if self.plan.deferred:
            keep_from_reuse(rows)
            table.kernels.name_senders(name)  # For errors that a later step raises.
        try:
            with self.decoding():
                return table.kernels.decode_sum(values, self.steps, rows, scale, word)
        except BatchPayloadError as error:
            payload = rows[error.rank, pieces[error.entry].offset :]
            raise explained(error, payload, *name(error.entry, error.rank)) from None

    def average(self, table: Table, rows: torch.Tensor, first: int = 0) -> Sequence[torch.Tensor]:
        """The ranks' averages of the parts that this rank owns, changed by the owner step.

        Args:
            table: the table of a row.
            rows: the ranks' messages to this rank, shape=(ranks, bytes), uint8.
            first: the rank of the first row.

        Returns:
            One average for each gradient, shape=(n,), float32; empty if this rank owns no element.
        """
        sizes, device = self.plan.owned_sizes, self.flats[0].device
        averages = FixedArrays.cut(
            torch.empty(sum(sizes), dtype=torch.float32, device=device), sizes
        )
        if not table.layout.pieces:
            return averages
        with phase("average"):
            self.decode(
                table,
                averages,
                rows,
                1 / len(rows),
                lambda _, row: first + row,
                role=", as its owner",
            )
            self.step_averages(averages)
        return averages

    def all_gather(self, comm: Comm, message: torch.Tensor, table: Table) -> Sending:
        """Gathers messages, packed if payloads may be short; see :func:`packing.all_gather`."""
        if self.plan.packed and comm.size > 1:
            return (yield from packing.all_gather(self, comm, message, table))
        return (yield comm.all_gather(message))

    def two_shots(
        self,
        comm: Comm,
        message: torch.Tensor,
        average: Callable[[torch.Tensor], torch.Tensor],
        parts: Table,
        own: Table,
        every: Table,
    ) -> Sending:
        """Sends parts to owners and gathers averages, packed like :meth:`all_gather`."""
        if self.plan.packed and comm.size > 1:
            return (yield from packing.two_shots(self, comm, message, average, parts, own, every))
        rows = yield comm.all_to_all(message, parts.layout.sections)
        return (yield comm.all_gather(average(rows)))

    def parts_to_owners(self) -> tuple[torch.Tensor, list[int]]:
        """All gradients' parts without encoding, ordered by owner, and the bytes for each owner."""
        cuts = self.plan.cuts
        shares = [
            flat.split_with_sizes(lengths) if len(lengths) > 1 else (flat,)
            for flat, lengths in zip(self.flats, cuts.lengths, strict=True)
        ]
        parts = torch.cat([shares[position][part] for position, part in cuts.by_owner])
        return parts.view(torch.uint8), [parts.element_size() * count for count in cuts.counts]

    def average_parts(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        """The same as :meth:`average`, from the ranks' messages of :meth:`parts_to_owners`.

        The ranks' parts are added in rank order from +0, without the owner step.
        """
        sizes = self.plan.owned_sizes
        sums = torch.zeros(sum(sizes), dtype=torch.float32, device=rows.device)
        for row in rows.view(-1).view(self.flats[0].dtype).view(len(rows), sums.numel()):
            sums += row
        return sums.mul_(1 / len(rows)).split(sizes)

    def step_averages(self, averages: Sequence[torch.Tensor]) -> None:
        """Changes finite averages in place with the owner step, if there is one.

        Args:
            averages: one average per gradient, shape=(n,), float32; empty if this rank owns no element.
        """
        if self.plan.common.owner_step is None:
            return
        for position, average in enumerate(averages):
            if average.numel() and bool(average.isfinite().all()):
                self._run_owner_step(position, average)

    def guard(
        self, work: Callable[[], torch.Tensor], size: int, dtype: torch.dtype = torch.uint8
    ) -> torch.Tensor:
        """Makes a message; keeps an error and returns zeros if that fails, since other ranks are waiting.

        Args:
            work: makes the message.
            size: the number of zeros after an error.
            dtype: the dtype of the zeros.
        """
        if self.error is None:
            try:
                return work()
            except Exception as error:
                self.error = error
        return torch.zeros(size, dtype=dtype, device=self.flats[0].device)

    def load(
        self,
        table: Table,
        rows: torch.Tensor,
        sender: Callable[[Piece, int], int],
        flags: torch.Tensor,
    ) -> None:
        """Takes the result of the last collective; :meth:`write` decodes it.

        If ranks divide gradients, the payloads hold averages over the ranks that send to the same owner.

        Args:
            table: the table of the pieces.
            rows: the messages, shape=(k, bytes), uint8; every piece's payloads are added.
            sender: returns the rank that has sent a piece's payload in a row. It should not refer to
                tensors: it may be needed when an error is found in a later step.
            flags: every rank's flags, shape=(senders, gradients), not 0 where the gradient was used.
        """
        owners = self.plan.owners

        def write(scale: float) -> None:
            scale = scale if owners is None else scale * owners.weight
            if table.layout.pieces and self.plan.deferred:
                self.word = torch.zeros(1, dtype=torch.int32, device=rows.device)
            self.nonfinite |= self.decode(table, self.flats, rows, scale, sender, word=self.word)

        self.load_by(write, flags)

    def count_senders(self, counted: int | torch.Tensor, what: str = "levels") -> None:
        """Keeps an error if a sum does not contain the numbers of all ranks.

        Args:
            counted: the number of ranks in the sum; a tensor on a device, shape=(), if the host must not
                wait for the number. A later step then raises the error.
            what: the name of the numbers, for the message.
        """
        size, known = self.plan.group.size, not isinstance(counted, torch.Tensor)
        if known and (counted == size or self.error is not None):
            return
        error = ExchangeError(
            f"{self.plan.names}: expected the {what} of all {size} ranks, got those of "
            f"{counted if known else 'fewer'}; the own errors of the others say why"
        )
        if isinstance(counted, torch.Tensor):
            self._kernels.raise_later(counted != size, error)
        else:
            self.error = error

    def load_by(self, write: Callable[[float], None], flags: torch.Tensor) -> None:
        """The same as :meth:`load`, for an exchange that does its own decoding.

        Args:
            write: writes ``scale`` times the sum of the ranks' gradients to :attr:`flats`.
            flags: the same as in :meth:`load`.
        """
        # A copy: a view would keep the messages of all ranks.
        self._write, self._flags = write, flags.clone()

    def write(self, scale: float) -> None:
        """Writes ``scale`` times the sum of the ranks' gradients over the gradients.

        Raises:
            PayloadError: a payload was altered in transit.
            ExchangeError: another rank has sent no payload.
            Exception: this rank's own work has failed.
        """
        if self.error is not None:
            raise self.error
        assert self._write is not None
        # Once. It refers to this batch, and a cycle would keep the tensors until Python looks for it.
        write, self._write = self._write, None
        self.order(self.flats[0])
        if self.plan.deferred:
            keep_from_reuse(*self.flats)  # Copies may have been made in another stream.
        write(scale)
        self._judge_sums()
        self._decided()
        for position in self._copied:
            gradient, flat = self.gradients[position], self.flats[position]
            matrix = self.plan.transposed.get(position)
            flat = flat if matrix is None else transpose_back(flat, matrix)
            gradient.copy_(flat.view(gradient.shape))
        for position, original in self._originals.items():
            if not self._used[position]:
                keep_from_reuse(original)
                self.gradients[position].copy_(original)
        # The step may end much later, when the backward pass does.
        self.flats, self._originals = [], {}

    def settle(self, dropped: bool | torch.Tensor) -> None:
        """Accepts the next residuals, except those of parameters that no rank used; or undoes all changes.

        Args:
            dropped: whether the step is dropped; or a word on a device that is not 0 if it is.
        """
        self.order(self.gradients[0])
        if isinstance(dropped, torch.Tensor) and dropped.device != self.gradients[0].device:
            dropped = bool(dropped.item())  # Parts of the model are elsewhere.
        if self._encoded:
            for slot in self.plan.slots:
                slot.step += 1
        self.residuals.settle(dropped, self._used)

    def withdraw(self) -> None:
        """Leaves residuals as they were; called instead of :meth:`settle` if nothing was sent."""
        self.residuals.withdraw()

    def encoding(
        self,
        work: Callable[[], torch.Tensor],
        size: int,
        dtype: torch.dtype = torch.uint8,
        elements: int = 0,
    ) -> torch.Tensor:
        """Makes a message as :meth:`guard` does, and adds the time to the encoding time.

        Args:
            work, size, dtype: see :meth:`guard`.
            elements: the number of elements that are encoded. Only the first encoding counts, not an
                owner's later encoding of averages.
        """
        self._counts.encoded_elements = self._counts.encoded_elements or elements
        with timed("encode", self._counts):
            return self.guard(work, size, dtype)

    def decoding(self) -> AbstractContextManager[None]:
        """Adds the time in the block to the decoding time."""
        return timed("decode", self._counts)

    def count_encoding(self, counters: Counters) -> None:
        """Adds the time in encoding kernels since the last call to the counters."""
        counters.encode_seconds += self._counts.encode_seconds
        self._counts.encode_seconds = 0.0

    def write_flags(self, flags: torch.Tensor) -> None:
        """Writes 1 for each gradient that this rank used to the front of ``flags``, which must be zeros."""
        flags[: len(self._used)] = USED
        for position in self._unused:
            flags[position] = 0  # By a kernel: the host would have to wait for a copy to a device.

    def uneven(self) -> torch.Tensor:
        """Whether only some ranks used a gradient, as far as this rank knows; shape=(), bool.

        If ranks receive only the maximum of the flags, those that used all gradients do not learn of others
        that did not.
        """
        assert self._flags is not None
        if self.plan.deferred:
            keep_from_reuse(self._flags)
        given = self._flags[:, : len(self.gradients)]
        own = torch.zeros_like(given[0])
        self.write_flags(own)
        return (given != own).any()

    def order(self, tensor: torch.Tensor) -> None:
        """Makes the current stream of a CUDA tensor's device wait for the streams of earlier work."""
        if not tensor.is_cpu:
            self._kernels.order(tensor)

    def _encode(
        self,
        table: Table,
        values: Sequence[torch.Tensor],
        take_up: Callable[[], Columns],
        transposed: Mapping[int, tuple[int, int]],
    ) -> torch.Tensor:
        layout, device = table.layout, self.flats[0].device
        message = torch.empty(layout.size, dtype=torch.uint8, device=device)

        def work() -> torch.Tensor:
            self.order(message)
            before, after = take_up()
            # The slots keep residuals in the gradient's order, which any codec and exchange can use.
            residuals, following = _transposed((before, after), transposed)
            table.kernels.encode(values, residuals, following, self.steps, message)
            for position, matrix in transposed.items():
                kept, written = after[position], following[position]
                if kept is not None and written is not None:
                    kept.copy_(transpose_back(written, matrix))
            if layout.end < layout.size:
                tail = message[layout.end :].copy_(table.tail)
                if self._unused:
                    self.write_flags(tail[layout.flags - layout.end :])
            return message

        return self.encoding(work, layout.size, elements=layout.elements)

    def _run_owner_step(self, position: int, average: torch.Tensor) -> None:
        owned, common = self.plan.slots[position].owned, self.plan.common
        assert owned is not None and common.owner_step is not None
        state = owned.copy_state(average.device)
        average.div_(common.loss_scale)
        common.owner_step(average, state)
        average.mul_(common.loss_scale)
        self.residuals.changes[position].assign(owned, state=state)

    def _judge_sums(self) -> None:
        """Drops the step if a sum exceeds half precision, because loss scalers skip such a step.

        No payload shows that: ranks add in single precision.
        """
        if self.flats[0].dtype != torch.float16:
            return  # All are of one dtype.
        sums = [flat for flat in self.flats if flat.numel()]
        if sums:
            self.see(all_finite(sums))

    def _decided(self) -> None:
        """Finds out whether some rank used the parameters that this rank did not use."""
        if self._originals:
            assert self._flags is not None
            used = self._flags[:, : len(self._used)].any(0).tolist()
            self._used = [one or other for one, other in zip(self._used, used, strict=True)]


def _transposed(columns: Columns, matrices: Mapping[int, tuple[int, int]]) -> Columns:
    """Residuals in the order in which their gradients are sent, and arrays for the next ones."""
    if not matrices:
        return columns
    before, after = map(list, columns)
    for position, matrix in matrices.items():
        residual, following = before[position], after[position]
        if residual is not None and following is not None:
            before[position] = transpose(residual, matrix)
            after[position] = torch.empty_like(following)
    return before, after


def judge(contents: Sequence[Content]) -> bool | torch.Tensor:
    """Whether a step has to be dropped, because some rank sent an Inf or a NaN in it.

    Args:
        contents: the contents of all buckets of the step, after ``write``.

    Returns:
        A bool; or, if only one device knows, a word on that device, shape=(1,), int32, not 0 if the step
        has to be dropped.
    """
    if any(content.nonfinite for content in contents):
        return True
    words = [content.word for content in contents if content.word is not None]
    if len({word.device for word in words}) > 1:
        return any(bool(word.item()) for word in words)
    return (words[0] if len(words) == 1 else torch.stack(words).amax(0)) if words else False
