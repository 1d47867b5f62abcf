"""Finds the slot of a gradient's parameter.

Horovod passes a gradient to a compressor without a name, and each rank has its own order.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch

from hvd_compress.engine.parameters import NamedParameters, Slot, slots_of


class Slots:
    """The slots of a model's parameters.

    Args:
        named_parameters: the same as in :func:`slots_of`.
    """

    def __init__(self, named_parameters: NamedParameters) -> None:
        self._slots = slots_of(named_parameters)
        self._accumulated = threading.local()
        self._found_last = -1
        for slot in self._slots:
            if slot.parameter.requires_grad and slot.parameter.is_leaf:
                _watch(slot, self._accumulated)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def owner(self, gradient: torch.Tensor) -> Slot:
        """The slot of the parameter whose gradient this is.

        Raises:
            ValueError: no parameter has this gradient; or it is a parameter itself (Adasum sends those); or
                several parameters may have it.
        """
        index = getattr(self._accumulated, "index", None)
        if index is not None and _is_gradient_of(gradient, self._slots[index]):
            return self._found(self._slots[index])
        # Without a hook of its own: gradients missing on this rank, and members of Horovod's groups,
        # which mostly come in the order of the last time.
        count = len(self._slots)
        for distance in range(1, count + 1):
            slot = self._slots[(self._found_last + distance) % count]
            if slot.parameter.grad is gradient:
                return self._found(slot)
        return self._found(self._sparse_owner(gradient))

    def _found(self, slot: Slot) -> Slot:
        self._found_last = slot.index
        return slot

    def _sparse_owner(self, gradient: torch.Tensor) -> Slot:
        alike = [s for s in self._slots if not s.pending and _is_dense_copy(gradient, s)]
        if len(alike) > 1:
            alike = [s for s in alike if _is_dense_copy(gradient, s, in_every_element=True)]
        if len(alike) == 1:
            return alike[0]
        if any(slot.parameter is gradient for slot in self._slots):
            raise ValueError(
                "expected a gradient, got a parameter: op=Adasum combines parameter updates, which "
                "compressed gradients cannot stand for; use op=Average or op=Sum"
            )
        raise ValueError(
            f"expected the gradient of a parameter that this compressor was made for, got a tensor of "
            f"shape {tuple(gradient.shape)}; pass the same named_parameters to the compressor and to "
            f"hvd.DistributedOptimizer, and one compressor to one model"
        )


def _watch(slot: Slot, accumulated: threading.local) -> None:
    # Runs before Horovod's hook on the same gradient and tells it without a search, even where
    # sparse_as_dense makes the tensor a copy. The hook lives as long as the parameter, and a thread's
    # variables as long as the thread: neither must hold the slots.
    index = slot.index

    def remember(_: torch.Tensor) -> None:
        accumulated.index = index

    slot.parameter.register_post_accumulate_grad_hook(remember)


def _is_gradient_of(gradient: torch.Tensor, slot: Slot) -> bool:
    return slot.parameter.grad is gradient or (not slot.pending and _is_dense_copy(gradient, slot))


def _is_dense_copy(gradient: torch.Tensor, slot: Slot, in_every_element: bool = False) -> bool:
    own = slot.parameter.grad
    if own is None or not own.is_sparse or own.shape != gradient.shape:
        return False
    return not in_every_element or torch.equal(own.to_dense(), gradient)
