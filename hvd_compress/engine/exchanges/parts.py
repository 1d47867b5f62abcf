"""Uncompressed parts of gradients: the message to their owners, and the averages there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_compress.engine.batch import Batch


def to_owners(batch: Batch) -> tuple[torch.Tensor, list[int]]:
    """All gradients' parts without encoding, ordered by owner, and the bytes for each owner."""
    owners = batch.plan.owners
    assert owners is not None
    parts, sizes = [], []
    for owner in range(owners.size):
        size = 0
        for member, flat in zip(batch.plan.members, batch.flats, strict=True):
            begin, end = owners.part(member, owner)
            parts.append(flat[begin:end])
            size += (end - begin) * flat.element_size()
        sizes.append(size)
    return torch.cat(parts).view(torch.uint8), sizes


def averages(batch: Batch, rows: torch.Tensor) -> Sequence[torch.Tensor]:
    """The ranks' averages of the parts that this rank owns, added in rank order from +0.

    Args:
        batch: the batch of the gradients.
        rows: the ranks' messages from :func:`to_owners` to this rank, shape=(ranks, bytes), uint8.

    Returns:
        One average for each gradient, shape=(n,), float32; empty if this rank owns no element.
    """
    sizes = batch.plan.owned_sizes
    sums = torch.zeros(sum(sizes), dtype=torch.float32, device=rows.device)
    for row in rows.view(-1).view(batch.flats[0].dtype).view(len(rows), sums.numel()):
        sums += row
    return sums.mul_(1 / len(rows)).split(sizes)
