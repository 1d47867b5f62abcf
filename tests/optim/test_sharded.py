"""1-bit Adam on models that FSDP2 shards, beside whole ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import hvd_compress.distributed as hvdc
from hvd_compress import Int8, NoCompression, OneBit
from hvd_compress.optim import OneBitAdam
from hvd_compress.papers import DoubleBuffering
from tests.diloco.test_shards import SHAPES, cut, parts
from tests.fsdp.probes import Net, mesh_of, shard
from tests.ranks import on_ranks
from tests.torch_models import assert_same_bits, targets

WARM = 2


def _adam(net: Any, codec: Any, group: Any) -> OneBitAdam:
    compressor = hvdc.Compressor(codec, process_group=group, threshold=0, warmup_steps=WARM)
    return OneBitAdam(net.named_parameters(), compressor, lr=0.1)


@on_ranks(4, launcher="torchrun")
def test_shards_move_as_whole_parameters_do_and_codecs_see_shards() -> None:
    mesh = mesh_of(2)
    replica, group = mesh.get_local_rank("replicate"), mesh.get_group("replicate")
    for codec in (NoCompression(), OneBit()):
        net, whole = shard(Net(SHAPES), mesh), Net(SHAPES)
        pieces = Net({name: tuple(one.shape) for name, one in parts(net).items()})
        adams = [_adam(one, codec, group) for one in (net, whole, pieces)]
        for step in range(WARM + 4):
            gradients = targets(SHAPES, replica, step)
            for one in (net, whole):
                one.zero_grad()
                one(gradients).backward()
                if one is net and step == WARM + 1 and dist.get_rank() == 3:
                    next(iter(net.parameters())).grad.to_local()[0, 0] = torch.inf
            for name, parameter in pieces.named_parameters():
                parameter.grad = cut(gradients, mesh)[name].clone()
            if step == WARM + 1:
                # All shards skip the step that one of them cannot make.
                before = {name: one.clone() for name, one in parts(net).items()}
                adams[0].step()
                assert adams[0].skipped_steps == 1
                assert_same_bits(parts(net), before)
                continue
            for adam in adams:
                adam.step()
            if isinstance(codec, NoCompression):
                assert_same_bits(parts(net), cut(whole, mesh))
            assert_same_bits(parts(net), dict(pieces.named_parameters()))
        norms = [adam.compressor.residual_norm() for adam in adams]
        assert norms[0] == norms[2]
        assert isinstance(codec, NoCompression) or norms[0] > 0


@on_ranks(4, launcher="torchrun")
def test_a_group_of_ranks_with_other_shards_is_refused() -> None:
    mesh = mesh_of(2)
    net = shard(Net(SHAPES), mesh)
    for group in (None, mesh.get_group("shard")):
        with pytest.raises(ValueError, match="make the compressor with process_group"):
            _adam(net, OneBit(), group)


@on_ranks(4, launcher="torchrun", alone=True)
def test_an_exchange_that_fails_for_one_shard_is_an_error_for_all() -> None:
    """None of them waits for the ranks of that shard."""
    mesh = mesh_of(2)
    net = shard(Net(SHAPES), mesh)
    adam = _adam(net, OneBit(), mesh.get_group("replicate"))
    for step in range(WARM + 2):
        net.zero_grad()
        net(targets(SHAPES, mesh.get_local_rank("replicate"), step)).backward()
        if step < WARM + 1:
            adam.step()
    if dist.get_rank() == 3:
        adam.compressor.set_codec(Int8())
    own = mesh.get_local_rank("shard") == 1
    message = "on rank 1" if own else "the exchange of another one failed"
    before = adam.compressor.residual_norm()
    with pytest.raises(hvdc.ExchangeError, match=message):
        adam.step()
    assert own or adam.compressor.residual_norm() == before


@on_ranks(4, launcher="torchrun")
def test_parameters_of_which_a_mesh_shares_out_some_only_are_refused() -> None:
    mesh = mesh_of(2)
    net, plain = shard(Net(SHAPES), mesh), torch.nn.Linear(9, 9)
    named = [*net.named_parameters(), *plain.named_parameters()]
    with pytest.raises(
        ValueError, match=r"all parameters on one mesh, or on none, got .* none for weight"
    ):
        OneBitAdam(named, OneBit(), warmup_steps=WARM)
    hybrid = Net(SHAPES)
    for module in (*hybrid.children(), hybrid):
        fully_shard(module, mesh=mesh)
    with pytest.raises(ValueError, match="expected parameters on a mesh of one dimension, got "):
        OneBitAdam(hybrid.named_parameters(), OneBit(), warmup_steps=WARM)
    sgd = torch.optim.SGD([one for _, one in named], lr=0.1)
    with pytest.raises(ValueError, match=r"expected whole parameters, got a shard of first\.a"):
        DoubleBuffering(named, sgd, OneBit())
