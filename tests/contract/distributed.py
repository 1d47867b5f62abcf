"""The row of ``hvd_compress.distributed``: one ``all_reduce`` of all tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import hvd_compress.distributed as hvdc
from hvd_compress import Route
from hvd_compress.codecs import Codec, ErrorFeedback
from tests.contract.frontend import Form, Job
from tests.contract.process_groups import ProcessGroupFrontend
from tests.contract.pytorch import TorchJob
from tests.torch_models import Probe


class _Job(TorchJob):
    def __init__(self, model: Probe, compressor: Any, dtype: torch.dtype, form: Any) -> None:
        super().__init__(model, compressor, dtype)
        self._form = form

    def _run(self, tensors: dict[str, torch.Tensor], used: Sequence[str] | None) -> None:
        assert used is None
        self.model.zero_grad()
        self.model(tensors).backward()
        named = list(self.model.named_parameters())
        gradients, names = [p.grad for _, p in named], [name for name, _ in named]
        options = {"op": self._form.get("op", dist.ReduceOp.AVG), "group": self._form.get("group")}
        if self._form.get("one_by_one"):
            works = [
                hvdc.all_reduce(gradient, self.compressor, key=name, async_op=True, **options)
                for gradient, name in zip(gradients, names, strict=True)
            ]
            for work in works[::-1]:
                work.wait()
        else:
            hvdc.all_reduce(gradients, self.compressor, key=names, **options)


class Distributed(ProcessGroupFrontend):
    """Makes and runs the contract's jobs of ``hvd_compress.distributed``."""

    name = "distributed"
    cannot = {  # noqa: RUF012
        "gradients_in_another_order_on_each_rank": "ranks call in one order",
        "parameters_that_are_not_used": "every rank has every tensor",
        "a_rank_that_joins": "ranks that run out of data are the caller's",
        "a_rank_that_joins_at_once": "ranks that run out of data are the caller's",
        "a_rank_that_joins_in_the_warm_up": "ranks that run out of data are the caller's",
    }

    @property
    def forms(self) -> Sequence[Form]:
        return [
            Form({"op": dist.ReduceOp.SUM}, sums=True),
            Form({"one_by_one": True}),
            Form({"group": dist.group.WORLD}),
            Form({"channels_last": True}),
        ]

    def make(
        self,
        exchange: str,
        codec: Codec,
        feedback: ErrorFeedback,
        shapes: Any,
        dtype: str = "float32",
        **options: Any,
    ) -> Job:
        form = {k: options.pop(k) for k in ("op", "one_by_one", "group") if k in options}
        route = Route(codec, feedback, inner=options.pop("inner", None))
        model, chosen = self._probe(shapes, dtype, options)
        options = {"threshold": 0, **options}
        compressor = hvdc.Compressor(route, exchange=exchange, **options)
        return _Job(model, compressor, chosen, form)
