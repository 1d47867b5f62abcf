"""A compressed all-reduce of any tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hvd_compress.codecs.calls import expect_instance
from hvd_compress.distributed.compressor import Compressor, Work


def all_reduce(
    tensor: torch.Tensor | Sequence[torch.Tensor],
    state: Compressor,
    *,
    op: Any = dist.ReduceOp.AVG,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    key: str | Sequence[str] = "tensor",
) -> Work | None:
    """Averages or adds up the ranks' tensors like ``torch.distributed.all_reduce``, but encoded.

    All ranks of the group have to make the same calls in the same order, with tensors of the same dtypes
    and shapes. They compare keys, dtypes, shapes and settings with a short all_gather before any tensor is
    sent; the first call, and the first call with an exchange of several stages, wait for the result.

    The part of a tensor that a rank has not sent stays in ``state`` and is added to the next tensor with
    the same key (error feedback). If some rank's tensors hold an Inf or a NaN, every rank gets it, and all
    residuals of the call stay unchanged.

    Args:
        tensor: a float32, float16 or bfloat16 tensor of any shape, or a list of such tensors, which are
            sent together and may differ in dtype. The results are written over them. Float64 tensors,
            and those below the compressor's ``threshold``, are added up unencoded. If a ``DTensor`` is
            replicated, or sharded on one dimension of its mesh, each rank reduces its own part; the ranks
            have to be those that hold the same part.
        state: a compressor of this package, such as ``OneBit()``: the same one in every call.
        op: ``ReduceOp.AVG`` or ``ReduceOp.SUM``.
        group: the ranks; None is the compressor's ``process_group``, or the default group.
        async_op: whether to return as soon as the tensors are encoded. They must not be used before
            ``wait()`` has returned.
        key: the name of the tensor, the same in every call and on every rank; residuals, ``layers`` and
            ``exclude`` refer to tensors by this name. For a list of tensors, a list of keys, or one string,
            to which a dot and the position in the list are appended.

    Returns:
        With ``async_op``, a :class:`Work` whose ``wait()`` has to be called; otherwise None.

    Raises:
        TypeError, ValueError: an argument is wrong, "expected X, got Y". The other ranks then raise an
            :class:`ExchangeError`, if their arguments are right.
        ExchangeError: the ranks' calls or settings differ; a tensor with the same key is still being
            exchanged; another rank failed; there is no process group, or this rank is not in it.
        PayloadError: a payload was altered in transit.
    """
    expect_instance("all_reduce", state, Compressor, "all_reduce(tensor, {})", "OneBit()")
    work = state.reduce(tensor, key, op, group)
    if async_op:
        return work
    work.wait()
    return None
