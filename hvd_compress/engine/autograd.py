"""The parts of autograd that this package uses and PyTorch does not publish."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.hooks import RemovableHandle


def after_backward(call: Callable[[], None]) -> None:
    """Calls ``call`` once at the end of the backward pass in progress, in the order of these calls.

    Raises:
        RuntimeError: there is no backward pass in progress.
    """
    torch.autograd.Variable._execution_engine.queue_callback(call)


def has_gradient_hook(parameter: torch.Tensor) -> bool:
    """Whether a parameter has a hook of ``register_post_accumulate_grad_hook()``."""
    return bool(parameter._post_accumulate_grad_hooks)


def add_first_gradient_hook(
    parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]
) -> RemovableHandle:
    """Calls ``hook`` with the parameter once its gradient is complete, before the hooks that it has.

    Returns:
        A handle that removes the hook.
    """
    handle = parameter.register_post_accumulate_grad_hook(hook)
    hooks = parameter._post_accumulate_grad_hooks
    for key in [key for key in hooks if key != handle.id]:
        hooks[key] = hooks.pop(key)
    return handle
