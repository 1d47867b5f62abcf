"""Ranks with other numbers of threads get the same bits; see also ddp, fsdp and torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import hvd_compress.distributed as hvdc
from hvd_compress.codecs import OneBit
from hvd_compress.diloco import DiLoCo
from hvd_compress.optim import OneBitAdam
from hvd_compress.papers import DoubleBuffering
from tests.contract.cases import FLAT, USUAL
from tests.ddp.probes import assert_equal_on_all_ranks
from tests.ranks import on_ranks
from tests.torch_models import Probe, targets, unequal_threads

SHAPES = {"a": (300, 701), "b": (2049, 65)}
"""So long that PyTorch divides them among threads."""


@on_ranks(2, launcher="torchrun")
def test_averages() -> None:
    with unequal_threads(dist.get_rank()):
        for exchange in FLAT:
            codec, _ = USUAL[exchange]
            compressor = hvdc.Compressor(codec, exchange=exchange, threshold=0)
            for step in range(2):
                got = targets(SHAPES, dist.get_rank(), step)
                hvdc.all_reduce(list(got.values()), compressor, key=list(got))
                assert_equal_on_all_ranks(got)


@on_ranks(2, launcher="torchrun")
def test_1_bit_adam() -> None:
    """Also where some variances become those of other elements."""
    shapes = {f"p{n}": (50_000 + n,) for n in range(20)}
    with unequal_threads(dist.get_rank()):
        for dtype in (torch.float32, torch.bfloat16):
            model = Probe(shapes, dtype)
            optimizer = OneBitAdam(model.named_parameters(), OneBit(), warmup_steps=2, lr=0.1)
            for step in range(5):
                for name, values in targets(shapes, dist.get_rank(), step).items():
                    values[:7] *= step > 2
                    model.get_parameter(name).grad = values.to(dtype)
                optimizer.step()
            states = {
                f"{n}: {k}": s
                for n, p in model.named_parameters()
                for k, s in optimizer.state[p].items()
                if torch.is_tensor(s)
            }
            assert_equal_on_all_ranks(states)
            assert_equal_on_all_ranks(dict(model.named_parameters()))


@on_ranks(2, launcher="torchrun")
def test_double_buffering() -> None:
    with unequal_threads(dist.get_rank()):
        model = Probe(SHAPES)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        buffering = DoubleBuffering(model, sgd, OneBit(), enabled=True)
        for step in range(4):
            for name, values in targets(SHAPES, dist.get_rank(), step).items():
                model.get_parameter(name).grad = values
            buffering.step()
        assert_equal_on_all_ranks(dict(model.named_parameters()))


class _Normed(torch.optim.SGD):
    """SGD with gradients of one length, as in LARS."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for one in group["params"]:
                one.grad /= one.grad.abs().sum()
        return super().step(closure)


@on_ranks(2, launcher="torchrun")
def test_diloco() -> None:
    with unequal_threads(dist.get_rank()):
        model, threads = Probe(SHAPES), torch.get_num_threads()
        diloco = DiLoCo(
            model, OneBit(), sync_every=1, outer_optimizer=lambda own: _Normed(own, lr=0.7)
        )
        for step in range(3):
            with torch.no_grad():
                for name, values in targets(SHAPES, dist.get_rank(), step).items():
                    model.get_parameter(name).add_(values)
            diloco.step()
            assert_equal_on_all_ranks(diloco.common_parameters)
            assert_equal_on_all_ranks(dict(model.named_parameters()))
        assert torch.get_num_threads() == threads
