"""Compressors that are pickled and copied, by themselves and with the model that has them."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hvd_compress.ddp as hvdc
import hvd_compress.distributed as of_all_reduce
from hvd_compress import Route
from hvd_compress.codecs import ErrorFeedback, Int8, OneBit
from tests.ddp.probes import Probe, distributed, exchange
from tests.ranks import on_ranks
from tests.torch_models import assert_same_bits, targets

SHAPES = {"a": (40, 70), "b": (3000,), "small": (10,)}


def _saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@on_ranks(2, launcher="torchrun")
def test_a_copy_goes_on_bit_for_bit() -> None:
    """A copy has the codecs of ``set_codec``, and belongs to the parameters that were copied with it."""
    for exchanged in ("allgather", "two_shot"):
        ddp, compressor = distributed(Probe(SHAPES), OneBit(), ErrorFeedback(), exchange=exchanged)
        exchange(ddp, targets(SHAPES, dist.get_rank(), 0))
        compressor.set_codec(OneBit(64), layers="b")
        exchange(ddp, targets(SHAPES, dist.get_rank(), 1))
        for copied in (copy.deepcopy, _saved, lambda pair: pickle.loads(pickle.dumps(pair))):
            module, twin = copied((ddp.module, compressor))
            again = DistributedDataParallel(module, bucket_cap_mb=0.01)
            again.register_comm_hook(twin, hvdc.hook)
            for name, parameter in module.named_parameters():
                assert twin._by_parameter[parameter].name == name
            before = copy.deepcopy(compressor.state_dict())
            gradients = targets(SHAPES, dist.get_rank(), 2)
            got = exchange(again, gradients)
            assert_same_bits(got, exchange(ddp, gradients))
            assert twin.routes() == compressor.routes()
            compressor.load_state_dict(before)


@on_ranks(2, launcher="torchrun")
def test_models_are_copied_with_the_hook() -> None:
    """A model with this package's hook is copied as one with PyTorch's own hook is."""
    makers: list[Callable[[Any], hvdc.Compressor]] = [
        lambda model: hvdc.Compressor(model, OneBit()),
        lambda model: hvdc.Compressor(model, Int8()),
        hvdc.Auto,
    ]
    for made in makers:
        ddp = DistributedDataParallel(Probe(SHAPES))
        compressor = made(ddp)
        ddp.register_comm_hook(compressor, hvdc.hook)
        for step in range(2):
            exchange(ddp, targets(SHAPES, dist.get_rank(), step))
        for twin in (copy.deepcopy(ddp), _saved(ddp)):
            assert_same_bits(twin.state_dict(), ddp.state_dict())
        averaged = torch.optim.swa_utils.AveragedModel(ddp)
        averaged.update_parameters(ddp)
        exchange(ddp, targets(SHAPES, dist.get_rank(), 2))


@on_ranks(2, launcher="torchrun")
def test_what_a_copy_keeps_of_an_all_reduce() -> None:
    compressor = of_all_reduce.Compressor(OneBit(), exchange="two_shot", threshold=0)
    for step in range(3):
        if step == 2:
            compressor.set_codec(Route(Int8("linear"), ErrorFeedback()), layers="b")
        twin = copy.deepcopy(compressor) if step else pickle.loads(pickle.dumps(compressor))
        results = []
        for one in (compressor, twin):
            tensors = targets(SHAPES, dist.get_rank(), step)
            of_all_reduce.all_reduce(list(tensors.values()), one, key=list(tensors))
            results.append(tensors)
        assert_same_bits(*results)


@on_ranks(2, launcher="torchrun")
def test_copies_that_cannot_be() -> None:
    """The error says what to use."""
    ddp, compressor = distributed(Probe(SHAPES), OneBit(), ErrorFeedback())
    ddp(targets(SHAPES, dist.get_rank(), 0)).backward()
    foreign: list[Any] = [pickle.dumps(compressor)]
    dist.broadcast_object_list(foreign)
    one = pickle.loads(foreign[0])
    if dist.get_rank() == 1:
        with pytest.raises(hvdc.ExchangeError, match=r"on rank 1 of 2, got one of rank 0 of 2"):
            one.state_dict()
    group = dist.new_group([0, 1])
    ddp = DistributedDataParallel(Probe(SHAPES), process_group=group)
    with pytest.raises(
        TypeError, match=r"default process group.* keep what state_dict\(\) returns"
    ):
        pickle.dumps(hvdc.Compressor(ddp, OneBit()))
    compressor = of_all_reduce.Compressor(OneBit(), threshold=0)
    work = of_all_reduce.all_reduce(torch.ones(3000), compressor, key="a", async_op=True)
    with pytest.raises(
        hvdc.ExchangeError, match="pickle or copy: expected no exchange in progress"
    ):
        copy.deepcopy(compressor)
    work.wait()
