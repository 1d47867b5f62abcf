"""Sums whose bits depend on shapes alone, for numbers that each rank computes from common ones."""

from __future__ import annotations

import torch


def ordered_sum(x: torch.Tensor) -> torch.Tensor:
    """The sums over the last dimension, in an order that its length determines.

    ``Tensor.sum()`` adds in another order for another number of threads. Here, the second half is added to
    the first one, element by element, until one element is left; an odd element at the end waits.

    Args:
        x: shape=(..., n), of any floating-point dtype; with n = 0, sums are zeros.

    Returns:
        The sums, shape=(..., 1), in the same dtype.
    """
    if x.shape[-1] == 0:
        return x.new_zeros((*x.shape[:-1], 1))
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        total, rest = x[..., :half] + x[..., half : 2 * half], x[..., 2 * half :]
        x = torch.cat((total, rest), -1) if rest.numel() else total
    return x
