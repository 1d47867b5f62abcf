"""Other projects' codecs in the codec benchmark, if they are installed; none has error feedback."""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from benchmarks.codec_cases import Buffers


class BitsAndBytesCase:
    """bitsandbytes' 8-bit dynamic map, which cannot add to an output."""

    module = "bitsandbytes"
    name = "bitsandbytes 4096"

    def __init__(self, buffers: Buffers, threads: int) -> None:
        from bitsandbytes import functional

        self.config: dict[str, Any] = {"bitsandbytes": version("bitsandbytes"), "blocksize": 4096}
        self.bits = 8 + 32 / 4096
        self._functional = functional
        self._x = torch.from_numpy(buffers.x)

    def encode(self) -> None:
        """Calls ``quantize_blockwise``."""
        self._codes, self._state = self._functional.quantize_blockwise(self._x, blocksize=4096)

    def decode(self) -> np.ndarray:
        """Calls ``dequantize_blockwise``, which on CPUs allocates its output."""
        return self._functional.dequantize_blockwise(self._codes, self._state).numpy()


class PiQuantCase:
    """pi-quant's unsigned 8-bit integers, with one scale and one zero point for the tensor."""

    module = "piquant"
    name = "pi-quant uint8 tensor"

    def __init__(self, buffers: Buffers, threads: int) -> None:
        import piquant

        self.config: dict[str, Any] = {"pypiquant": version("pypiquant"), "dtype": "uint8"}
        self.bits = 8.0
        self._piquant = piquant
        self._context = piquant.Context(threads)
        self._x, self._out = torch.from_numpy(buffers.x), torch.from_numpy(buffers.out)
        self._codes = torch.empty(self._x.numel(), dtype=torch.uint8)

    def encode(self) -> None:
        """Computes the scale and the zero point, then the codes, rounded to the nearest."""
        count, x = self._x.numel(), self._x.data_ptr()
        uint8, f32 = self._piquant.DataType.UINT8, self._piquant.DataType.F32
        self._scale = self._context.compute_quant_params_ptr_float32(x, uint8, count)
        nearest = self._piquant.RoundMode.NEAREST
        codes = self._codes.data_ptr()
        self._context.quantize_ptr(x, f32, codes, uint8, count, *self._scale, nearest)

    def decode(self) -> None:
        """Decodes, and overwrites the output."""
        count, codes, out = self._x.numel(), self._codes.data_ptr(), self._out.data_ptr()
        uint8, f32 = self._piquant.DataType.UINT8, self._piquant.DataType.F32
        reduction = self._piquant.ReduceOp.SET
        self._context.dequantize_ptr(codes, uint8, out, f32, count, *self._scale, reduction)


OTHERS = tuple(
    case for case in (BitsAndBytesCase, PiQuantCase) if importlib.util.find_spec(case.module)
)
"""The cases whose packages are installed."""
