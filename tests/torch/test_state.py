"""Warm-up, changes of codec, checkpoints."""

from __future__ import annotations

import copy

import pytest
import torch

import hvd_compress.torch as hvdc
from hvd_compress.codecs import Int8, NoCompression, OneBit
from tests.ranks import on_ranks
from tests.torch_models import Probe

SHAPES = {"a": (40, 70), "b": (3000,), "small": (10,)}


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
