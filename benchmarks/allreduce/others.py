"""Other people's all-reduces: PyTorch's own, its communication hooks, and three 8-bit quantizers."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd

Method = Callable[[torch.Tensor], None]
"""Writes the ranks' average over a float32 tensor, shape=(rows, columns)."""

Make = Callable[[int, dist.ProcessGroup], Method]
"""Makes a method for a number of elements and a group of all ranks, whose connections it has alone."""


def gloo(elements: int, group: dist.ProcessGroup) -> Method:
    """``torch.distributed.all_reduce`` of float32."""

    def work(tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor, group=group)
        tensor.div_(group.size())

    return work


class _Bucket:
    """A bucket of one gradient, as DDP passes it to a communication hook."""

    def __init__(self, gradient: torch.Tensor) -> None:
        self._gradient = gradient

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def buffer(self) -> torch.Tensor:
        return self._gradient.view(-1)

    def gradients(self) -> list[torch.Tensor]:
        return [self._gradient]


def bf16(elements: int, group: dist.ProcessGroup) -> Method:
    """PyTorch's ``bf16_compress_hook``."""

    def work(tensor: torch.Tensor) -> None:
        average = default_hooks.bf16_compress_hook(group, _Bucket(tensor)).wait()
        if average.data_ptr() != tensor.data_ptr():
            tensor.view(-1).copy_(average)

    return work


def powersgd(elements: int, group: dist.ProcessGroup) -> Method:
    """PyTorch's ``powerSGD_hook`` of rank 4."""
    state = power_sgd.PowerSGDState(group, matrix_approximation_rank=4, start_powerSGD_iter=2)
    state.iter = state.start_powerSGD_iter  # No uncompressed calls at the beginning.

    def work(tensor: torch.Tensor) -> None:
        power_sgd.powerSGD_hook(state, _Bucket(tensor)).wait()

    return work


class Quantizer(ABC):
    """A library's quantizer, whose codes travel in two shots."""

    module: str

    @abstractmethod
    def encode(self, values: torch.Tensor) -> list[torch.Tensor]:
        """The tensors that stand for values, shape=(n,), float32; their sizes depend on n alone."""

    @abstractmethod
    def decode(self, payload: torch.Tensor, count: int) -> torch.Tensor:
        """The values of what :meth:`encode` returned, as bytes, one after the other."""


class BitsAndBytes(Quantizer):
    """bitsandbytes' 8-bit dynamic map with a scale for each 4,096 elements."""

    module = "bitsandbytes"
    _BLOCK = 4096

    def __init__(self) -> None:
        from bitsandbytes import functional

        self._functional = functional
        self._map = functional.create_dynamic_map()

    def encode(self, values: torch.Tensor) -> list[torch.Tensor]:
        codes, state = self._functional.quantize_blockwise(
            values, code=self._map, blocksize=self._BLOCK
        )
        return [state.absmax, codes]

    def decode(self, payload: torch.Tensor, count: int) -> torch.Tensor:
        split = 4 * -(-count // self._BLOCK)
        return self._functional.dequantize_blockwise(
            payload[split:].contiguous(),
            absmax=payload[:split].clone().view(torch.float32),
            code=self._map,
            blocksize=self._BLOCK,
        )


class PiQuant(Quantizer):
    """pi-quant's 8 bits with one scale and one zero point."""

    module = "piquant"

    def __init__(self) -> None:
        import piquant

        self._piquant = piquant
        self._context = piquant.Context(1)

    def encode(self, values: torch.Tensor) -> list[torch.Tensor]:
        kinds, nearest = self._piquant.DataType, self._piquant.RoundMode.NEAREST
        count, source = values.numel(), values.data_ptr()
        scale, zero = self._context.compute_quant_params_ptr_float32(source, kinds.UINT8, count)
        codes = torch.empty(count, dtype=torch.uint8)
        self._context.quantize_ptr(
            *(source, kinds.F32, codes.data_ptr(), kinds.UINT8, count, scale, zero, nearest)
        )
        return [torch.tensor([scale, zero], dtype=torch.float64), codes]

    def decode(self, payload: torch.Tensor, count: int) -> torch.Tensor:
        kinds, replace = self._piquant.DataType, self._piquant.ReduceOp.SET
        scale, zero = payload[:16].clone().view(torch.float64).tolist()
        codes, values = payload[16:], torch.empty(count)
        self._context.dequantize_ptr(
            *(codes.data_ptr(), kinds.UINT8, values.data_ptr(), kinds.F32),
            *(count, scale, int(zero), replace),
        )
        return values


class Hivemind(Quantizer):
    """hivemind's ``Uniform8BitQuantization``: 256 bins of equal width within six standard deviations."""

    module = "hivemind"

    def __init__(self) -> None:
        from hivemind.compression import Uniform8BitQuantization

        self._quantization = Uniform8BitQuantization()

    def encode(self, values: torch.Tensor) -> list[torch.Tensor]:
        codes, centres = self._quantization.quantize(values)
        return [torch.as_tensor(centres), torch.as_tensor(codes)]

    def decode(self, payload: torch.Tensor, count: int) -> torch.Tensor:
        centres = payload[: 4 * 256].clone().view(torch.float32)
        return centres[payload[4 * 256 :].int()]


def two_shots(make: Callable[[], Quantizer]) -> Make:
    """Each rank averages one part of what the others' codes stand for, and sends codes of the average."""

    def prepare(elements: int, group: dist.ProcessGroup) -> Method:
        quantizer, ranks = make(), group.size()
        count = elements // ranks

        def payload(values: torch.Tensor) -> torch.Tensor:
            return torch.cat([one.view(torch.uint8) for one in quantizer.encode(values)])

        def work(tensor: torch.Tensor) -> None:
            sent = torch.stack([payload(part) for part in tensor.view(ranks, count)])
            rows = torch.empty_like(sent)
            dist.all_to_all_single(rows, sent, group=group)
            average = torch.zeros(count)
            for row in rows:
                average += quantizer.decode(row, count)
            dist.all_gather(list(rows), payload(average.div_(ranks)), group=group)
            for part, row in zip(tensor.view(ranks, count), rows, strict=True):
                part.copy_(quantizer.decode(row, count))

        return work

    return prepare


def installed(module: str) -> bool:
    """Returns whether a library is installed."""
    return importlib.util.find_spec(module) is not None


QUANTIZERS: dict[str, type[Quantizer]] = {
    "hivemind 8-bit": Hivemind,
    "bitsandbytes 8-bit": BitsAndBytes,
    "pi-quant 8-bit": PiQuant,
}

OTHERS: dict[str, Make] = {
    "gloo": gloo,
    "bf16 hook": bf16,
    "PowerSGD hook": powersgd,
    **{name: two_shots(one) for name, one in QUANTIZERS.items() if installed(one.module)},
}
"""The methods whose libraries are installed, by name."""
