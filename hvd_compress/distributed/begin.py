"""The start of objects that have a compressor of their own, such as optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from hvd_compress.codecs import Codec
from hvd_compress.codecs.calls import expect_instance
from hvd_compress.distributed.compressor import Compressor
from hvd_compress.distributed.keys import parts
from hvd_compress.exchanges.routing import Route
from hvd_compress.process_group.device_collectives import collectives_of
from hvd_compress.process_group.values import problem_told, tell
from hvd_compress.ranks import agreement


def group_of(given: Any) -> dist.ProcessGroup | None:
    """The process group of what :func:`compressor_of` would return."""
    return given.process_group if isinstance(given, Compressor) else None


def compressor_of(given: Any, where: str, write: str, **options: Any) -> Compressor:
    """The given compressor, or a new one for a given codec, for an object that does not share it.

    Args:
        given: a compressor, a codec, a route or a codec's name.
        where: the caller's name, for the message.
        write: the caller's line, with ``{}`` in place of the argument.
        options: the options of a new compressor.

    Raises:
        TypeError, ValueError: ``given`` is something else.
    """
    if isinstance(given, Codec | Route | str):
        given = Compressor(given, **options)
    expect_instance(where, given, Compressor, write, "Int8()")
    compressor: Compressor = given
    compressor._use.remedy = f"call step() of the {where} that has it, on every rank"
    return compressor


def begin_alike(
    compressor: Compressor, parameters: Mapping[str, torch.Tensor], settings: Mapping[str, Any]
) -> None:
    """Compares the ranks' settings and parameters, and gives every rank the first rank's values.

    Args:
        compressor: the compressor with the process group of the ranks.
        parameters: the parameters by name, as :func:`hvd_compress.engine.parameters.parameters` returns
            them.
        settings: other values that have to be the same on every rank, JSON-serializable.

    Raises:
        TypeError, ValueError: a parameter is a ``DTensor`` of which ranks of the group have other parts.
        ExchangeError: settings or parameters differ (raised on every rank, with the difference); another
            rank has told of an error; or there is no process group.
    """
    group = compressor.process_group
    with problem_told(group):
        own, numbers = parts({name: one.data for name, one in parameters.items()}, group)
    shapes = {name: [str(p.dtype), list(p.shape)] for name, p in own.items()}
    ranks = collectives_of(group)
    agreement.compare(tell(ranks, {**settings, "parameters": shapes, "part of": numbers}))
    for values in own.values():
        if values.numel():
            dist.broadcast(values, group=group, group_src=0)
