"""The code that the rows of PyTorch's frontends share."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch

from hvd_compress.engine.compressor import CompressorBase
from hvd_compress.engine.owner_steps import AdaGrad
from hvd_compress.exchanges.simulation import OwnerStep
from hvd_compress.ranks.counters import Counters
from tests.contract.frontend import Arrays, Frontend, Job, Kept
from tests.torch_models import DEVICE, Probe, on_arrays


class TorchJob(Job):
    """A probe.

    Args:
        model: with a compressor.
        compressor: its compressor.
        dtype: the dtype of its parameters.
    """

    def __init__(self, model: Probe, compressor: CompressorBase, dtype: torch.dtype) -> None:
        self.model, self.compressor, self._dtype = model, compressor, dtype

    def step(self, gradients: Arrays, used: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        tensors = {n: torch.from_numpy(g).to(DEVICE, self._dtype) for n, g in gradients.items()}
        self._run(tensors, used)
        result = {}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                assert parameter.grad.dtype == self._dtype
                assert parameter.grad.stride() == parameter.stride() or not parameter.numel()
                result[name] = parameter.grad.float().cpu().numpy().copy()
        return result

    def _run(self, tensors: dict[str, torch.Tensor], used: Sequence[str] | None) -> None:
        raise NotImplementedError

    def kept(self) -> tuple[Kept, Kept]:
        tensors = self.compressor.state_dict()["tensors"]
        owned = {name: one["owned"]["residual"] for name, one in tensors.items() if one["owned"]}
        whole = {name: one["residual"] for name, one in tensors.items()}
        return _copied(whole), _copied(owned)

    def joining(self) -> AbstractContextManager[None]:
        raise NotImplementedError

    @property
    def counters(self) -> Counters:
        return self.compressor.counters

    def save(self) -> Any:
        return self._saved(self.compressor.state_dict())

    @staticmethod
    def _saved(state: dict[str, Any]) -> bytes:
        file = io.BytesIO()
        torch.save(state, file)
        return file.getvalue()

    def load(self, saved: Any) -> None:
        self.compressor.load_state_dict(torch.load(io.BytesIO(saved)))

    def take_over(self, everybodys: Sequence[Any]) -> None:
        self.load(everybodys[self.compressor.state_dict()["rank"]])


@contextmanager
def _defaults(dtype: torch.dtype, device: str = "cpu") -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None if DEVICE.type == "cpu" else DEVICE)


class TorchFrontend(Frontend):
    """A frontend whose gradients are tensors of PyTorch."""

    varies = DEVICE.type == "cpu"  # Only the CPU's kernels write an entropy code.
    defaults = (
        lambda: _defaults(torch.bfloat16),
        lambda: _defaults(torch.float64),
        lambda: _defaults(torch.float32, "meta"),
    )

    def rounded(self, array: np.ndarray, dtype: str) -> np.ndarray:
        return torch.from_numpy(array).to(getattr(torch, dtype)).float().numpy()

    def adagrad(self) -> tuple[Any, OwnerStep]:
        step = AdaGrad(initial=0.25)
        return step, on_arrays(step)

    @staticmethod
    def _probe(shapes: Any, dtype: str, options: dict[str, Any]) -> tuple[Probe, torch.dtype]:
        chosen = getattr(torch, dtype)
        model = Probe(shapes, chosen)
        if options.pop("channels_last", False):
            model.to(memory_format=torch.channels_last)
        return model, chosen


def _copied(tensors: dict[str, torch.Tensor | None]) -> Kept:
    return {n: kept.cpu().float().numpy().copy() for n, kept in tensors.items() if kept is not None}
