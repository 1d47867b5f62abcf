"""Warm-up, changes of codec, checkpoints."""

from __future__ import annotations

import copy
import pickle
import warnings

import horovod.torch as hvd
import pytest
import torch

import hvd_compress.torch as hvdc
from hvd_compress.codecs import Int8
from tests.ranks import on_ranks
from tests.torch.probes import distributed, exchange
from tests.torch_models import Probe, targets

SHAPES = {"a": (40, 70), "b": (3000,), "small": (10,)}


@on_ranks(2)
def test_a_state_is_that_of_a_whole_step() -> None:
    """Between backward and step, residuals belong to no step yet."""
    model = Probe(SHAPES)
    compressor = hvdc.OneBit(model, threshold=100)
    optimizer = distributed(model, compressor)
    exchange(model, optimizer, targets(SHAPES, hvd.rank(), 0))
    saved = copy.deepcopy(compressor.state_dict())
    model(targets(SHAPES, hvd.rank(), 1)).backward()
    for what, call in {
        "state_dict": compressor.state_dict,
        "load_state_dict": lambda: compressor.load_state_dict(saved),
        "load_resized": lambda: compressor.load_resized([saved, {**saved, "rank": 1}]),
        "set_codec": lambda: compressor.set_codec(Int8()),
        "drop_step": compressor.drop_step,
        "reset": compressor.reset,
    }.items():
        with pytest.raises(
            hvdc.ExchangeError, match=rf"{what}: .* after optimizer.synchronize\(\)"
        ):
            call()
    optimizer.synchronize()
    assert compressor.state_dict()["tensors"]["a"]["step"] == 2
    compressor.load_state_dict(saved)
    assert compressor.state_dict()["tensors"]["a"]["step"] == 1


@on_ranks(2)
def test_a_step_that_is_thrown_away() -> None:
    """After ``synchronize()``, a missing ``drop_step()`` is warned of; with it, the step leaves nothing."""
    model = Probe(SHAPES)
    compressor = hvdc.OneBit(model, threshold=100)
    optimizer = distributed(model, compressor)

    def gradients(step: int) -> None:
        optimizer.zero_grad()
        model(targets(SHAPES, hvd.rank(), step)).backward()
        optimizer.synchronize()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            kept = {n: copy.deepcopy(s) for n, s in compressor.state_dict()["tensors"].items()}
            gradients(step)
            if step == 1:
                compressor.drop_step()
                for name, saved in compressor.state_dict()["tensors"].items():
                    assert saved["residual"] is kept[name]["residual"] or torch.equal(
                        saved["residual"], kept[name]["residual"]
                    )
            else:
                with optimizer.skip_synchronize():
                    optimizer.step()
        gradients(3)
    with pytest.warns(UserWarning, match=r"call compressor\.drop_step\(\)"):
        gradients(4)


@on_ranks(2)
def test_a_step_that_is_thrown_away_where_a_rank_has_joined() -> None:
    """The step is sent uncompressed, and residuals do not change."""
    model = Probe(SHAPES)
    compressor = hvdc.OneBit(model, threshold=100, exchange="two_shot")
    optimizer = distributed(model, compressor)
    exchange(model, optimizer, targets(SHAPES, hvd.rank(), 0))
    norm = compressor.residual_norm()
    if hvd.rank() == 0:
        for step in (1, 2):
            exchange(model, optimizer, targets(SHAPES, 0, step))
            compressor.drop_step()
            assert compressor.residual_norm() == norm
        compressor.set_codec(Int8())
        exchange(model, optimizer, targets(SHAPES, 0, 3))
        assert compressor.residual_norm() == 0
        compressor.drop_step()
        assert compressor.residual_norm() == norm
    hvd.join()


@on_ranks(1)
def test_copies_are_refused() -> None:
    """Horovod's hooks are bound to the model; the error says what to use."""
    compressor = hvdc.OneBit(Probe(SHAPES), threshold=0)
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(
            TypeError, match=r"OneBit: .*hvd_compress.torch, .*state_dict\(\) returns"
        ):
            attempt(compressor)
