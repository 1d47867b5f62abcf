"""The row of ``hvd_compress.torch``, under a stock ``DistributedOptimizer``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import horovod.torch as hvd
import torch

import hvd_compress.torch as hvdc
from hvd_compress import Route
from hvd_compress.codecs import Codec, ErrorFeedback
from tests.contract.frontend import OF_HOROVOD, Form, Job
from tests.contract.pytorch import TorchFrontend, TorchJob
from tests.torch.probes import distributed, process_set
from tests.torch_models import DEVICE

_NOT_IN_GROUPS = () if DEVICE.type == "cpu" else ("low_rank",)
"""PowerSGD leaves vectors unencoded, and on a device a group may not mix them with encoded gradients."""


class _Job(TorchJob):
    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts)
        self.optimizer = distributed(self.model, self.compressor, **options)

    def _run(self, tensors: dict[str, torch.Tensor], used: Sequence[str] | None) -> None:
        self.optimizer.zero_grad()
        self.model(tensors, used).backward()
        self.optimizer.step()

    @contextmanager
    def joining(self) -> Iterator[None]:
        yield
        hvd.join()


class HorovodTorch(TorchFrontend):
    """Makes and runs the contract's jobs of ``hvd_compress.torch``."""

    name = "torch"
    launcher, launcher_of_hosts = "horovodrun", "two hosts"
    environment = OF_HOROVOD
    errors = hvdc.ExchangeError
    token_bytes = 12

    rank = property(lambda self: hvd.rank())
    size = property(lambda self: hvd.size())
    local = property(lambda self: hvd.local_size())

    @property
    def forms(self) -> Sequence[Form]:
        return (
            Form({"op": hvd.Sum}, sums=True),
            Form({"gradient_predivide_factor": 3.0}),
            Form({"groups": 2}, lacks=_NOT_IN_GROUPS),
            Form({"groups": 2, "op": hvd.Sum}, sums=True, lacks=_NOT_IN_GROUPS),
            Form({"channels_last": True}),
        )

    def make(
        self,
        exchange: str,
        codec: Codec,
        feedback: ErrorFeedback,
        shapes: Any,
        dtype: str = "float32",
        **options: Any,
    ) -> Job:
        route = Route(codec, feedback, inner=options.pop("inner", None))
        model, chosen = self._probe(shapes, dtype, options)
        known = {"op", "groups", "gradient_predivide_factor"} & options.keys()
        for_horovod = {name: options.pop(name) for name in known}
        if "process_set" in options:
            for_horovod["process_set"] = options["process_set"]
        options = {"exchange": exchange, "threshold": 0, **options}
        compressor = hvdc.Compressor(model.named_parameters(), route, **options)
        return _Job(model, compressor, chosen, **for_horovod)

    def group_of(self, *ranks: int) -> dict[str, Any]:
        return {"process_set": process_set(*ranks)}

    def gather(self, value: Any) -> list[Any]:
        return hvd.allgather_object(value, name="gathered by the contract")

    def barrier(self) -> None:
        hvd.barrier()
