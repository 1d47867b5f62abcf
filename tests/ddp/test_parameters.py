"""Parameters that start or stop to be trained, and those of unusual kinds: as without compression."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hvd_compress.ddp as hvdc
from hvd_compress.codecs import FP16, ErrorFeedback, NoCompression, OneBit
from tests.ddp.probes import Probe, assert_equal_on_all_ranks, distributed, exchange
from tests.ranks import on_ranks
from tests.torch_models import assert_same_bits, targets, two_valued

SHAPES = {"base": (40, 70), "head": (3000,), "small": (10,)}


def _registered(model: torch.nn.Module, compressor: Any, **options: Any) -> DistributedDataParallel:
    ddp = DistributedDataParallel(model, **options)
    ddp.register_comm_hook(compressor, hvdc.hook)
    return ddp


@on_ranks(2, launcher="torchrun")
def test_a_layer_that_is_trained_later() -> None:
    """One-bit codes carry these gradients without error: the result is the average."""
    for codec in (OneBit(), FP16()):
        for find in (False, True):
            model = Probe(SHAPES)
            model.base.requires_grad_(False)
            compressor = hvdc.Compressor(model, codec, threshold=100)
            ddp = _registered(model, compressor, find_unused_parameters=find)
            names = ["head", "small"]
            exchange(ddp, two_valued(SHAPES, dist.get_rank(), 0), names)
            assert list(compressor.routes()) == names
            for trained in (True, False, True):
                model.base.requires_grad_(trained)
                assert ("base" in compressor.routes()) == trained
                ddp = _registered(model, compressor, find_unused_parameters=find)
                names = ["base"] * trained + ["head", "small"]
                for step in range(2):
                    got = exchange(ddp, two_valued(SHAPES, dist.get_rank(), step), names)
                    each = [two_valued(SHAPES, rank, step) for rank in range(2)]
                    assert got.keys() == set(names)
                    for name in got:
                        torch.testing.assert_close(got[name], (each[0][name] + each[1][name]) / 2)


@on_ranks(2, launcher="torchrun")
def test_any_order_of_wrapping_freezing_and_making_the_compressor() -> None:
    """The gradients are those of DDP alone, whatever the layer is when DDP and the compressor see it."""

    def train(order: Sequence[str], trained: bool, *, compressed: bool) -> list[dict[str, Any]]:
        model, ddp, compressor = Probe(SHAPES), None, None
        model.base.requires_grad_(trained)
        got = []
        for number, event in enumerate((*order, "step", "step", "turn", "step", "turn", "step")):
            if event == "turn":
                trained = not trained
                model.base.requires_grad_(trained)
            elif event == "wrap":
                ddp = DistributedDataParallel(model, find_unused_parameters=True)
            elif event == "make" and compressed:
                compressor = hvdc.Compressor(ddp or model, OneBit(), threshold=100)
            if event == "step":
                assert ddp is not None
                names = ["base"] * trained + ["head", "small"]
                got.append(exchange(ddp, two_valued(SHAPES, dist.get_rank(), number), names))
            elif event != "turn" and ddp is not None and compressor is not None:
                ddp.register_comm_hook(compressor, hvdc.hook)
        return got

    for order in itertools.permutations(("wrap", "make", "turn")):
        for trained in (False, True):
            expected = train(order, trained, compressed=False)
            got = train(order, trained, compressed=True)
            for one, other in zip(got, expected, strict=True):
                assert_same_bits(one, other)


@on_ranks(2, launcher="torchrun")
def test_a_layer_that_only_one_rank_uses_when_it_is_trained_first() -> None:
    model = Probe(SHAPES)
    model.base.requires_grad_(False)
    compressor = hvdc.Compressor(model, OneBit(), threshold=100)
    model.base.requires_grad_(True)
    ddp = _registered(model, compressor, find_unused_parameters=True)
    names = ["head", "small"] if dist.get_rank() else ["base", "head", "small"]
    for step in range(2):
        got = exchange(ddp, two_valued(SHAPES, dist.get_rank(), step), names)
        torch.testing.assert_close(got["base"], two_valued(SHAPES, 0, step)["base"] / 2)


@on_ranks(2, launcher="torchrun")
def test_a_layer_that_is_frozen_in_training_does_not_move() -> None:
    """The layer's residual stays, and is sent when the layer is trained again."""
    model = Probe(SHAPES)
    ddp, compressor = distributed(
        model, OneBit(), ErrorFeedback(), find_unused_parameters=True, threshold=100
    )
    exchange(ddp, targets(SHAPES, dist.get_rank(), 0))
    kept = compressor.state_dict()["tensors"]["base"]["residual"].clone()
    assert kept.any()
    model.base.requires_grad_(False)
    for step in range(1, 3):
        got = exchange(ddp, targets(SHAPES, dist.get_rank(), step), ["head", "small"])
        assert "base" not in got
    assert torch.equal(compressor.state_dict()["tensors"]["base"]["residual"], kept)
    model.base.requires_grad_(True)
    zeros = targets(SHAPES, 0, 3, scale=0.0)
    got = exchange(ddp, zeros)
    assert got["base"].any()
    assert_equal_on_all_ranks(got)


@on_ranks(2, launcher="torchrun")
def test_complex_parameters() -> None:
    class Complex(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, shape in SHAPES.items():
                values = torch.zeros(shape, dtype=torch.complex64)
                self.register_parameter(name, torch.nn.Parameter(values))
            self.real = torch.nn.Parameter(torch.zeros(10))

        def forward(self, factors: dict[str, torch.Tensor]) -> torch.Tensor:
            parts = [(torch.view_as_real(getattr(self, n)) * factors[n]).sum() for n in SHAPES]
            return sum(parts, self.real.sum())

    doubled = {name: (*shape, 2) for name, shape in SHAPES.items()}
    each = [targets(doubled, rank, 0) for rank in range(2)]
    for codec in (OneBit(), NoCompression()):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = Complex()
            ddp = _registered(model, hvdc.Compressor(model, codec))
        names = [str(one.message) for one in caught if "complex64" in str(one.message)]
        assert len(names) == (codec == OneBit())
        assert all("base (complex64), head (complex64)" in one for one in names)
        for _ in range(2):  # DDP makes other buckets after the first step.
            ddp.zero_grad()
            ddp(each[dist.get_rank()]).backward()
            for name in SHAPES:
                expected = (each[0][name] + each[1][name]) / 2
                got = torch.view_as_real(getattr(model, name).grad)
                torch.testing.assert_close(got, expected)


@on_ranks(2, launcher="torchrun")
def test_sparse_gradients_are_added_up_as_they_are() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(100, 40, sparse=True), torch.nn.Linear(40, 30))
    stock = [parameter.detach().clone() for parameter in model.parameters()]
    rows = torch.arange(5) + 3 * dist.get_rank()
    results = []
    for compressed in (False, True):
        model.zero_grad()
        with torch.no_grad():
            for parameter, start in zip(model.parameters(), stock, strict=True):
                parameter.copy_(start)
        ddp = DistributedDataParallel(model)
        if compressed:
            compressor = hvdc.Compressor(model, OneBit(), exclude=["1.*"])
            ddp.register_comm_hook(compressor, hvdc.hook)
        for _ in range(2):
            ddp.zero_grad()
            ddp(rows).square().sum().backward()
        results.append([parameter.grad.to_dense() for parameter in model.parameters()])
    for got, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, expected)
    assert_equal_on_all_ranks(dict(zip("abc", results[1], strict=True)))
    values, indices = 5 * 40 * 4, 5 * 8
    dense = 30 * 41 * 4
    assert compressor.counters.uncompressed_bytes == 2 * (values + indices + dense)


@on_ranks(2, launcher="torchrun")
def test_parameters_of_other_dtypes() -> None:
    """Quantized weights have no gradient; those of float64 are added up as they are."""
    model = Probe({"head": (3000,)})
    model.register_parameter(
        "quantized", torch.nn.Parameter(torch.zeros(5000, dtype=torch.uint8), requires_grad=False)
    )
    model.register_parameter("wide", torch.nn.Parameter(torch.zeros(5000, dtype=torch.float64)))
    with pytest.warns(UserWarning, match=r"uncompressed in their own dtype: wide \(float64\)$"):
        compressor = hvdc.Compressor(model, OneBit())
        ddp = _registered(model, compressor)
    assert list(compressor.routes()) == ["head", "wide"]
    each = [targets({"head": (3000,), "wide": (5000,)}, rank, 0) for rank in range(2)]
    for one in each:
        one["wide"] = one["wide"].double() / 3
    got = exchange(ddp, each[dist.get_rank()])
    assert got["wide"].dtype == torch.float64
    torch.testing.assert_close(got["wide"], (each[0]["wide"] + each[1]["wide"]) / 2)
    assert_equal_on_all_ranks(got)


@on_ranks(2, launcher="torchrun")
def test_a_model_that_is_changed_after_its_compressor() -> None:
    model = Probe(SHAPES)
    compressor = hvdc.Compressor(model, OneBit())
    ddp = _registered(model.double(), compressor)
    wide = {name: one.double() for name, one in targets(SHAPES, dist.get_rank(), 0).items()}
    with pytest.raises(
        TypeError, match=r"(base|head): expected a gradient of .*, got dtype float64"
    ):
        exchange(ddp, wide)
    dist.barrier()
    model = Probe(SHAPES)
    compressor = hvdc.Compressor(model, OneBit())
    model.head = torch.nn.Parameter(torch.zeros(4000))
    ddp = _registered(model, compressor)
    with pytest.raises(hvdc.ExchangeError, match=r"got one of shape \(4000,\): make a compressor"):
        exchange(ddp, targets({**SHAPES, "head": (4000,)}, dist.get_rank(), 0))
