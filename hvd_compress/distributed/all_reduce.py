"""A compressed all-reduce of any tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hvd_compress.codecs.calls import expect_instance
from hvd_compress.distributed.compressor import Compressor
from hvd_compress.distributed.work import Work


def all_reduce(
    tensor: torch.Tensor | Sequence[torch.Tensor],
    state: Compressor,
    *,
    op: Any = dist.ReduceOp.AVG,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    key: str | Sequence[str] = "tensor",
) -> Work | None:
    """Averages or adds up the ranks' tensors encoded, as ``torch.distributed.all_reduce`` does unencoded.

    All ranks of the group have to call it in the same order with tensors of the same dtypes and shapes.
    They compare keys, dtypes, shapes and settings before any tensor is sent, by a short all_gather; the
    first call, and the first with an exchange of several stages, wait for that.

    What a rank has not sent of a tensor stays in ``state`` and is added to the next tensor with the same
    key (error feedback). Where some rank's tensors hold an Inf or a NaN, every rank gets it, and all
    residuals of the call stay what they were.

    Args:
        tensor: float32, float16 or bfloat16, of any shape, or a list of such tensors, which travel together
            and may differ in dtype. The results are written over them. Tensors below the compressor's
            ``threshold`` may have any floating-point dtype, and are added up as they are.
        state: a compressor of this package, such as ``OneBit()``: the same one in every call.
        op: ``ReduceOp.AVG`` or ``ReduceOp.SUM``.
        group: the ranks; None is the compressor's ``process_group``, or the default group.
        async_op: whether to return as soon as the tensors are encoded. They must not be used before
            ``wait()``.
        key: what the tensor is called, the same in every call and on every rank; residuals, ``layers`` and
            ``exclude`` go by it. For a list of tensors, a list of keys; or one string, to which a dot and
            the place in the list are added.

    Returns:
        With ``async_op``, what to ``wait()`` for.

    Raises:
        TypeError, ValueError: an argument is wrong, "expected X, got Y". The other ranks raise an
            :class:`ExchangeError` then, if theirs are right.
        ExchangeError: the ranks' calls or settings differ; a tensor of the key is still on its way;
            another rank failed; this rank is not in the group, or there is none.
        PayloadError: a payload was altered on its way.
    """
    expect_instance("all_reduce", state, Compressor, "all_reduce(tensor, {})", "OneBit()")
    work = state.reduce(tensor, key, op, group)
    if async_op:
        return work
    work.wait()
    return None
