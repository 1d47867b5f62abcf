"""An emulated CUDA device, whose tensors keep their numbers in host memory.

As with a real device, an operation on tensors of both devices is an error, unless the operation copies.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree

from tests.torch_models import DEVICE

CUDA = torch.device("cuda" if DEVICE.type == "cpu" else DEVICE.type, 0)
_COPIES = {"aten::copy_", "aten::_to_copy"}


class Elsewhere(torch.Tensor):
    """A tensor of :data:`CUDA`.

    Attributes:
        numbers: a tensor on the host with the same elements.
    """

    numbers: torch.Tensor

    @staticmethod
    def __new__(cls, numbers: torch.Tensor) -> Elsewhere:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            numbers.shape,
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device="meta",  # Every build of PyTorch has the meta device's guards.
        )
        made.numbers = numbers
        return made  # type: ignore[no-any-return]

    device = CUDA  # type: ignore[assignment]
    is_cuda, is_meta = True, False  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [one for one in pytree.tree_leaves((args, kwargs)) if torch.is_tensor(one)]
        there = any(isinstance(one, cls) for one in tensors)
        here = [one for one in tensors if not isinstance(one, cls) and one.dim()]
        if there and here and func._schema.name not in _COPIES:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, got {CUDA} and cpu: {func}"
            )
        if kwargs.get("device") is not None:
            there = torch.device(kwargs["device"]).type == "cuda"
            kwargs["device"] = torch.device("cpu")
        out = func(*pytree.tree_map(_numbers, args), **pytree.tree_map(_numbers, kwargs))
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                return value
        return pytree.tree_map(_there, out) if there else out


def elsewhere(value: Any) -> Any:
    """Copies a nested container with its tensors on :data:`CUDA`, emulated unless tests run on a GPU."""
    if DEVICE.type != "cpu":
        return pytree.tree_map(
            lambda one: one.to(CUDA, copy=True) if torch.is_tensor(one) else one, value
        )
    return pytree.tree_map(lambda one: _there(one.clone()) if torch.is_tensor(one) else one, value)


def _numbers(value: Any) -> Any:
    return value.numbers if isinstance(value, Elsewhere) else value


def _there(value: Any) -> Any:
    return Elsewhere(value) if torch.is_tensor(value) else value
