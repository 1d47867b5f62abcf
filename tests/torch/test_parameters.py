"""Parameters that start or stop to be trained, and those of unusual kinds: as without compression."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence
from typing import Any

import horovod.torch as hvd
import pytest
import torch

import hvd_compress.torch as hvdc
from hvd_compress import codecs
from tests.ranks import on_ranks
from tests.torch.probes import Probe, assert_identical_on_all_ranks, distributed, exchange
from tests.torch_models import assert_same_bits, targets, two_valued

SHAPES = {"base": (40, 70), "head": (3000,), "small": (10,)}


@on_ranks(2)
def test_a_layer_that_is_frozen_in_training_does_not_move() -> None:
    """The layer's residual stays, and is sent when the layer is trained again."""
    for chosen in ("allgather", "two_shot", "changed codec"):
        travels = chosen if chosen != "changed codec" else "allgather"
        model = Probe(SHAPES)
        compressor = hvdc.OneBit(model, threshold=100, exchange=travels)
        optimizer = distributed(model, compressor)
        exchange(model, optimizer, targets(SHAPES, hvd.rank(), 0))
        model.base.requires_grad_(False)
        if chosen == "changed codec":
            compressor.set_codec(codecs.NoCompression())
        kept = compressor.state_dict()["tensors"]["base"]["residual"].clone()
        before = model.base.detach().clone()
        assert kept.any()
        for step in range(1, 3):
            exchange(model, optimizer, targets(SHAPES, hvd.rank(), step), ["head", "small"])
        assert torch.equal(model.base, before)
        assert torch.equal(compressor.state_dict()["tensors"]["base"]["residual"], kept)
        model.base.requires_grad_(True)
        exchange(model, optimizer, targets(SHAPES, 0, 3, scale=0.0))
        assert not torch.equal(model.base, before)
        assert_identical_on_all_ranks(model)


@on_ranks(2)
def test_any_order_of_freezing_and_making_the_compressor_and_the_optimizer() -> None:
    """The gradients are those of Horovod alone, whatever the layer is when each of them sees it."""

    def train(order: Sequence[str], trained: bool, *, compressed: bool) -> list[dict[str, Any]]:
        model, optimizer, compression = Probe(SHAPES), None, hvd.Compression.none
        model.base.requires_grad_(trained)
        got = []
        for number, event in enumerate((*order, "step", "step", "turn", "step", "turn", "step")):
            if event == "turn":
                trained = not trained
                model.base.requires_grad_(trained)
            elif event == "wrap":
                optimizer = distributed(model, compression)
            elif event == "make" and compressed:
                compression = hvdc.OneBit(model, threshold=100)
            elif event == "step":
                names = ["base"] * trained + ["head", "small"]
                got.append(
                    exchange(model, optimizer, two_valued(SHAPES, hvd.rank(), number), names)
                )
        del optimizer
        gc.collect()
        return got

    orders = [("make", "wrap", "turn"), ("make", "turn", "wrap"), ("turn", "make", "wrap")]
    for order in orders:
        for trained in (False, True):
            with warnings.catch_warnings():
                # Horovod leaves out what was frozen when the optimizer was made.
                warnings.filterwarnings("ignore", "expected this optimizer to exchange all")
                expected = train(order, trained, compressed=False)
                got = train(order, trained, compressed=True)
            for one, other in zip(got, expected, strict=True):
                assert_same_bits(one, other)


@on_ranks(2)
def test_a_layer_that_the_optimizer_does_not_know() -> None:
    """Horovod does not exchange the layer, as without compression; ranks are warned."""
    model = Probe(SHAPES)
    model.base.requires_grad_(False)
    compressor = hvdc.OneBit(model, threshold=100)
    optimizer = distributed(model, compressor)
    model.base.requires_grad_(True)
    with pytest.warns(UserWarning, match="got none of base: .* make it again after requires_grad_"):
        exchange(model, optimizer, targets(SHAPES, hvd.rank(), 0))
    both = [optimizer, distributed(model, compressor)]
    with pytest.raises(hvdc.ExchangeError, match=r"again, del the old one and call gc.collect\(\)"):
        exchange(model, both[1], targets(SHAPES, hvd.rank(), 1))


@on_ranks(2)
def test_an_optimizer_that_is_made_again_for_a_layer_that_is_unfrozen() -> None:
    model = Probe(SHAPES)
    model.base.requires_grad_(False)
    compressor = hvdc.OneBit(model.named_parameters(), threshold=100)
    optimizer = distributed(model, compressor)
    exchange(model, optimizer, targets(SHAPES, hvd.rank(), 0), ["head", "small"])
    model.base.requires_grad_(True)
    del optimizer
    gc.collect()
    optimizer = distributed(model, compressor)
    for step in range(1, 3):
        exchange(model, optimizer, targets(SHAPES, hvd.rank(), step))
    assert compressor.state_dict()["tensors"]["base"]["residual"].any()
    assert_identical_on_all_ranks(model)


@on_ranks(2)
def test_gradients_from_before_a_layer_was_frozen_are_averaged() -> None:
    model = Probe(SHAPES)
    optimizer = distributed(model, hvdc.OneBit(model, threshold=100), backward_passes_per_step=2)
    each = [two_valued(SHAPES, rank, 0) for rank in range(2)]
    model(each[hvd.rank()]).backward()
    model.base.requires_grad_(False)
    model(each[hvd.rank()], ["head", "small"]).backward()
    optimizer.step()
    torch.testing.assert_close(model.base.grad, (each[0]["base"] + each[1]["base"]) / 2)


@on_ranks(2, alone=True)
def test_a_layer_that_is_frozen_on_one_rank_only() -> None:
    model = Probe(SHAPES)
    model.base.requires_grad_(hvd.rank() == 0)
    optimizer = distributed(model, hvdc.OneBit(model, threshold=100))
    names = list(SHAPES) if hvd.rank() == 0 else ["head", "small"]
    message = r"requires_grad of base: True on rank 0, False on rank 1"
    with pytest.raises(hvdc.ExchangeError, match=message):
        exchange(model, optimizer, targets(SHAPES, hvd.rank(), 0), names)


@on_ranks(2)
def test_sparse_gradients_go_horovods_own_way() -> None:
    for as_dense in (False, True):
        rows = torch.arange(5) + 3 * hvd.rank()
        results = []
        for compressed in (False, True):
            torch.manual_seed(0)
            model = torch.nn.Sequential(
                torch.nn.Embedding(100, 40, sparse=True), torch.nn.Linear(40, 30)
            )
            compression = hvdc.OneBit(model, exclude=["*"]) if compressed else hvd.Compression.none
            optimizer = distributed(model, compression, 0.0, sparse_as_dense=as_dense)
            for _ in range(3):
                optimizer.zero_grad()
                model(rows).square().sum().backward()
                optimizer.step()
            results.append([parameter.grad.to_dense() for parameter in model.parameters()])
        for got, expected in zip(results[1], results[0], strict=True):
            torch.testing.assert_close(got, expected)


@on_ranks(2)
def test_two_optimizers_over_one_model() -> None:
    """One backward pass brings gradients to both; each has a compressor of the whole model."""
    model = Probe(SHAPES)
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(parameters, lr=1.0),
            named_parameters=model.named_parameters(),
            compression=hvdc.OneBit(model, threshold=100),
        )
        for parameters in ([model.base], [model.head, model.small])
    ]
    for step in range(2):
        model.zero_grad()
        model(two_valued(SHAPES, hvd.rank(), step)).backward()
        for optimizer in optimizers:
            optimizer.step()
        each = [two_valued(SHAPES, rank, step) for rank in range(2)]
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, (each[0][name] + each[1][name]) / 2)
