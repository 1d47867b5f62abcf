"""Gradients that are sent without encoding, in one message."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hvd_compress.engine.executors import keep_from_reuse
from hvd_compress.engine.run import Content
from hvd_compress.exchanges import uncompressed


class Uncompressed(Content):
    """Gradients that an all_reduce adds up; used in place of a :class:`Batch`, without residuals.

    Args:
        gradients: the gradients; results are written over them.
        dtype: the dtype in which gradients are added.
        buffer: the memory that holds exactly these gradients, one behind the other, or a single sparse
            gradient; None if there is no such memory.
        divisor: the divisor of gradients before they are added: in half precision, a sum might overflow.
        deferred: whether the host must not wait for the gradients' device.

    Attributes:
        values: the gradients to add, then their sum, shape=(n,); empty after :meth:`write`.
    """

    def __init__(
        self,
        gradients: Sequence[torch.Tensor],
        dtype: torch.dtype,
        *,
        buffer: torch.Tensor | None = None,
        divisor: int = 1,
        deferred: bool = False,
    ) -> None:
        super().__init__(deferred)
        self._gradients = gradients
        self._divisor = divisor
        self._buffer = buffer
        if buffer is None or buffer.dtype != dtype:
            buffer = torch.cat([gradient.reshape(-1) for gradient in gradients]).to(dtype)
        self.values = buffer.div_(divisor) if divisor > 1 else buffer

    exchange = uncompressed.run

    def write(self, scale: float) -> None:
        """Writes ``scale`` times the sum over the gradients."""
        # Once: the step may end much later, when the backward pass does.
        values, self.values = self.values, self.values.new_empty(0)
        if scale * self._divisor != 1:
            values.mul_(scale * self._divisor)
        numbers = values._values() if values.is_sparse else values
        if numbers.numel() and numbers.is_floating_point():
            self.see(all_finite([numbers]))
        if values is self._buffer:
            return
        if not values.is_cpu:
            keep_from_reuse(values)  # It may have been made in another stream.
        parts = values.split([gradient.numel() for gradient in self._gradients])
        for gradient, part in zip(self._gradients, parts, strict=True):
            if gradient.data_ptr() != part.data_ptr():
                gradient.copy_(part.view(gradient.shape))


def all_finite(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Whether all elements of tensors are finite; shape=(), bool, on the tensors' device.

    Args:
        tensors: floating-point tensors on one device, at least one, none of them empty.
    """
    return torch.nn.utils.get_total_norm(tensors, math.inf).isfinite()
