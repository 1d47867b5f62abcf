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

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hvd_compress.codecs import Codec
from hvd_compress.papers.group import ParallelGroup

_Move = Callable[[torch.Tensor, ParallelGroup, str, Codec], torch.Tensor]
"""A function that moves a tensor to another state, with a description for errors and the codec."""


def copy_to_parallel(x: torch.Tensor, group: ParallelGroup) -> torch.Tensor:
    """Passes a copied tensor on to each rank's part of a layer.

    Forward: ``x`` itself. Backward: the ranks' gradients are partial sums, which are encoded and added up.
    """
    return _Exchange.apply(x, group, _same, _sum)


def reduce_from_parallel(x: torch.Tensor, group: ParallelGroup) -> torch.Tensor:
    """Adds up the ranks' partial sums into a copied tensor.

    Forward: partial sums are encoded and added up. Backward: the gradient itself.
    """
    return _Exchange.apply(x, group, _sum, _same)


def gather_from_parallel(x: torch.Tensor, group: ParallelGroup) -> torch.Tensor:
    """Turns a tensor that is split by features into a copied one.

    Forward: parts are encoded and concatenated along the last dimension, in rank order. Backward: this
    rank's part of the gradient.
    """
    return _Exchange.apply(x, group, _whole, _part)


def scatter_to_parallel(x: torch.Tensor, group: ParallelGroup) -> torch.Tensor:
    """Takes this rank's features of a copied tensor.

    Forward: this rank's part of the last dimension. Backward: parts of the gradient are encoded and
    concatenated.

    Raises:
        ValueError: the last dimension cannot be split equally.
    """
    return _Exchange.apply(x, group, _part, _whole)


def gather_batch(x: torch.Tensor, group: ParallelGroup) -> torch.Tensor:
    """Gathers the samples of all ranks for each rank's part of a layer.

    Forward: the ranks' mini-batches, shape=(n, ...), are encoded and concatenated along the first
    dimension, in rank order. Backward: each rank gets the sum of the encoded partial sums for its own
    samples.

    Between this function and :func:`reduce_scatter_batch`, gradients are those of the *mean* of the ranks'
    losses; elsewhere, each rank's gradients are those of its own loss, as DDP expects. So the backward pass
    of this function multiplies by the number of ranks, and that of :func:`reduce_scatter_batch` divides.
    """
    return _Exchange.apply(
        x, group, _all_samples, lambda gradient, *rest: _own_samples(gradient, *rest) * group.size
    )


def reduce_scatter_batch(x: torch.Tensor, group: ParallelGroup) -> torch.Tensor:
    """Adds up the ranks' partial sums into a tensor that is split by samples.

    Forward: each rank gets the sum of the encoded partial sums for its own samples. Backward: the ranks'
    gradients are divided by the number of ranks, encoded, and concatenated along the first dimension. See
    :func:`gather_batch`.

    Raises:
        ValueError: the first dimension is not a multiple of the number of ranks.
    """
    return _Exchange.apply(
        x, group, _own_samples, lambda gradient, *rest: _all_samples(gradient / group.size, *rest)
    )


class _Exchange(torch.autograd.Function):
    """Moves activations in the forward pass, and error signals in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: ParallelGroup, move: _Move, back: _Move
    ) -> torch.Tensor:
        ctx.group, ctx.back = group, back
        moved = move(x, group, "activations", group.codec)
        return x.view_as(x) if moved is x else moved

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        group = ctx.group
        return ctx.back(gradient, group, "error signals", group.error_codec), None, None, None


def _same(x: torch.Tensor, group: ParallelGroup, content: str, codec: Codec) -> torch.Tensor:
    return x


def _sum(x: torch.Tensor, group: ParallelGroup, content: str, codec: Codec) -> torch.Tensor:
    return group.sum(x, content, codec)


def _part(x: torch.Tensor, group: ParallelGroup, content: str, codec: Codec) -> torch.Tensor:
    with group.telling(x.device):
        if not x.dim() or x.shape[-1] % group.size:
            raise ValueError(
                f"scatter_to_parallel: expected a multiple of {group.size} features, got shape "
                f"{tuple(x.shape)}"
            )
    return x.chunk(group.size, -1)[group.rank].contiguous()


def _whole(x: torch.Tensor, group: ParallelGroup, content: str, codec: Codec) -> torch.Tensor:
    return _stacked(group.gather(x, content, codec))


def _all_samples(x: torch.Tensor, group: ParallelGroup, content: str, codec: Codec) -> torch.Tensor:
    return group.gather(x, content, codec).flatten(0, 1)


def _own_samples(x: torch.Tensor, group: ParallelGroup, content: str, codec: Codec) -> torch.Tensor:
    return group.reduce_scatter(x, content, codec)


def _stacked(parts: torch.Tensor) -> torch.Tensor:
    """Concatenates parts, shape=(ranks, ..., n), into one tensor, shape=(..., ranks * n)."""
    return parts.movedim(0, -2).flatten(-2)
