"""What the CUDA executor asks of PyTorch."""

from __future__ import annotations

from typing import Any

from hvd_compress.kernels.cuda import Device


class TorchDevice(Device):
    """Implements :class:`hvd_compress.kernels.cuda.Device` with PyTorch's streams and allocators.

    Memory that the executor lets go is reused only behind the work of the stream it was made for: that is
    how PyTorch's allocator works.

    Args:
        torch: the module; it is handed over, so that nothing here imports a framework.
    """

    type = "cuda"

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def guard(self, index: int) -> Any:
        return self._torch.cuda.device(index)

    def stream(self, index: int) -> int:
        return self._torch.cuda.current_stream(index).cuda_stream

    def empty(self, size: int, index: int) -> Any:
        torch = self._torch
        return torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", index))

    def pinned(self, size: int) -> Any:
        return self._torch.zeros(size, dtype=self._torch.uint8, pin_memory=True)

    def number(self, tensor: Any) -> float:
        return float(tensor.view(self._torch.float64).item())
