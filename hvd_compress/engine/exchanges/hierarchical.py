"""An exchange that is uncompressed within a host, and compressed between hosts."""

from __future__ import annotations

from hvd_compress.engine.batch import Batch
from hvd_compress.engine.comm import Comm, Exchanging
from hvd_compress.engine.exchanges import parts
from hvd_compress.engine.packing import all_gather


def hierarchical(batch: Batch, comm: Comm) -> Exchanging:
    """Makes the traffic between hosts independent of the number of ranks on a host, which share the work.

    Each rank of a host adds up its part of the host's gradients, encodes the average, and exchanges
    payloads with the ranks that own this part on the other hosts. Then the ranks of the host send each
    other the payloads that they received, so that all ranks decode the same payloads.
    """
    plan, local, cross = batch.plan, comm.local, comm.cross
    owners, members = plan.owners, plan.members
    assert owners is not None
    own = plan.table("own", lambda: owners.message(members, comm.rank))
    size = own.layout.size
    every = plan.table("every", lambda: owners.gathered(members, cross.size * size))

    rows = yield local.all_to_all(*parts.to_owners(batch))
    message = batch.guard(
        lambda: batch.encode_averages(own, parts.averages(batch, rows)), own.layout.size
    )
    payloads = yield from all_gather(batch, cross, message, own)
    blocks = yield local.all_gather(payloads.reshape(-1))
    # A host's payloads of a part stand in one block; row h begins with host h's payload of the first.
    by_host = blocks.as_strided((cross.size, blocks.numel() - (cross.size - 1) * size), (size, 1))
    flags = blocks.view(local.size, cross.size, size)[..., own.layout.flags :]
    batch.load(
        every,
        by_host,
        lambda piece, host: host * local.size + piece.offset // (cross.size * size),
        flags.transpose(0, 1).flatten(0, 1),
    )
