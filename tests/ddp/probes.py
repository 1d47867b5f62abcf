"""Models under DistributedDataParallel whose gradients are known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hvd_compress.ddp as hvdc
from hvd_compress import Route
from hvd_compress.codecs import Codec, ErrorFeedback
from tests.torch_models import Probe


def distributed(
    model: torch.nn.Module, codec: Codec, feedback: ErrorFeedback, **options: Any
) -> tuple[DistributedDataParallel, hvdc.Compressor]:
    """A model with a compressor; options that DDP does not know are the compressor's."""
    known = {"find_unused_parameters", "static_graph", "gradient_as_bucket_view"}
    known |= {"bucket_cap_mb", "process_group"}
    for_ddp = {name: options.pop(name) for name in known & options.keys()}
    route = Route(codec, feedback, inner=options.pop("inner", None))
    # Small buckets, so that there are several.
    ddp = DistributedDataParallel(model, **{"bucket_cap_mb": 0.01, **for_ddp})
    compressor = hvdc.Compressor(ddp, route, **{"threshold": 0, **options})
    ddp.register_comm_hook(compressor, hvdc.hook)
    return ddp, compressor


def exchange(
    ddp: DistributedDataParallel,
    gradients: Mapping[str, torch.Tensor],
    order: Iterable[str] | None = None,
) -> dict[str, torch.Tensor]:
    """One backward pass; returns the gradients that it leaves."""
    ddp.zero_grad()
    ddp(gradients, order).backward()
    return gradients_of(ddp)


def gradients_of(ddp: DistributedDataParallel) -> dict[str, torch.Tensor]:
    """A model's gradients by name, where it has one."""
    named = ddp.module.named_parameters()
    return {name: p.grad.detach().clone() for name, p in named if p.grad is not None}


def assert_equal_on_all_ranks(values: Mapping[str, torch.Tensor], group: Any = None) -> None:
    """Fails unless every rank holds the same numbers, bit for bit."""
    flat = torch.cat([value.detach().reshape(-1).float() for value in values.values()])
    everywhere = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everywhere, flat, group=group)
    assert all(torch.equal(everywhere[0], other) for other in everywhere)


__all__ = ["Probe", "assert_equal_on_all_ranks", "distributed", "exchange", "gradients_of"]
