"""A CUDA device that is not there: its tensors have their numbers in the memory of the host.

As on a real device, an operation on tensors in both places is an error, unless the operation copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests import device

CUDA = torch.device("cuda", 0)
_COPIES = {"aten::copy_", "aten::_to_copy"}


class Elsewhere(torch.Tensor):
    """A tensor of :data:`CUDA`.

    Attributes:
        numbers: the numbers, on the host.
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
            device="meta",  # Whose guards PyTorch has in every build.
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


class _Mode(TorchDispatchMode):
    """Makes new tensors of the device, of which no other tensor needs to be one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Elsewhere.__torch_dispatch__(func, types, args, kwargs)


@contextmanager
def a_device() -> Iterator[None]:
    """Lets tensors be made on :data:`CUDA`, and be copied there."""
    with mock.patch.object(torch.cuda, "_lazy_init", lambda: None), _Mode():
        yield


def elsewhere(value: Any) -> Any:
    """The same value, with copies of all tensors in containers on :data:`CUDA`, if only in tests."""
    if device.TYPE != "cpu":
        return pytree.tree_map(lambda one: one.to(CUDA) if torch.is_tensor(one) else one, value)
    return pytree.tree_map(lambda one: _there(one.clone()) if torch.is_tensor(one) else one, value)


def _numbers(value: Any) -> Any:
    return value.numbers if isinstance(value, Elsewhere) else value


def _there(value: Any) -> Any:
    return Elsewhere(value) if torch.is_tensor(value) else value
