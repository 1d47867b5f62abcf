"""Warm-up, changes of codec, checkpoints."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

import hvd_compress.ddp as hvdc
from hvd_compress import Route
from hvd_compress.codecs import ErrorFeedback, Int8, NoCompression, OneBit
from tests.ddp.probes import Probe, distributed, exchange, gradients_of
from tests.ranks import on_ranks
from tests.torch_models import Simulation, assert_same_bits, targets

SHAPES = {"a": (40, 70), "b": (3000,), "small": (10,)}


@on_ranks(2, launcher="torchrun")
def test_changing_the_codec_loses_no_mass() -> None:
    """Nothing is lost even if a parameter is not used in the first step after the change."""
    ddp, compressor = distributed(
        Probe(SHAPES), OneBit(), ErrorFeedback(), find_unused_parameters=True
    )
    total = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    sent = copy.deepcopy(total)
    changes = {2: Int8("linear"), 4: OneBit("column"), 6: Int8(), 8: OneBit(), 10: NoCompression()}
    for step in range(12):
        if step in changes:
            compressor.set_codec(Route(changes[step], ErrorFeedback() if step == 2 else None))
        gradients = [targets(SHAPES, r, step) for r in range(2)]
        if step in (6, 10):
            for mine in gradients:
                mine["a"].zero_()
        used = ["b", "small"] if step in (6, 10) else None
        got = exchange(ddp, gradients[dist.get_rank()], used)
        for name in got:
            total[name] += sum(g[name] for g in gradients) / 2
            sent[name] += got[name]
    assert compressor.residual_norm() == 0
    for name in SHAPES:
        # Int8 without feedback loses something in steps 6 and 7: what it sends is near, not equal.
        assert torch.allclose(sent[name], total[name], atol=0.2), name


@on_ranks(2, launcher="torchrun")
def test_changing_the_codec_of_some_layers() -> None:
    ddp, compressor = distributed(Probe(SHAPES), OneBit(), ErrorFeedback(), threshold=100)
    compressor.set_codec(Int8(), layers="a")
    codecs = {name: route.codec for name, route in compressor.routes().items()}
    assert codecs == {"a": Int8(), "b": OneBit(), "small": NoCompression()}
    with pytest.raises(ValueError, match="expected a pattern that matches"):
        compressor.set_codec(Int8(), layers="c")
    with ddp.no_sync():
        ddp(targets(SHAPES, 0, 0)).backward()
    compressor.set_codec(Int8())  # Accumulated gradients are not on their way.
    ddp(targets(SHAPES, 0, 1)).backward()
    assert gradients_of(ddp).keys() == SHAPES.keys()


@on_ranks(1, launcher="torchrun")
def test_a_single_rank_exchanges_with_itself() -> None:
    ddp, compressor = distributed(Probe(SHAPES), OneBit(), ErrorFeedback())
    simulation = Simulation("allgather", OneBit(), ErrorFeedback(), SHAPES, 1)
    for step in range(3):
        gradients = targets(SHAPES, 0, step)
        assert_same_bits(exchange(ddp, gradients), simulation.average([gradients]))
    foreign = {**compressor.state_dict(), "size": 2}
    with pytest.raises(ValueError, match="expected size 1, got 2"):
        compressor.load_state_dict(foreign)


@on_ranks(2, launcher="torchrun")
def test_a_part_of_another_layout_loses_no_mass() -> None:
    """A rank sends what it owed as an owner, even after steps in which some or all ranks did not use it."""
    for resized in (False, True):
        ddp, compressor = distributed(Probe(SHAPES), OneBit(), ErrorFeedback(), exchange="two_shot")
        exchange(ddp, targets(SHAPES, dist.get_rank(), 0))
        due, arrived = _owed(compressor, "b"), torch.zeros(3000)
        saved = copy.deepcopy(compressor.state_dict())
        ddp, compressor = distributed(
            Probe(SHAPES), OneBit(), ErrorFeedback(), find_unused_parameters=True
        )
        if resized:
            states: list[dict] = [{}, {}]
            dist.all_gather_object(states, saved)
            compressor.load_resized(states)
        else:
            compressor.load_state_dict(saved)
        for step, users in enumerate(([], [0], [], [1], [0, 1])):
            gradients = targets(SHAPES, dist.get_rank(), step)
            mine = dist.get_rank() in users
            got = exchange(ddp, gradients, SHAPES if mine else ["a", "small"])
            everybodys = gradients["b"].clone() if mine else torch.zeros(3000)
            dist.all_reduce(everybodys)
            due += everybodys / 2
            arrived += got["b"] if users else 0.0
            torch.testing.assert_close(arrived + _owed(compressor, "b"), due, rtol=0, atol=1e-5)


def _owed(compressor: hvdc.Compressor, name: str) -> torch.Tensor:
    """Returns the part of a parameter's gradients that all ranks have yet to add to the average."""
    kept = compressor.state_dict()["tensors"][name]
    owned, size = kept["owned"], dist.get_world_size()
    owed = torch.zeros(3000)
    if kept["residual"] is not None:
        owed += kept["residual"] / size
    if owned is not None and owned["residual"] is not None:
        owed[owned["begin"] : owned["end"]] += owned["residual"] * owned["weight"] / size
    dist.all_reduce(owed)
    return owed
