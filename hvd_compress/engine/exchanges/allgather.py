"""An exchange in which every rank receives every rank's payloads."""

from __future__ import annotations

from hvd_compress.engine.batch import Batch
from hvd_compress.engine.comm import Comm, Exchanging
from hvd_compress.engine.packing import all_gather
from hvd_compress.exchanges import layout


def allgather(batch: Batch, comm: Comm) -> Exchanging:
    """Decodes and adds all ranks' payloads in rank order; traffic grows with the number of ranks."""
    plan = batch.plan
    table = plan.table("whole", lambda: layout.whole(plan.members, comm.rank))
    rows = yield from all_gather(batch, comm, batch.encode(table), table)
    batch.load(table, rows, lambda piece, row: row, rows[:, table.layout.flags :])
