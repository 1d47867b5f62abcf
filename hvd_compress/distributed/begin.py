"""The start of training for ranks whose parameters this package keeps equal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from hvd_compress.distributed.compressor import Compressor
from hvd_compress.distributed.keys import parts
from hvd_compress.engine.slots import expect_memory
from hvd_compress.process_group.device_collectives import collectives_of
from hvd_compress.process_group.values import problem_told, tell
from hvd_compress.ranks import agreement


def expect_memory_of(parameters: Mapping[str, torch.Tensor]) -> None:
    """Raises ``ValueError`` if one of the parameters, given by name, is on the meta device."""
    for name, parameter in parameters.items():
        expect_memory(name, parameter)


def begin_alike(
    compressor: Compressor, parameters: Mapping[str, torch.Tensor], settings: Mapping[str, Any]
) -> None:
    """Compares the ranks' settings and parameters, and gives every rank the first rank's values.

    Args:
        compressor: the compressor with the process group of the ranks.
        parameters: the parameters by name, at least one.
        settings: other values that have to be the same on every rank, JSON-serializable.

    Raises:
        TypeError, ValueError: a parameter is on the meta device; or it is a ``DTensor`` of which ranks of
            the group have other parts.
        ExchangeError: settings or parameters differ (raised on every rank, with the difference); another
            rank has told of an error; or there is no process group.
    """
    group = compressor.process_group
    with problem_told(group):
        own, numbers = parts({name: one.data for name, one in parameters.items()}, group)
        expect_memory_of(own)
    shapes = {name: [str(p.dtype), list(p.shape)] for name, p in own.items()}
    ranks = collectives_of(group)
    agreement.compare(tell(ranks, {**settings, "parameters": shapes, "part of": numbers}))
    for values in own.values():
        if values.numel():
            dist.broadcast(values, group=group, group_src=0)
