"""The row of ``hvd_compress.ddp``, under a stock ``DistributedDataParallel``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from hvd_compress.codecs import Codec, ErrorFeedback
from tests.contract.frontend import Form, Job
from tests.contract.process_groups import ProcessGroupFrontend
from tests.contract.pytorch import TorchJob
from tests.ddp.probes import distributed


class _Job(TorchJob):
    def __init__(
        self, ddp: torch.nn.parallel.DistributedDataParallel, compressor: Any, dtype: torch.dtype
    ) -> None:
        super().__init__(ddp.module, compressor, dtype)
        self.ddp = ddp

    def _run(self, tensors: dict[str, torch.Tensor], used: Sequence[str] | None) -> None:
        self.ddp.zero_grad()
        self.ddp(tensors, used).backward()

    def joining(self) -> AbstractContextManager[None]:
        return self.ddp.join()


class DDP(ProcessGroupFrontend):
    """Makes and runs the contract's jobs of ``hvd_compress.ddp``."""

    name = "ddp"
    zeros_after_join = True
    cannot = {  # noqa: RUF012
        "half_precision_on_one_rank": "DDP itself sends parameters first, and fails",
        "a_rank_that_joins_in_the_warm_up": "a rank that has joined counts its steps as the others do",
        "a_change_of_codec_on_some_ranks": "ranks wait for each other: tests/ddp/test_rendezvous.py",
        "a_reset_on_some_ranks": "the same",
    }
    sends_unused = False
    with_unused = {"find_unused_parameters": True}  # noqa: RUF012
    one_bucket = {"bucket_cap_mb": 25}  # noqa: RUF012
    views = ({}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001})

    @property
    def forms(self) -> Sequence[Form]:
        options: tuple[dict[str, Any], ...] = (
            {"gradient_as_bucket_view": True},
            {"static_graph": True},
            {"static_graph": True, "gradient_as_bucket_view": True},
            {"find_unused_parameters": True},
            {"bucket_cap_mb": 25},
            {"bucket_cap_mb": 1e-6},
            {"channels_last": True},
            {"channels_last": True, "gradient_as_bucket_view": True},
        )
        return [Form(one) for one in options]

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
        ddp, compressor = distributed(model, codec, feedback, exchange=exchange, **options)
        return _Job(ddp, compressor, chosen)
