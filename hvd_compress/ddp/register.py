"""Registers a compressor on a model, wrapped by hand or by a trainer."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hvd_compress.codecs import Codec
from hvd_compress.ddp.auto import Auto
from hvd_compress.ddp.compressor import Compressor, hook
from hvd_compress.exchanges.routing import Route
from hvd_compress.ranks.launch import say_alone

_INNER = ("_forward_module", "_orig_mod")
"""The attributes in which Lightning Fabric and ``torch.compile`` keep the module that they wrap."""


def register(
    model: nn.Module, codec: Codec | Route | str | Compressor, **options: Any
) -> Compressor:
    """Registers a compressor as the communication hook of a ``DistributedDataParallel`` model.

    A script that runs as one process, without DDP, needs no other lines: nothing is registered then, a log
    line says that there is one rank, and the compressor's counters stay at zero.

    Args:
        model: the ``DistributedDataParallel`` model; the result of Lightning Fabric's ``setup``,
            Accelerate's ``prepare`` or ``torch.compile`` for one; or, in one process, any module.
        codec: the encoding of gradients: a codec, a :class:`~hvd_compress.Route`, a codec's name,
            ``"auto"`` for :class:`Auto`, or a compressor.
        options: the options of :class:`Compressor` or :class:`Auto`; none with a compressor.

    Returns:
        The compressor.

    Raises:
        TypeError, ValueError: an argument is wrong, "expected X, got Y"; several ranks train a model that
            is not wrapped; the compressor has a process group of other ranks than the model; or the model
            has a communication hook.
    """
    wrapped = _ddp_in(model)
    if wrapped is None and dist.is_initialized() and dist.get_world_size() > 1:
        # A model of the composable replicate() makes its DDP in the first forward pass.
        remedy = (
            "call model.register_comm_hook(Compressor(model, codec), hook) in place of register()"
            if hasattr(model, "register_comm_hook")
            else "wrap the model before register(), or use hvd_compress.fsdp for FSDP2's"
        )
        raise TypeError(
            f"register.model: expected a DistributedDataParallel model among {dist.get_world_size()} "
            f"ranks, got {type(model).__name__}: {remedy}"
        )
    made_for = model if wrapped is None else wrapped
    if isinstance(codec, Compressor):
        if options:
            raise TypeError(
                f"register: expected no options beside a compressor, got {', '.join(options)}: pass them "
                f"to the compressor"
            )
        compressor = codec
    elif codec == "auto":
        compressor = Auto(made_for, **options)
    else:
        compressor = Compressor(made_for, codec, **options)
    if wrapped is None:
        say_alone()
        return compressor
    compressor.take_group_of(wrapped)
    try:
        wrapped.register_comm_hook(compressor, hook)
    except RuntimeError as error:
        if "once" not in str(error):
            raise
        raise ValueError(
            "register: expected a model without a communication hook, got one that has it: to change the "
            "codec, call set_codec() of the compressor that the first register() returned"
        ) from error
    return compressor


def _ddp_in(model: nn.Module | None) -> DistributedDataParallel | None:
    while model is not None and not isinstance(model, DistributedDataParallel):
        inner = (getattr(model, name, None) for name in _INNER)
        model = next((one for one in inner if isinstance(one, nn.Module)), None)
    return model
