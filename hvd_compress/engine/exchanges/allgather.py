"""Every rank gets every rank's payloads."""

from __future__ import annotations

from hvd_compress.engine.batch import Batch
from hvd_compress.engine.comm import Comm, Exchanging
from hvd_compress.engine.packing import all_gather
from hvd_compress.exchanges import layout


def allgather(batch: Batch, comm: Comm) -> Exchanging:
    """Each rank decodes and adds all ranks' payloads, in rank order; traffic grows with their number."""
    plan = batch.plan
    table = plan.table("whole", lambda: layout.whole(plan.members, comm.rank))
    rows = yield from all_gather(batch, comm, batch.encode(table), table)
    batch.load(table, rows, lambda piece, row: row, rows[:, table.layout.flags :])
