"""Which kernels encode and decode a tensor: those of the device that it is on."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from hvd_compress.codecs import Codec, ErrorFeedback, NoiseKey
from hvd_compress.kernels.batch import Arrays, Entry, SerialBatch
from hvd_compress.kernels.cpu import CpuKernels
from hvd_compress.kernels.cpu_batch import CpuBatch
from hvd_compress.kernels.cpu_library import spec_pointer
from hvd_compress.kernels.cuda import CudaKernels
from hvd_compress.kernels.interface import Batch, Kernels
from hvd_compress.kernels.torch_device import TorchDevice


class Executors:
    """The CPU's kernels, and those for CUDA as soon as a CUDA tensor comes.

    Has the encoder and the decoder of :class:`hvd_compress.kernels.interface.Kernels`. CUDA's kernels run
    later than the host asks for them, so that :meth:`check` raises their errors. A codec without kernels
    runs in the reference, on copies in host memory, and waits for the device.

    Args:
        threads: of the CPU's kernels.
        chained: whether the caller puts streams in order, and waits for devices, itself.

    Attributes:
        threads: of the CPU's kernels.
    """

    name = "torch"

    def __init__(self, threads: int, *, chained: bool = False) -> None:
        self.threads = threads
        self._chained = chained
        self._cpu = CpuKernels(threads)
        self._cuda: CudaKernels | None = None
        self._last: dict[torch.device, torch.cuda.Stream] = {}
        self._warned: set[Codec] = set()

    def deferred(self, tensor: torch.Tensor) -> CudaKernels | None:
        """The kernels for a tensor if they work behind the host's back, and report errors later.

        Raises:
            KernelError: it is a CUDA tensor, and the CUDA library was not built.
        """
        if tensor.device.type != "cuda":
            return None
        if self._cuda is None:
            self._cuda = CudaKernels(TorchDevice(torch))
        return self._cuda

    def order(self, tensor: torch.Tensor) -> None:
        """Has the current stream of a CUDA tensor's device wait for the one that was current last.

        Gradients, residuals and payloads may be used in one stream now and in another one next time. Where
        streams are in order without, nothing is done.
        """
        if tensor.device.type == "cuda":
            stream = torch.cuda.current_stream(tensor.device)
            last = self._last.get(tensor.device, stream)
            if last != stream and not self._chained:
                stream.wait_stream(last)
            self._last[tensor.device] = stream

    def encode(
        self,
        codec: Codec,
        shape: tuple[int, ...],
        gradient: torch.Tensor,
        payload: torch.Tensor,
        *,
        feedback: ErrorFeedback,
        residual: torch.Tensor | None,
        noise: NoiseKey,
    ) -> None:
        """Encodes by the kernels of the gradient's device, as :meth:`Kernels.encode`.

        Raises:
            TypeError: there are no kernels for the gradient's device.
        """
        kernels, given, rest = self._of(gradient), gradient, residual
        copied = self._runs_on_copies(codec, shape, gradient)
        written = torch.empty_like(payload, device="cpu") if copied else payload
        if copied:
            kernels, given = self._cpu, gradient.cpu()
            rest = None if residual is None else residual.cpu()
        kernels.encode(codec, shape, given, written, feedback=feedback, residual=rest, noise=noise)
        if copied:
            payload.copy_(written)
            if residual is not None and rest is not None:
                residual.copy_(rest)

    def decode_sum(
        self,
        codec: Codec,
        shape: tuple[int, ...],
        payloads: torch.Tensor,
        out: torch.Tensor,
        *,
        step: int,
        scale: float = 1.0,
        accumulate: bool = False,
    ) -> None:
        kernels = self._of(out)
        keep_from_reuse(payloads, out)
        copied = self._runs_on_copies(codec, shape, out)
        written = out
        if copied:
            kernels, payloads, written = self._cpu, payloads.cpu(), out.cpu()
        kernels.decode_sum(
            codec, shape, payloads, written, step=step, scale=scale, accumulate=accumulate
        )
        if copied:
            out.copy_(written)

    def batch(self, entries: Sequence[Entry], arrays: Arrays, like: torch.Tensor) -> Batch:
        """Kernels that encode and decode many tensors together.

        Args:
            entries: the tensors.
            arrays: where they are found in the arrays of a call.
            like: a tensor on their device.
        """
        if self.deferred(like) is None and like.device.type == "cpu":
            return CpuBatch(entries, self.threads, arrays)
        return SerialBatch(self, entries, arrays, deferred=True)

    def square_sum(self, tensor: torch.Tensor) -> float:
        """Sum of squares of a float32 tensor, in double precision; waits for it."""
        self.order(tensor)
        return (self.deferred(tensor) or self._cpu).square_sum(tensor)

    def flags(
        self, payloads: Sequence[torch.Tensor], word: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """All payloads' flags in one word that only a device knows as yet.

        Args:
            payloads: each shape=(k, bytes), uint8.
            word: what was returned for others, which these are added to; None is a new one.

        Returns:
            shape=(1,), int32, 0 if no payload was encoded from an Inf or a NaN; None where the payloads are
            not all on one such device.
        """
        devices = {rows.device for rows in payloads}
        kernels = self.deferred(payloads[0]) if len(devices) == 1 else None
        if kernels is None:
            return None
        if word is None:
            word = torch.zeros(1, dtype=torch.int32, device=payloads[0].device)
        for rows in payloads:
            self.order(rows)
            kernels.collect_flags(rows, word)
        return word

    def check(self) -> None:
        """Raises what CUDA's kernels have met, as far as the host can see it without waiting.

        Raises:
            PayloadError: a payload was altered on its way.
        """
        if self._cuda is not None:
            self._cuda.check()

    def settle(self) -> None:
        """Waits for CUDA devices that have had work, and checks.

        Raises:
            PayloadError: as in :meth:`check`.
        """
        for device in self._last:
            torch.cuda.synchronize(device)
        self.check()

    def _runs_on_copies(self, codec: Codec, shape: tuple[int, ...], tensor: torch.Tensor) -> bool:
        """Whether a codec has no kernel for a tensor's device; the first time, warns."""
        if self.deferred(tensor) is None or spec_pointer(codec, shape) is not None:
            return False
        if codec not in self._warned:
            self._warned.add(codec)
            warnings.warn(
                f"{codec} has no CUDA kernel: its NumPy reference encodes and decodes copies in host "
                f"memory, which is slow",
                stacklevel=2,
            )
        return True

    def _of(self, tensor: torch.Tensor) -> Kernels:
        self.order(tensor)
        deferred = self.deferred(tensor)
        if deferred is not None:
            return deferred
        if tensor.device.type != "cpu":
            raise TypeError(
                f"expected gradients on the CPU or on a CUDA device, got one on {tensor.device}"
            )
        return self._cpu


def keep_from_reuse(*tensors: torch.Tensor) -> None:
    """For tensors that may be another stream's memory: the current one works with them now."""
    for tensor in tensors:
        if tensor.device.type == "cuda":
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
