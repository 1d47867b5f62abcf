"""Whether gradients are finite, without a copy of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def all_finite(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Whether all elements of tensors are finite; shape=(), bool, on the tensors' device.

    Args:
        tensors: floating-point tensors on one device, at least one, none of them empty.
    """
    return torch.nn.utils.get_total_norm(tensors, math.inf).isfinite()
