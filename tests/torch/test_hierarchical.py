"""The hierarchical exchange on two hosts, against all ranks simulated by the reference."""

from __future__ import annotations

import math
import re
from typing import Any

import horovod.torch as hvd
import pytest
import torch

import hvd_compress.torch as hvdc
from hvd_compress import Route
from hvd_compress.codecs import Codec, ErrorFeedback, Int8, OneBit
from tests import jobs
from tests.ranks import on_ranks
from tests.torch.probes import distributed, exchange, watch
from tests.torch_models import Probe, Simulation, assert_same_bits, targets

SHAPES = {"a": (40, 170), "b": (3000,), "c": (8, 3, 5, 5), "tiny": (3,), "scalar": ()}
DYNAMIC = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
NONE = ErrorFeedback(alpha=0.0)


def _start(
    codec: Codec = OneBit(),  # noqa: B008
    feedback: ErrorFeedback = ErrorFeedback(),  # noqa: B008
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[Probe, hvdc.Compressor]:
    model = Probe(SHAPES, dtype)
    options = {"exchange": "hierarchical", "threshold": 0, **options}
    return model, hvdc.Compressor(model.named_parameters(), Route(codec, feedback), **options)


def _raises_in_first_step(message: str, **options: Any) -> None:
    model, compressor = _start(**options)
    optimizer = distributed(model, compressor)
    with pytest.raises(hvdc.ExchangeError, match=message):
        exchange(model, optimizer, targets(SHAPES, hvd.rank(), 0))
    hvd.barrier()  # A rank that leaves early would take Horovod with it.


@on_ranks(3, launcher="two hosts", environment=DYNAMIC, alone=True)
def test_hosts_of_unequal_size() -> None:
    _raises_in_first_step(
        r"hosts: .*local rank 0 of 2 on host 0 on rank 0, .* local rank 0 of 1 on host 1 on rank 2"
    )


@on_ranks(4, launcher="two hosts", alone=True)
def test_process_sets_that_horovod_does_not_take() -> None:
    _raises_in_first_step("expected a Horovod that takes process sets, got: Set HOROVOD_DYNAMIC")


@on_ranks(4, launcher="two hosts", environment=DYNAMIC, alone=True)
def test_an_altered_payload() -> None:
    model, compressor = _start()
    optimizer = distributed(model, compressor)
    exchange(model, optimizer, targets(SHAPES, hvd.rank(), 0))

    def flip_a_bit(name: str, rows: torch.Tensor) -> None:
        if name == "bucket 0, stage 2":
            rows[-1, rows.shape[1] // 2 + 40] ^= 16  # Local rank 1, host 1.

    watch(compressor, result=flip_a_bit)
    with pytest.raises(hvdc.PayloadError, match="a: rank 3's payload: expected check"):
        exchange(model, optimizer, targets(SHAPES, hvd.rank(), 1))


@on_ranks(4, launcher="two hosts", environment=DYNAMIC, alone=True)
def test_some_layers_by_way_of_hosts() -> None:
    """The layers have these routes from the start, or get them later."""
    feedback, by_hosts = ErrorFeedback(), Route(OneBit(), exchange="hierarchical", inner=Int8())
    for layers in ({"a": by_hosts}, {}):
        model, compressor = _start(exchange="two_shot", layers=layers)
        optimizer = distributed(model, compressor)
        if not layers:
            compressor.set_codec(by_hosts, "a")
        simulations = {
            name: Simulation(way, OneBit(), feedback, SHAPES, 4, local=2, inner=inner)
            for name, way, inner in (("a", "hierarchical", Int8()), ("b", "two_shot", None))
        }
        for step in range(2):
            gradients = [targets(SHAPES, rank, step) for rank in range(4)]
            got = exchange(model, optimizer, gradients[hvd.rank()])
            for name, simulation in simulations.items():
                assert_same_bits({name: got[name]}, {name: simulation.average(gradients)[name]})


@on_ranks(2, environment=DYNAMIC)
def test_wrong_arguments_fail_at_construction() -> None:
    first = hvd.add_process_set([0])
    with pytest.raises(ValueError, match="expected process_set=None for exchange='hierarchical'"):
        _start(process_set=first)


def test_a_rank_that_dies_before_the_host_hears_from_the_others() -> None:
    """Horovod with dynamic process sets ends the other processes itself, before we can."""
    job = ("tests.torch.dying_rank", "hierarchical", "bucket 0, stage 2")
    printed = jobs.run("two hosts", 4, jobs.forked("two hosts", *job), DYNAMIC)
    assert "timed out" not in printed, printed
    assert all(float(taken) < 60 for taken in re.findall(r"after ([\d.]+) s by", printed)), printed
    assert re.search(
        r"rank \d stopped after .* s by HorovodInternalError|background loop uncaught exception: .*"
        r"(Connection (closed|reset) by peer|Broken pipe)",
        printed,
    ), printed


def _unsent(states: list[dict[str, Any]], name: str) -> torch.Tensor:
    """Returns the part of the gradients that all ranks have yet to add to the average."""
    total = torch.zeros(math.prod(SHAPES[name]), dtype=torch.float64)
    for state in states:
        saved = state["tensors"][name]
        if saved["residual"] is not None:
            total += saved["residual"].double() / len(states)
        if saved["owned"] is not None:
            owned = saved["owned"]
            part = owned["residual"].double() * owned["weight"] / len(states)
            total[owned["begin"] : owned["end"]] += part
    return total


@on_ranks(4, launcher="two hosts", environment=DYNAMIC)
def test_another_number_of_ranks_takes_over_everything_unsent() -> None:
    two = hvd.add_process_set([0, 3])  # Hosts and places have sets of their own.
    pair: dict[str, Any] = {"exchange": "two_shot", "process_set": two}
    for old, new in ((pair, {}), ({}, {**pair, "name": "resized"})):
        states: list[dict[str, Any]] = []
        for options, steps in ((old, range(3)), (new, range(3, 5))):
            members = two.ranks if options else range(4)
            model, compressor = _start(**options)
            if states and hvd.rank() in members:
                compressor.load_resized(states)
                unsent = {name: _unsent(states, name) for name in SHAPES}
            loaded = hvd.allgather_object(compressor.state_dict(), name="loaded states")
            if states and hvd.rank() in members:
                for name in SHAPES:
                    got = _unsent([loaded[rank] for rank in members], name)
                    assert torch.allclose(got, unsent[name], atol=1e-6), name
            where = {"process_set": two} if options else {}
            optimizer = distributed(model, compressor, **where)
            for step in steps:
                exchange(model, optimizer, targets(SHAPES, hvd.rank(), step))
            everywhere = hvd.allgather_object(compressor.state_dict(), name="old states")
            states = [everywhere[rank] for rank in members]
