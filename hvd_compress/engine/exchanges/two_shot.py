"""An exchange that sends parts to their owners, and averages from the owners."""

from __future__ import annotations

import torch

from hvd_compress.engine.batch import Batch
from hvd_compress.engine.comm import Comm, Exchanging
from hvd_compress.engine.packing import two_shots
from hvd_compress.exchanges import layout


def two_shot(batch: Batch, comm: Comm) -> Exchanging:
    """Averages the parts of gradients on their owners (1-bit SGD, section 3.1).

    The amount that a rank sends does not depend on the number of ranks.
    """
    plan, rank, size = batch.plan, comm.rank, comm.size
    owners, members = plan.owners, plan.members
    assert owners is not None
    parts = plan.table("parts", lambda: layout.shards(members, rank, size))
    received = plan.table("received", lambda: owners.received(members))
    own = plan.table("own", lambda: owners.message(members, layout.own_stream(rank, size)))
    every = plan.table("every", lambda: owners.gathered(members, own.layout.size))

    def average(rows: torch.Tensor) -> torch.Tensor:
        return batch.guard(
            lambda: batch.encode_averages(own, batch.average(received, rows)), own.layout.size
        )

    rows = yield from two_shots(batch, comm, batch.encode(parts), average, parts, own, every)
    flags = rows[:, own.layout.flags :]
    batch.load(every, rows.view(1, -1), lambda piece, row: piece.offset // rows.shape[1], flags)
