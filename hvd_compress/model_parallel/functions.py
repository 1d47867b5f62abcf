"""Exchanges between layers, which autograd can go back through.

Each moves a tensor between two of these states:

- *copied*: all ranks have the whole tensor;
- *split by features*: each rank has some of the last dimension;
- *split by samples*: each rank has some of the first dimension, its own mini-batch;
- *partial sums*: the tensor is the sum of what the ranks have.

Gradients of a split tensor are split, and those of a copied one are partial sums or copied, as said below.
All ranks call the same functions in the same order, forward and backward. Second derivatives are not
available.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hvd_compress.model_parallel.group import ParallelGroup


def copy_to_parallel(x: torch.Tensor, group: ParallelGroup) -> torch.Tensor:
    """A copied tensor for what each rank computes with its part of a layer.

    Forward: ``x`` itself. Backward: the ranks' gradients are partial sums, which are encoded and added up.
    """
    return _CopyTo.apply(x, group)


def reduce_from_parallel(x: torch.Tensor, group: ParallelGroup) -> torch.Tensor:
    """The sum of the ranks' partial sums, copied.

    Forward: partial sums are encoded and added up. Backward: the gradient itself.
    """
    return _ReduceFrom.apply(x, group)


def gather_from_parallel(x: torch.Tensor, group: ParallelGroup) -> torch.Tensor:
    """What is split by features, copied.

    Forward: parts are encoded and stacked along the last dimension, in rank order. Backward: this rank's
    part of the gradient.
    """
    return _GatherFrom.apply(x, group)


def scatter_to_parallel(x: torch.Tensor, group: ParallelGroup) -> torch.Tensor:
    """This rank's features of a copied tensor.

    Forward: a part of the last dimension. Backward: parts of the gradient are encoded and stacked.

    Raises:
        ValueError: the last dimension cannot be split equally.
    """
    return _ScatterTo.apply(x, group)


def gather_batch(x: torch.Tensor, group: ParallelGroup) -> torch.Tensor:
    """The samples of all ranks, for what each rank computes with its part of a layer.

    Forward: the ranks' mini-batches, shape=(n, ...), are encoded and stacked along the first dimension, in
    rank order. Backward: each rank gets the sum of the partial sums for its own samples, encoded.

    Between this function and :func:`reduce_scatter_batch`, gradients are those of the *mean* of the ranks'
    losses, and outside of them each rank's are those of its own loss, as DDP expects them. So the result
    of the backward pass is multiplied by the number of ranks, and divided by it there.
    """
    return _GatherBatch.apply(x, group)


def reduce_scatter_batch(x: torch.Tensor, group: ParallelGroup) -> torch.Tensor:
    """The sum of the ranks' partial sums, split by samples.

    Forward: each rank gets the sum for its own samples, encoded. Backward: the ranks' gradients are divided
    by the number of ranks, encoded, and stacked along the first dimension. See :func:`gather_batch`.

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
    """Parts, shape=(ranks, ..., n), as one tensor, shape=(..., ranks * n)."""
    return parts.movedim(0, -2).flatten(-2)


def _part(whole: torch.Tensor, group: ParallelGroup) -> torch.Tensor:
    """This rank's features."""
    return whole.chunk(group.size, -1)[group.rank].contiguous()
