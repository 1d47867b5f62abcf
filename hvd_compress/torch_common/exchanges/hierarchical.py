"""Uncompressed within a host, compressed between hosts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_compress.torch_common.batch import Batch
from hvd_compress.torch_common.comm import Comm, Exchanging


def hierarchical(batch: Batch, comm: Comm) -> Exchanging:
    """What leaves a host does not depend on the number of its ranks, which share the work.

    Each rank of a host adds up its part of the host's gradients, encodes the average, and exchanges
    payloads with the ranks that own this part on the other hosts. Then the ranks of the host tell each
    other what they got, so that all ranks decode the same.
    """
    plan, local, cross = batch.plan, comm.local, comm.cross
    owners, members = plan.owners, plan.members
    assert owners is not None
    own = plan.table("own", lambda: owners.message(members, comm.rank))
    size = own.layout.size
    every = plan.table("every", lambda: owners.gathered(members, cross.size * size))

    rows = yield local.all_to_all(*_parts(batch))
    message = batch.guard(
        lambda: batch.encode_averages(own, _averages(batch, rows)), own.layout.size
    )
    payloads = yield cross.all_gather(message)
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


def _parts(batch: Batch) -> tuple[torch.Tensor, list[int]]:
    """All gradients' parts as they are, one owner's behind the other's, and the bytes for each owner."""
    owners = batch.plan.owners
    assert owners is not None
    parts, sizes = [], []
    for owner in range(owners.size):
        size = 0
        for member, flat in zip(batch.plan.members, batch.flats, strict=True):
            begin, end = owners.part(member.index, member.count, owner)
            parts.append(flat[begin:end])
            size += (end - begin) * flat.element_size()
        sizes.append(size)
    return torch.cat(parts).view(torch.uint8), sizes


def _averages(batch: Batch, rows: torch.Tensor) -> Sequence[torch.Tensor]:
    """The averages of this host's ranks over the parts that this rank owns; added in the order of ranks."""
    sizes = batch.plan.owned_sizes
    averages = torch.zeros(sum(sizes), device=rows.device)
    for row in rows.view(-1).view(batch.flats[0].dtype).view(len(rows), averages.numel()):
        averages += row
    return averages.mul_(1 / len(rows)).split(sizes)
