"""What the CUDA executor asks of PyTorch."""

from __future__ import annotations

from typing import Any


class TorchDevice:
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
        """See :meth:`hvd_compress.kernels.cuda.Device.guard`."""
        return self._torch.cuda.device(index)

    def stream(self, index: int) -> int:
        """See :meth:`hvd_compress.kernels.cuda.Device.stream`."""
        return self._torch.cuda.current_stream(index).cuda_stream

    def empty(self, size: int, index: int) -> Any:
        """See :meth:`hvd_compress.kernels.cuda.Device.empty`."""
        torch = self._torch
        return torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", index))

    def pinned(self, size: int) -> Any:
        """See :meth:`hvd_compress.kernels.cuda.Device.pinned`."""
        return self._torch.zeros(size, dtype=self._torch.uint8, pin_memory=True)

    def number(self, tensor: Any) -> float:
        """See :meth:`hvd_compress.kernels.cuda.Device.number`."""
        return float(tensor.view(self._torch.float64).item())
