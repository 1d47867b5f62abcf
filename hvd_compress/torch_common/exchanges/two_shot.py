"""Parts to their owners, averages from them."""

from __future__ import annotations

from hvd_compress.exchange import layout
from hvd_compress.torch_common.batch import Batch
from hvd_compress.torch_common.comm import Comm, Exchanging


def two_shot(batch: Batch, comm: Comm) -> Exchanging:
    """What a rank sends does not depend on the number of ranks (1-bit SGD, section 3.1)."""
    plan, rank, size = batch.plan, comm.rank, comm.size
    owners, members = plan.owners, plan.members
    assert owners is not None
    parts = plan.table("parts", lambda: layout.shards(members, rank, size))
    received = plan.table("received", lambda: owners.received(members))
    own = plan.table("own", lambda: owners.message(members, layout.own_stream(rank, size)))
    every = plan.table("every", lambda: owners.gathered(members, own.layout.size))

    rows = yield comm.all_to_all(batch.encode(parts), parts.layout.sections)
    averages = batch.guard(
        lambda: batch.encode_averages(own, batch.average(received, rows)), own.layout.size
    )
    rows = yield comm.all_gather(averages)
    flags = rows[:, own.layout.flags :]
    batch.load(every, rows.view(1, -1), lambda piece, row: piece.offset // rows.shape[1], flags)
