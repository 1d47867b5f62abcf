"""Warm-up, changes of codec, checkpoints."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import hvd_compress.ddp as hvdc
import hvd_compress.distributed as of_all_reduce
from hvd_compress import Route
from hvd_compress.codecs import ErrorFeedback, Int8, NoCompression, OneBit
from hvd_compress.process_group.values import state_bytes
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


def _jobs() -> list[tuple[Any, Callable[[], Any], Callable[[Any, int], object]]]:
    """For DDP and all_reduce: the package, what makes a compressor, and what makes a step with it."""
    ddps: dict[Any, Any] = {}

    def register() -> hvdc.Compressor:
        ddp, compressor = distributed(Probe(SHAPES), OneBit(), ErrorFeedback())
        ddps[compressor] = ddp
        return compressor

    def reduce(compressor: of_all_reduce.Compressor, step: int) -> None:
        tensors = targets(SHAPES, dist.get_rank(), step)
        of_all_reduce.all_reduce(list(tensors.values()), compressor, key=list(tensors))

    def backward(compressor: hvdc.Compressor, step: int) -> None:
        exchange(ddps[compressor], targets(SHAPES, dist.get_rank(), step))

    return [
        (hvdc, register, backward),
        (of_all_reduce, lambda: of_all_reduce.Compressor(OneBit(), threshold=0), reduce),
    ]


def _residuals(compressor: Any) -> dict[str, torch.Tensor]:
    tensors = compressor.state_dict()["tensors"]
    return {name: one["residual"].clone() for name, one in tensors.items()}


@on_ranks(2, launcher="torchrun")
def test_torch_distributed_checkpoint() -> None:
    """Each rank gets its own residuals back; a plain compressor would save those of one rank."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    for number, (package, make, step) in enumerate(_jobs()):
        compressor, path = make(), f"{folder[0]}/{number}"
        step(compressor, 0)

        class Script:
            """A script that saves the state of its compressor with its own."""

            def state_dict(self, compressor: Any = compressor) -> dict[str, Any]:
                return {"compressor": compressor.state_dict()}

            def load_state_dict(self, state: dict[str, Any]) -> None: ...

        wrong = [
            compressor,
            Script(),
            *([package.GatheredState(compressor)] if number == 0 else []),
        ]
        for one in wrong:
            for act in (dcp.save, dcp.load):
                with pytest.raises(
                    TypeError, match=r"expected RankStates\(compressor\) in a checkp"
                ):
                    act({"compressor": one}, checkpoint_id=path)
        dcp.save({"compressor": package.RankStates(compressor)}, checkpoint_id=path)
        other = make()
        dcp.load({"compressor": package.RankStates(other)}, checkpoint_id=path)
        assert_same_bits(_residuals(other), _residuals(compressor))
        step(other, 1)
    with pytest.raises(TypeError, match="RankStates: expected a compressor, got Probe"):
        hvdc.RankStates(Probe(SHAPES))
    dist.barrier()
    shutil.rmtree(folder[0], ignore_errors=True)


@on_ranks(2, launcher="torchrun")
def test_a_file_of_another_rank() -> None:
    """Every rank raises an error: at once from what all ranks load together, else in the next step."""
    rank = dist.get_rank()
    for package, make, step in _jobs():
        compressor = make()
        step(compressor, 0)
        state = copy.deepcopy(compressor.state_dict())
        states: list[dict[str, Any]] = [{}, {}]
        dist.all_gather_object(states, state)
        saved = package.RankStates(compressor).state_dict()
        kind: type[Exception] = package.ExchangeError
        message = "rank 1: ValueError: load_state_dict: expected rank 1, got 0"
        if rank == 1:
            saved, kind, message = {"rank 1": state_bytes(states[0])}, ValueError, "expected rank 1"
        with pytest.raises(kind, match=message):
            package.RankStates(compressor).load_state_dict(saved)
        compressor.load_state_dict(state)
        step(compressor, 1)
        if rank == 1:
            with pytest.raises(ValueError, match="rank 1, got 0; each rank saves and loads a file"):
                compressor.load_state_dict(states[0])
        else:
            compressor.load_state_dict(states[0])
        told = (
            "load_state_dict.* on (rank 0|some ranks) only|step 1.* on rank 0.*step 2.* on rank 1"
        )
        with pytest.raises(hvdc.ExchangeError, match=told):
            step(compressor, 2)
        dist.barrier()


@on_ranks(2, launcher="torchrun")
def test_the_state_of_a_model() -> None:
    for package, make, step in _jobs():
        compressor, states = make(), Probe(SHAPES).state_dict()
        step(compressor, 0)
        calls = [compressor.load_state_dict, lambda one, c=compressor: c.load_resized([one] * 2)]
        if package is hvdc:
            calls.append(hvdc.GatheredState(compressor).load_state_dict)
        for call in calls:
            with pytest.raises(ValueError, match="of 'a', 'b', 'small': not a compressor's state"):
                call(states)
        step(compressor, 1)


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
