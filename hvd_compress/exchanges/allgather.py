"""The allgather: each rank sends its payloads to all others, and adds up what it receives.

Every gradient is encoded once. Every rank decodes all ranks' payloads and adds them in rank order, so that
all ranks have the same bits. The bytes that a rank sends grow with the number of ranks.
"""

from __future__ import annotations

import numpy as np

from hvd_compress.codecs import Codec
from hvd_compress.codecs.base import Shape
from hvd_compress.exchanges import layout
from hvd_compress.exchanges.base import Batch, ByRank, Exchange
from hvd_compress.exchanges.comm import Comm, Exchanging, Group
from hvd_compress.exchanges.limits import check_gather
from hvd_compress.exchanges.simulation import Ranks
from hvd_compress.exchanges.steps import Computation, Gradient, Message, Steps, payload_bytes


def steps(gradient: Gradient) -> Steps:
    """Every rank sends its payload to all others."""
    payload = payload_bytes(gradient.codec, gradient.shape, gradient.bits)
    return (
        Computation(encoded=gradient.count),
        Message("all_gather", payload, payload),
        Computation(decoded=gradient.hosts.size * gradient.count),
    )


def check(name: str, shape: Shape, codec: Codec, element_bytes: int, group: Group) -> None:
    """Raises ``ValueError`` if all ranks' payloads together are too large for one gather."""
    check_gather(name, codec.payload_bytes(shape), group.size)


def reference(ranks: Ranks, name: str, gradients: ByRank, scale: float) -> np.ndarray:
    """The result on every rank."""
    kept = ranks.residuals
    sent = [ranks.send(name, x, kept[rank][name], rank) for rank, x in enumerate(gradients)]
    return ranks.total(sent) * np.float32(scale)


def run(batch: Batch, comm: Comm) -> Exchanging:
    """Encodes, gathers, decodes and adds."""
    plan = batch.plan
    table = plan.table("whole", lambda: layout.whole(plan.members, comm.rank))
    rows = yield from batch.all_gather(comm, batch.encode(table), table)
    batch.load(table, rows, lambda piece, row: row, rows[:, table.layout.flags :])


EXCHANGE = Exchange(("all",), steps, reference, run, check, remainders=("all",))
