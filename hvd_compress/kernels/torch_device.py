"""The services that the CUDA kernels need from PyTorch."""

from __future__ import annotations

from typing import Any

from hvd_compress.kernels.cuda import Device


class TorchDevice(Device):
    """Implements :class:`hvd_compress.kernels.cuda.Device` with PyTorch's streams and allocators.

    PyTorch's allocator reuses memory that the kernels have released only after the earlier work of the
    stream that the memory was allocated for.

    Args:
        torch: the module; it is an argument so that nothing here imports a framework.
    """

    type = "cuda"

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def guard(self, index: int) -> Any:
        """Makes a device current; restores the previous one on exit."""
        return self._torch.get_device_module(self.type).device(index)

    def stream(self, index: int) -> int:
        """The address of the current stream."""
        return self._torch.get_device_module(self.type).current_stream(index).cuda_stream

    def empty(self, size: int, index: int) -> Any:
        """Memory of the device, not initialized; shape=(size,), uint8."""
        torch = self._torch
        return torch.empty(size, dtype=torch.uint8, device=torch.device(self.type, index))

    def pinned(self, size: int) -> Any:
        """Zeros in page-locked memory of the host; shape=(size,), uint8."""
        # Whatever the user's default device is.
        return self._torch.zeros(size, dtype=self._torch.uint8, device="cpu", pin_memory=True)
