"""Gradients of every kind: dtypes, layouts, sparse ones, empty ones, and what is left to Horovod."""

from __future__ import annotations

import horovod.torch as hvd
import torch

import hvd_compress.torch as hvdc
from hvd_compress import Route
from hvd_compress.codecs import ErrorFeedback, codec_class
from tests.contract.cases import FLAT, USUAL
from tests.ranks import on_ranks
from tests.stranger import installed
from tests.torch.probes import assert_identical_on_all_ranks, distributed, exchange
from tests.torch_models import (
    Probe,
    Simulation,
    assert_same_bits,
    targets,
    two_valued,
    unequal_threads,
)

SHAPES = {"a": (40, 70), "b": (3000,), "small": (10,)}


@on_ranks(2)
def test_fp16_is_horovods_own() -> None:
    model, plain = Probe(SHAPES), Probe(SHAPES)
    optimizer = distributed(model, hvdc.FP16(model.named_parameters(), threshold=0))
    reference = distributed(plain, hvd.Compression.fp16)
    gradients = targets(SHAPES, hvd.rank(), 0)
    assert_same_bits(exchange(model, optimizer, gradients), exchange(plain, reference, gradients))


@on_ranks(2)
def test_empty_and_zero_dimensional_parameters() -> None:
    shapes = {"empty": (0, 3), "scalar": (), "a": (40, 70)}
    for threshold in (0, 1, 100):
        model = Probe(shapes)
        compressor = hvdc.OneBit(model.named_parameters(), threshold=threshold)
        optimizer = distributed(model, compressor)
        for step in range(2):
            gradients = [two_valued(shapes, r, step) for r in range(hvd.size())]
            got = exchange(model, optimizer, gradients[hvd.rank()])
            for name in shapes:
                assert torch.equal(got[name], sum(g[name] for g in gradients) / hvd.size())


class _Embeddings(torch.nn.Module):
    """Two tables of one shape, looked up in another order on each rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Embedding(300, 8, sparse=True)
        self.second = torch.nn.Embedding(300, 8, sparse=True)

    def forward(self, words: torch.Tensor, turned: bool) -> torch.Tensor:
        tables = [self.second, self.first] if turned else [self.first, self.second]
        return sum((table(words + 7 * i) ** 2).sum() for i, table in enumerate(tables))


@on_ranks(2)
def test_sparse_as_dense() -> None:
    model, plain = _Embeddings(), _Embeddings()
    compressor = hvdc.Int8(model.named_parameters(), kind="linear", threshold=0)
    options = {"learning_rate": 0.1, "sparse_as_dense": True}
    optimizer = distributed(model, compressor, **options)
    reference = distributed(plain, hvd.Compression.none, **options)
    for step in range(3):
        words = torch.arange(20) * (hvd.rank() + 2) + step
        for m, o in ((model, optimizer), (plain, reference)):
            o.zero_grad()
            m(words, turned=hvd.rank() == 1).backward()
            o.step()
        for ours, stock in zip(model.parameters(), plain.parameters(), strict=True):
            assert ours.grad.is_sparse
            error = (ours.grad.to_dense() - stock.grad.to_dense()).abs().max()
            assert error < 0.02 * stock.grad.to_dense().abs().max()
    assert compressor.counters.encoded_elements == 3 * 2 * 300 * 8
    assert_identical_on_all_ranks(model)


@on_ranks(2)
def test_the_codec_of_an_installed_package_works_by_name() -> None:
    with installed():
        for exchange_name in ("allgather", "two_shot"):
            route = Route(codec_class("test", "codec", "twobit")(), ErrorFeedback())
            for codec in ("twobit", route):
                model = Probe(SHAPES)
                options = {"exchange": exchange_name, "threshold": 0}
                compressor = hvdc.Compressor(model.named_parameters(), codec, **options)
                optimizer = distributed(model, compressor)
                feedback = ErrorFeedback() if codec is route else route.codec.feedback
                simulation = Simulation(exchange_name, route.codec, feedback, SHAPES, 2)
                for step in range(3):
                    gradients = [targets(SHAPES, r, step) for r in range(2)]
                    got = exchange(model, optimizer, gradients[hvd.rank()])
                    assert_same_bits(got, simulation.average(gradients))


@on_ranks(2)
def test_ranks_with_other_numbers_of_threads_get_the_same_bits() -> None:
    shapes = {"a": (300, 701), "b": (2049, 65)}
    with unequal_threads(hvd.rank()):
        for exchanged in FLAT:
            model, (codec, feedback) = Probe(shapes), USUAL[exchanged]
            route = Route(codec, feedback, exchange=exchanged)
            optimizer = distributed(model, hvdc.Compressor(model, route, threshold=0))
            for step in range(2):
                exchange(model, optimizer, targets(shapes, hvd.rank(), step))
                assert_identical_on_all_ranks(model)
