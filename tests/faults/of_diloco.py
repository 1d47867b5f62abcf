"""Jobs of DiLoCo, whose average arrives a step later.

With an outer learning rate of 1 and no momentum, common parameters of zero become the average of the ranks'
changes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import hvd_compress.distributed as hvdc
from hvd_compress import Route
from hvd_compress.codecs import Codec, ErrorFeedback
from hvd_compress.diloco import DiLoCo
from tests.contract.frontend import Arrays, Job
from tests.contract.process_groups import ProcessGroupFrontend
from tests.contract.pytorch import TorchJob
from tests.torch_models import Probe

EVERY = 2


class _Job(TorchJob):
    def __init__(self, model: Probe, compressor: hvdc.Compressor, dtype: torch.dtype) -> None:
        super().__init__(model, compressor, dtype)
        outer = functools.partial(torch.optim.SGD, lr=1.0)
        self._diloco = DiLoCo(
            model, compressor, sync_every=EVERY, outer_optimizer=outer, delay=1, mixing=0.0
        )
        self._diloco.step()

    @torch.no_grad()
    def step(self, gradients: Arrays, used: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        assert used is None
        for name, parameter in self.model.named_parameters():
            self._diloco.common_parameters[name].zero_()
            parameter.copy_(-torch.from_numpy(gradients[name]))
        for _ in range(EVERY):
            self._diloco.step()
        return {name: -p.detach().numpy() for name, p in self.model.named_parameters()}

    def save(self) -> Any:
        return self._saved(self._diloco.state_dict())


class OfDiLoCo(ProcessGroupFrontend):
    """The frontend ``hvd_compress.diloco``."""

    name = "diloco"
    forms = ()

    def make(
        self,
        exchange: str,
        codec: Codec,
        feedback: ErrorFeedback,
        shapes: Any,
        dtype: str = "float32",
        **options: Any,
    ) -> Job:
        model, chosen = self._probe(shapes, dtype, options)
        options = {"threshold": 0, **options}
        compressor = hvdc.Compressor(Route(codec, feedback), exchange=exchange, **options)
        return _Job(model, compressor, chosen)
