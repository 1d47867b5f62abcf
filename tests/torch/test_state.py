"""Warm-up, changes of codec, checkpoints."""

from __future__ import annotations

import copy
import io

import horovod.torch as hvd
import pytest
import torch

import hvd_compress.torch as hvdc
from hvd_compress.codecs import ErrorFeedback, Int8, NoCompression, OneBit
from tests.ranks import on_ranks
from tests.torch.probes import (
    Probe,
    Simulation,
    assert_same_bits,
    distributed,
    exchange,
    targets,
)

SHAPES = {"a": (40, 70), "b": (3000,), "small": (10,)}


def _net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 96), torch.nn.ReLU(), torch.nn.Linear(96, 32))


def _train(model: torch.nn.Module, optimizer: object, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + hvd.rank())
        x = torch.randn(16, 32, generator=generator)
        optimizer.zero_grad()
        ((model(x) - x) ** 2).mean().backward()
        optimizer.step()


@on_ranks(2)
def test_a_resumed_run_continues_bit_for_bit() -> None:
    for name in ("onebit", "ternary", "ecq", "int8"):

        def start(name: str = name) -> tuple:
            model = _net()
            compressor = hvdc.Compression.by_name(name, model.named_parameters(), threshold=64)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            wrapped = hvd.DistributedOptimizer(
                optimizer, named_parameters=model.named_parameters(), compression=compressor
            )
            return model, compressor, wrapped

        through, _, optimizer = start()
        _train(through, optimizer, range(8))

        first, compressor, optimizer = start()
        _train(first, optimizer, range(4))
        saved = io.BytesIO()
        parts = (first.state_dict(), optimizer.state_dict(), compressor.state_dict())
        torch.save(parts, saved)
        saved.seek(0)

        second, compressor, optimizer = start()
        model_state, optimizer_state, compressor_state = torch.load(saved)
        second.load_state_dict(model_state)
        optimizer.load_state_dict(optimizer_state)
        compressor.load_state_dict(compressor_state)
        _train(second, optimizer, range(4, 8))
        assert_same_bits(second.state_dict(), through.state_dict())


@on_ranks(2)
def test_warm_up_is_stock_and_then_the_codec_begins() -> None:
    model, plain = Probe(SHAPES), Probe(SHAPES)
    compressor = hvdc.OneBit(model.named_parameters(), threshold=0, warmup_steps=2)
    optimizer = distributed(model, compressor)
    reference = distributed(plain, hvd.Compression.none)
    simulation = Simulation(OneBit(), ErrorFeedback(), SHAPES, hvd.size())
    for step in range(4):
        gradients = [targets(SHAPES, r, step) for r in range(hvd.size())]
        got = exchange(model, optimizer, gradients[hvd.rank()])
        if step < 2:
            assert_same_bits(got, exchange(plain, reference, gradients[hvd.rank()]))
        else:
            assert_same_bits(got, simulation.average(gradients))


@on_ranks(2)
def test_changing_the_codec_loses_no_mass() -> None:
    model = Probe(SHAPES)
    compressor = hvdc.OneBit(model.named_parameters(), threshold=0)
    optimizer = distributed(model, compressor)
    total = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    sent = copy.deepcopy(total)
    changes = {2: Int8("linear"), 4: OneBit("column"), 6: NoCompression()}
    for step in range(8):
        if step in changes:
            feedback = None if step != 2 else ErrorFeedback()
            compressor.set_codec(changes[step], feedback)
        gradients = [targets(SHAPES, r, step) for r in range(hvd.size())]
        got = exchange(model, optimizer, gradients[hvd.rank()])
        for name in SHAPES:
            total[name] += sum(g[name] for g in gradients) / hvd.size()
            sent[name] += got[name]
    assert compressor.residual_norm() == 0
    for name in SHAPES:
        assert torch.allclose(sent[name], total[name], atol=1e-4), name


@on_ranks(2)
def test_changing_the_codec_of_some_layers() -> None:
    model = Probe(SHAPES)
    compressor = hvdc.OneBit(model.named_parameters(), threshold=100)
    compressor.set_codec(Int8(), layers="a")
    codecs = {name: route.codec for name, route in compressor.routes().items()}
    assert codecs == {"a": Int8(), "b": OneBit(), "small": NoCompression()}
    with pytest.raises(ValueError, match="expected a pattern that matches"):
        compressor.set_codec(Int8(), layers="c")


@on_ranks(1)
def test_foreign_state_is_refused_and_changes_nothing() -> None:
    model = Probe(SHAPES)
    compressor = hvdc.OneBit(model.named_parameters(), threshold=0)
    state = copy.deepcopy(compressor.state_dict())
    other = hvdc.OneBit(Probe({"a": (40, 70)}).named_parameters(), threshold=0).state_dict()
    shorter = copy.deepcopy(state)
    shorter["tensors"]["b"]["residual"] = torch.zeros(7)
    wrong = {
        "expected rank 0, got 1": {**state, "rank": 1},
        "expected size 1, got 3": {**state, "size": 3},
        "expected seed 0, got 5": {**state, "seed": 5},
        "expected version 1, got None": {},
        "expected this model's parameters": other,
        "b: expected a residual of 3000 elements, got 7": shorter,
    }
    for message, bad in wrong.items():
        with pytest.raises(ValueError, match=message):
            compressor.load_state_dict(bad)
        assert compressor.state_dict() == state
    compressor.load_state_dict(state)
