"""A step that changes a rank's own gradients before they are exchanged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hvd_compress.distributed import OwnerStep


class LocalStep:
    """Applies a step to each gradient of this rank before any compressor receives the gradient.

    Use this for AdaGrad on partial gradients (1-bit SGD, section 4 and table 3), in place of
    ``owner_step``, with any PyTorch frontend. Ranks divide by their own accumulators, which differ: the
    paper calls that a risk of inconsistencies. Gradients are changed in each backward pass, so that each of
    several backward passes in one step counts separately::

        local = LocalStep(model.named_parameters(), AdaGrad())

    Make a local step before anything that uses gradients in the backward pass, such as DDP.

    Args:
        params: ``model.named_parameters()``.
        step: an owner step, such as ``AdaGrad()``, which is called with a parameter's gradient, shape=(n,),
            float32, and a dictionary for the parameter's state. The step is not called for gradients with
            an Inf or a NaN.

    Raises:
        TypeError: the step is not callable.
    """

    def __init__(self, params: Any, step: OwnerStep) -> None:
        if not callable(step):
            raise TypeError(f"LocalStep.step: expected a callable, got {step!r}")
        self._step = step
        self._states: dict[str, dict[str, Any]] = {}
        self._handles = [
            parameter.register_hook(lambda gradient, name=name: self._changed(name, gradient))
            for name, parameter in params
            if parameter.requires_grad
        ]

    def remove(self) -> None:
        """Removes the step from all parameters: gradients stay as they are from now on."""
        for handle in self._handles:
            handle.remove()

    def state_dict(self) -> dict[str, Any]:
        """The step's state by parameter; every rank saves its own. Tensors are references, not copies."""
        return dict(self._states)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a :meth:`state_dict` of the same rank."""
        self._states = {
            name: {
                key: value.clone() if isinstance(value, torch.Tensor) else value
                for key, value in kept.items()
            }
            for name, kept in state.items()
        }

    @torch.no_grad()
    def _changed(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        if not bool(gradient.isfinite().all()):
            return gradient
        flat = gradient.to(torch.float32, copy=True).contiguous().view(-1)
        self._step(flat, self._states.setdefault(name, {}))
        return flat.view(gradient.shape).to(gradient.dtype)
