"""Sends packed messages, for payloads that are shorter than their places.

See :mod:`hvd_compress.exchanges.packing`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

import numpy as np
import torch

from hvd_compress.codecs import PayloadError
from hvd_compress.engine.plan import BucketPlan, Table
from hvd_compress.exchanges.comm import Comm, Sending
from hvd_compress.exchanges.packing import (
    Head,
    Places,
    places,
    places_by_owner,
    places_by_section,
)


class PackedBatch(Protocol):
    """The part of a :class:`hvd_compress.engine.batch.Batch` that this module uses."""

    plan: BucketPlan
    error: Exception | None

    def guard(self, work: Callable[[], torch.Tensor], size: int) -> torch.Tensor:
        """Makes a message of ``size`` bytes; returns zeros and keeps the error if that fails."""
        ...

    def encoding(self, work: Callable[[], torch.Tensor], size: int) -> torch.Tensor:
        """Does the same, and adds the time to the encoding time."""
        ...

    def decoding(self) -> AbstractContextManager[None]:
        """Adds the time in the block to the decoding time."""
        ...


def all_gather(batch: PackedBatch, comm: Comm, message: torch.Tensor, table: Table) -> Sending:
    """The same as :meth:`Comm.all_gather`, but sends a packed message, as payloads may be short.

    Args:
        batch: the batch of the message; its error is set if the message consists of zeros.
        comm: the ranks.
        message: the message, shape=(n,), uint8, with the same layout on every rank.
        table: the table of the message.

    Returns:
        Every rank's message, not packed, shape=(ranks, n).
    """
    places_of = batch.plan.keep(f"places of {comm.scope}", lambda: places(table.layout))
    length = batch.plan.length(f"{comm.scope}", places_of.full)
    packed = batch.encoding(lambda: _pack(places_of, message, length.bytes), length.bytes)
    rows = yield comm.all_gather(_cut(packed, 0, length.bytes))
    heads = _heads(batch, rows, places_of.full)
    longest = _longest(heads)
    if longest > length.bytes:
        rows = yield from _with_rest(comm, packed, rows, longest)
    length.see(longest)
    return _unpacked(batch, rows, [places_of] * comm.size)


def two_shots(
    batch: PackedBatch,
    comm: Comm,
    message: torch.Tensor,
    average: Callable[[torch.Tensor], torch.Tensor],
    parts: Table,
    own: Table,
    every: Table,
) -> Sending:
    """Sends parts to their owners, and gathers the owners' averages.

    As payloads may be short, only an owner knows how many bytes the ranks need for their parts. The owner
    tells all ranks in the head of its averages. An owner that has not received the whole of a part sends
    only a head. All ranks see that, send the rest of the parts, and gather the averages again.

    Args:
        batch: the batch of the message; its error is set if the message consists of zeros.
        comm: the ranks.
        message: the parts, by owner, shape=(n,), uint8.
        average: makes this rank's message to all, shape=(m,), from the rows that the ranks sent to it; if
            that fails, returns zeros and sets the batch's error.
        parts: the table of the first message.
        own: the table of this rank's message to all.
        every: the table of all ranks' messages to all, one behind the other.

    Returns:
        The owners' averages, not packed, shape=(ranks, m).
    """
    plan, rank, ranks = batch.plan, comm.rank, range(comm.size)
    sections = plan.keep("places of parts", lambda: places_by_section(parts.layout))
    averages = plan.keep("places of averages", lambda: places_by_owner(every.layout, own.layout))
    firsts = [plan.length(f"part {owner}", sections[owner].full) for owner in ranks]
    second = plan.length("averages", averages[rank].full)

    sent = [first.bytes for first in firsts]
    packed_parts = [torch.zeros(0, dtype=torch.uint8, device="cpu")] * comm.size
    for owner, part in enumerate(message.split(parts.layout.sections)):
        work = partial(_pack, sections[owner], part, sent[owner])
        packed_parts[owner] = batch.encoding(work, sent[owner])
    if batch.error is not None:
        packed_parts = [torch.zeros(size, dtype=torch.uint8, device="cpu") for size in sent]
    message = torch.cat([_cut(p, 0, n) for p, n in zip(packed_parts, sent, strict=True)])
    rows = yield comm.all_to_all(message, sent)
    received = _longest(_heads(batch, rows, sections[rank].full)) if sent[rank] else 0

    def packed_average() -> torch.Tensor:
        made = average(_unpacked(batch, rows, [sections[rank]] * comm.size))
        if batch.error is not None:
            return made
        return _pack(averages[rank], made, second.bytes, received)

    waiting = received > sent[rank] and batch.error is None
    if waiting:
        alone = Head(0, received, waiting=True).to_bytes()
        packed = torch.frombuffer(bytearray(alone), dtype=torch.uint8)
    else:
        packed = batch.guard(packed_average, second.bytes)
    gathered = yield comm.all_gather(_cut(packed, 0, second.bytes))
    heads = _heads(batch, gathered, second.full)
    if any(head.waiting for head in heads):
        rest = [
            max(0, h.received - n) if h.waiting else 0 for h, n in zip(heads, sent, strict=True)
        ]
        tails = [_cut(p, n, n + m) for p, n, m in zip(packed_parts, sent, rest, strict=True)]
        more = yield comm.all_to_all(torch.cat(tails), rest, remainder=True)
        if waiting:
            rows = torch.cat([rows, more], 1)
            packed = batch.guard(packed_average, second.full)
        gathered = yield comm.all_gather(_cut(packed, 0, second.full), remainder=True)
        heads = _heads(batch, gathered, second.full)
    elif _longest(heads) > second.bytes:
        gathered = yield from _with_rest(comm, packed, gathered, _longest(heads))
    for first, head in zip(firsts, heads, strict=True):
        first.see(head.received)
    second.see(_longest(heads))
    return _unpacked(batch, gathered, averages)


def _with_rest(comm: Comm, packed: torch.Tensor, rows: torch.Tensor, longest: int) -> Sending:
    """Gathers the rest of the messages; the result is as long as the longest message needs."""
    rest = yield comm.all_gather(_cut(packed, rows.shape[1], longest), remainder=True)
    return torch.cat([rows, rest], 1)


def _pack(places_of: Places, message: torch.Tensor, least: int, received: int = 0) -> torch.Tensor:
    if not places_of.full:
        return torch.zeros(0, dtype=torch.uint8, device="cpu")
    return torch.from_numpy(places_of.pack(message.numpy(), least, received))


def _cut(packed: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """A range of a packed message, with zeros behind the end of the message."""
    cut = packed[begin:end]
    missing = end - begin - cut.numel()
    return torch.cat([cut, cut.new_zeros(missing)]) if missing else cut


def _heads(batch: PackedBatch, rows: torch.Tensor, full: int) -> list[Head]:
    """The heads of the ranks' messages; an altered one is replaced by that of a rank that has failed."""
    heads = []
    for rank, row in enumerate(rows.numpy()):
        try:
            heads.append(Head.read(row, full))
        except PayloadError as error:
            heads.append(Head(0))
            batch.error = batch.error or PayloadError(f"rank {rank}'s {error}")
    return heads


def _longest(heads: Sequence[Head]) -> int:
    return max(head.needed for head in heads)


def _unpacked(batch: PackedBatch, rows: torch.Tensor, places_of: Sequence[Places]) -> torch.Tensor:
    """Unpacked messages, one per row; the bytes behind short payloads have no meaning."""
    messages = np.empty((len(places_of), places_of[0].size), np.uint8)
    with batch.decoding():
        for row, one, message in zip(rows.numpy(), places_of, messages, strict=True):
            if one.size:
                one.unpack(row, message)
    return torch.from_numpy(messages)
