"""Differentiable exchanges between layers.

Each exchange moves a tensor between two of these states:

- *copied*: all ranks have the whole tensor;
- *split by features*: each rank has a part of the last dimension;
- *split by samples*: each rank has a part of the first dimension, its own mini-batch;
- *partial sums*: the tensor is the sum of the ranks' tensors.

The gradients of a split tensor are split; those of a copied tensor are partial sums or copied, as each
function states. All ranks must call the same functions in the same order, forward and backward. Second
derivatives are not available.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hvd_compress.model_parallel.group import ParallelGroup


def copy_to_parallel(x: torch.Tensor, group: ParallelGroup) -> torch.Tensor:
    """Passes a copied tensor on to each rank's part of a layer.

    Forward: ``x`` itself. Backward: the ranks' gradients are partial sums, which are encoded and added up.
    """
    return _CopyTo.apply(x, group)


def reduce_from_parallel(x: torch.Tensor, group: ParallelGroup) -> torch.Tensor:
    """Adds up the ranks' partial sums into a copied tensor.

    Forward: partial sums are encoded and added up. Backward: the gradient itself.
    """
    return _ReduceFrom.apply(x, group)


def gather_from_parallel(x: torch.Tensor, group: ParallelGroup) -> torch.Tensor:
    """Turns a tensor that is split by features into a copied one.

    Forward: parts are encoded and concatenated along the last dimension, in rank order. Backward: this
    rank's part of the gradient.
    """
    return _GatherFrom.apply(x, group)


def scatter_to_parallel(x: torch.Tensor, group: ParallelGroup) -> torch.Tensor:
    """Takes this rank's features of a copied tensor.

    Forward: this rank's part of the last dimension. Backward: parts of the gradient are encoded and
    concatenated.

    Raises:
        ValueError: the last dimension cannot be split equally.
    """
    return _ScatterTo.apply(x, group)


def gather_batch(x: torch.Tensor, group: ParallelGroup) -> torch.Tensor:
    """Gathers the samples of all ranks for each rank's part of a layer.

    Forward: the ranks' mini-batches, shape=(n, ...), are encoded and concatenated along the first
    dimension, in rank order. Backward: each rank gets the sum of the encoded partial sums for its own
    samples.

    Between this function and :func:`reduce_scatter_batch`, gradients are those of the *mean* of the ranks'
    losses; elsewhere, each rank's gradients are those of its own loss, as DDP expects. So the backward pass
    of this function multiplies by the number of ranks, and that of :func:`reduce_scatter_batch` divides.
    """
    return _GatherBatch.apply(x, group)


def reduce_scatter_batch(x: torch.Tensor, group: ParallelGroup) -> torch.Tensor:
    """Adds up the ranks' partial sums into a tensor that is split by samples.

    Forward: each rank gets the sum of the encoded partial sums for its own samples. Backward: the ranks'
    gradients are divided by the number of ranks, encoded, and concatenated along the first dimension. See
    :func:`gather_batch`.

    Raises:
        ValueError: the first dimension is not a multiple of the number of ranks.
    """
    return _ReduceScatterBatch.apply(x, group)


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ParallelGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        group = ctx.group
        return group.sum(gradient, "error signals", group.error_codec), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ParallelGroup) -> torch.Tensor:
        added = group.sum(x, "activations", group.codec)
        return x.view_as(x) if added is x else added

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _GatherFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ParallelGroup) -> torch.Tensor:
        ctx.group = group
        return _stacked(group.gather(x, "activations", group.codec))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _part(gradient, ctx.group), None


class _ScatterTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ParallelGroup) -> torch.Tensor:
        ctx.group = group
        with group.telling(x.device):
            if not x.dim() or x.shape[-1] % group.size:
                raise ValueError(
                    f"scatter_to_parallel: expected a multiple of {group.size} features, got shape "
                    f"{tuple(x.shape)}"
                )
        return _part(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        group = ctx.group
        return _stacked(group.gather(gradient, "error signals", group.error_codec)), None


class _GatherBatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ParallelGroup) -> torch.Tensor:
        ctx.group = group
        return group.gather(x, "activations", group.codec).flatten(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        group = ctx.group
        own = group.reduce_scatter(gradient, "error signals", group.error_codec)
        return own * group.size, None


class _ReduceScatterBatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ParallelGroup) -> torch.Tensor:
        ctx.group = group
        own = group.reduce_scatter(x, "activations", group.codec)
        return x.view_as(x) if own is x else own

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        group = ctx.group
        share = gradient / group.size
        return group.gather(share, "error signals", group.error_codec).flatten(0, 1), None


def _stacked(parts: torch.Tensor) -> torch.Tensor:
    """Concatenates parts, shape=(ranks, ..., n), into one tensor, shape=(..., ranks * n)."""
    return parts.movedim(0, -2).flatten(-2)


def _part(whole: torch.Tensor, group: ParallelGroup) -> torch.Tensor:
    """This rank's features of a whole tensor."""
    return whole.chunk(group.size, -1)[group.rank].contiguous()
