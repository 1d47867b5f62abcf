"""The order of images, and their division among ranks.

The order depends on the seed and the epoch alone: every codec sees the same images in the same
order (paired seeds), whatever random numbers it draws itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


def epoch(
    count: int, batch_size: int, *, seed: int, epoch: int, rank: int = 0, size: int = 1
) -> list[np.ndarray]:
    """One rank's batches of one epoch, as indices.

    All ranks shuffle alike, then each takes its shard. All get equally many full batches; the rest
    comes up in another epoch.

    Raises:
        ValueError: a rank's shard has less than one batch.
    """
    steps = count // size // batch_size
    if not steps:
        raise ValueError(
            f"expected at least {batch_size * size} images for {size} ranks and batches of "
            f"{batch_size}, got {count}"
        )
    shard = np.random.default_rng([seed, epoch]).permutation(count)[rank::size]
    return np.split(shard[: steps * batch_size], steps)


def share(count: int, batch_size: int, *, rank: int = 0, size: int = 1) -> Iterator[np.ndarray]:
    """One rank's part of the test images, in order, the last batch possibly short."""
    mine = np.arange(rank, count, size)
    for start in range(0, len(mine), batch_size):
        yield mine[start : start + batch_size]
