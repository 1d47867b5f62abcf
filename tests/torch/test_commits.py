"""Compressors in elastic states, which are settled when ranks leave or join."""

from __future__ import annotations

import logging
import re
from typing import Any

import horovod.torch as hvd
import pytest
import torch

import hvd_compress.torch as hvdc
from hvd_compress.codecs import Codec, OneBit, PowerSGD
from hvd_compress.ranks import names
from hvd_compress.torch.elastic import TorchState
from tests.again import initialize_again, next_places, start_at
from tests.ranks import on_ranks
from tests.torch.probes import (
    assert_identical_on_all_ranks,
    distributed,
    exchange,
    process_set,
)
from tests.torch_models import Probe, targets

SHAPES = {"a": (40, 70), "b": (3000,), "small": (10,)}


class _Training:
    """A model, its compressor and its elastic state.

    Args:
        called: the prefix of its collectives' names.
        share: whether commits share residuals.
        codec: the compressor's codec.
        options: the compressor's options.
    """

    def __init__(
        self,
        called: str = "training",
        share: bool = False,
        codec: Codec = OneBit(),  # noqa: B008
        **options: Any,
    ) -> None:
        self.model = Probe(SHAPES)
        self.compressor = hvdc.Compressor(self.model, codec, threshold=100, name=called, **options)
        self.optimizer = distributed(self.model, self.compressor)
        self.state = TorchState(self.model, self.optimizer, share_residuals=share, step=0)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            exchange(self.model, self.optimizer, targets(SHAPES, hvd.rank(), self.state.step))
            self.state.step += 1

    def unsent(self) -> torch.Tensor:
        """Returns the part of the gradients that this rank would still add to the average of all ranks."""
        sums = []
        for slot in self.compressor._slots:
            total = torch.zeros(slot.count)
            if slot.residual is not None:
                total += slot.residual
            if slot.owned is not None and slot.owned.residual is not None:
                total[slot.owned.begin : slot.owned.end] += slot.owned.weight * slot.owned.residual
            sums.append(total)
        return torch.cat(sums) / hvd.size()


def _everybodys(unsent: torch.Tensor, name: str) -> torch.Tensor:
    return hvd.allgather(unsent[None], name=name)


@on_ranks(3, alone=True)
def test_a_rank_that_is_lost() -> None:
    """Its unsent part is shared out, or missing with a warning; the other ranks keep theirs."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    logger = logging.getLogger("hvd_compress.elastic")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    trainings = {}
    for chosen, share in (("allgather", True), ("two_shot", True), ("allgather", False)):
        called = f"{chosen} {share}"
        trainings[called] = _Training(called, share, exchange=chosen)
    trainings["on some ranks"] = _Training("on some ranks", True)
    before = {}
    for called, training in trainings.items():
        training.run(3)
        before[called] = _everybodys(training.unsent(), called)
        training.state.commit()
        if called == "on some ranks" and hvd.rank() == 1:
            training.state.save()  # This rank's own, in place of the commit with the sum of all ranks.
        training.run(2)  # As if the rank were lost then.
    rank = hvd.rank()
    for training in trainings.values():
        training.state.restore()
    if not initialize_again(hvd, 2):
        return
    for called, training in trainings.items():
        said.clear()
        training.state.on_reset()
        training.state.sync()
        assert training.state.step == 3
        after = _everybodys(training.unsent(), called).sum(0)
        kept = before[called] if "True" in called else before[called][:2]
        torch.testing.assert_close(after, kept.sum(0), rtol=1e-5, atol=1e-5)
        how = "INFO .* is shared out" if "True" in called else "WARNING .* is missing"
        assert len(said) == (1 if rank == 0 else 0)
        for line in said:
            found = re.search(rf"{how}", line) and re.search(
                r"ranks \[2\] of 3 .* norm ([\d.]+)", line
            )
            norm = 3 * float(before[called][2].norm())
            assert found and float(found[1]) == pytest.approx(norm, rel=1e-4), line
        training.compressor.reset_counters()
        training.run(3)
        assert_identical_on_all_ranks(training.model)
        counters = training.compressor.counters
        assert counters.message_bytes < 0.1 * counters.uncompressed_bytes


@on_ranks(2, alone=True)
def test_a_rank_that_is_replaced() -> None:
    """The new one has the others' positions, and its share of what was lost."""
    for share in (True, False):
        training = _Training(f"replaced {share}", share)
        training.run(3)
        before = _everybodys(training.unsent(), "before")
        training.state.commit()
        if hvd.rank() == 1:
            names.count_from({})  # A new process has made none.
            training = _Training(f"replaced {share}", share)
        else:
            training.state.on_reset()
        training.state.sync()
        assert training.state.step == 3
        assert {s.step for s in training.compressor._slots if s.count > 100} == {3}
        after = _everybodys(training.unsent(), "after")
        lost = before[1] if share else torch.zeros_like(before[1])
        torch.testing.assert_close(after[0], before[0] + lost / 2, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(after[1], lost / 2, rtol=1e-5, atol=1e-5)
        training.run(2)
        assert_identical_on_all_ranks(training.model)


@on_ranks(2)
def test_the_scaler_is_the_one_that_the_state_has() -> None:
    """sync() replaces it by a copy, on all ranks but the first; only the copy's scale changes then."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    training = _Training("scaled", grad_scaler=scaler)
    compressor = training.compressor
    state = training.state = TorchState(
        training.model, training.optimizer, step=0, scaler=scaler, other=torch.amp.GradScaler("cpu")
    )
    state.sync()
    assert compressor._grad_scaler is state.scaler
    training.run(2)
    state.scaler.scale(torch.ones(1))
    state.scaler.update(4096.0)
    training.run(1)
    kept = [slot for slot in compressor._slots if slot.residual is not None]
    assert kept and {slot.residual_scale for slot in kept} == {4096.0}
    state.commit()
    committed = state.scaler
    state.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    assert compressor._grad_scaler is state.scaler
    state.restore()
    assert compressor._grad_scaler is state.scaler is committed
    state.scaler = None
    training.run(1)
    assert {slot.residual_scale for slot in kept} == {1.0}


@on_ranks(3, alone=True)
def test_the_default_exchange_follows_the_number_of_ranks() -> None:
    """Three ranks, then two, then three: nothing that was not sent is lost, by whatever exchange."""
    training = _Training("followed", share=True)
    training.run(3)
    _assert_exchange(training, "two_shot", 3)
    assert any(slot.owned is not None for slot in training.compressor._slots)
    before = _everybodys(training.unsent(), "on three")
    training.state.commit()
    smaller, larger = next_places(hvd, 2, 3)
    if start_at(hvd, smaller, 2):
        training.state.on_reset()
        training.state.sync()
        _assert_exchange(training, "allgather", 2)
        after = _everybodys(training.unsent(), "on two")
        torch.testing.assert_close(after.sum(0), before.sum(0), rtol=1e-5, atol=1e-5)
        training.run(3)
        assert all(slot.owned is None for slot in training.compressor._slots)
        assert_identical_on_all_ranks(training.model)
        before = _everybodys(training.unsent(), "on two, later")
        training.state.commit()
        start_at(hvd, larger, 3)
        training.state.on_reset()
    else:
        start_at(hvd, larger, 3)
        names.count_from({})  # A new process has made none.
        training = _Training("followed", share=True)
    training.state.sync()
    _assert_exchange(training, "two_shot", 3)
    after = _everybodys(training.unsent(), "on three again")
    assert not after[2].any() and before[:2].any()
    if hvd.rank() < 2:
        torch.testing.assert_close(after.sum(0), before.sum(0), rtol=1e-5, atol=1e-5)
    training.run(2)
    assert_identical_on_all_ranks(training.model)
    assert all(slot.owned is not None for slot in training.compressor._slots if slot.count > 100)


@on_ranks(2, alone=True)
def test_factors_stay_with_the_ranks_that_stay() -> None:
    """Unsent gradients are kept, and a new rank takes the others' factor after a step."""
    training = _Training("factors", share=True, codec=PowerSGD(2))
    training.run(3)
    before = _everybodys(training.unsent(), "on two ranks")
    kept = training.compressor.state_dict()["tensors"]["a"]["factor"].clone()
    training.state.commit()
    alone, both = next_places(hvd, 1, 2)
    if start_at(hvd, alone, 1):
        training.state.on_reset()
        training.state.sync()
        torch.testing.assert_close(training.unsent(), before.sum(0), rtol=1e-5, atol=1e-5)
        assert torch.equal(training.compressor.state_dict()["tensors"]["a"]["factor"], kept)
        training.run(2)
        training.state.commit()
        start_at(hvd, both, 2)
        training.state.on_reset()
    else:
        start_at(hvd, both, 2)
        names.count_from({})  # A new process has made none.
        training = _Training("factors", share=True, codec=PowerSGD(2))
    training.state.sync()
    training.run(1)
    assert_identical_on_all_ranks(training.model)
    factor = training.compressor.state_dict()["tensors"]["a"]["factor"]
    assert torch.equal(*hvd.allgather(factor[None], name="factors"))


def _assert_exchange(training: _Training, exchange: str, ranks: int) -> None:
    route = training.compressor.routes()["a"]
    assert (route.exchange, route.reason) == (exchange, f"auto, {ranks} ranks")


@on_ranks(2, alone=True)
def test_a_compressor_that_is_made_again_after_a_reset() -> None:
    """A rank that stays makes it for the second time, a new one for the first; the names are the same."""
    training = _Training("outside")
    training.state.sync()
    for turn in range(2):
        model = Probe(SHAPES)
        optimizer = distributed(model, hvdc.OneBit(model, threshold=100, name="inside"))
        exchange(model, optimizer, targets(SHAPES, hvd.rank(), turn))
        training.state.commit()
        assert initialize_again(hvd, 2)
        if hvd.rank() == 1:
            names.count_from({})  # A new process has made none.
            training = _Training("outside")
        else:
            training.state.on_reset()
        training.state.sync()
        training.run(1)
    assert_identical_on_all_ranks(model)


@on_ranks(2)
def test_restoring_goes_on_from_the_last_commit_bit_for_bit() -> None:
    for codec, chosen in ((OneBit(), "two_shot"), (PowerSGD(2), "auto")):
        training = _Training("restored", codec=codec, exchange=chosen)
        training.run(2)
        training.state.commit()
        training.run(3)
        first = [p.detach().clone() for p in training.model.parameters()]
        training.state.restore()
        assert training.state.step == 2
        training.run(3)
        assert all(map(torch.equal, first, training.model.parameters()))


@on_ranks(2)
def test_the_beginning_is_a_commit_as_well() -> None:
    training = _Training("begun")
    training.run(2)
    training.state.restore()
    assert training.compressor.residual_norm() == 0
    assert {slot.step for slot in training.compressor._slots} == {0}


@on_ranks(2, environment={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}, alone=True)
def test_a_process_set_does_not_outlive_a_reset() -> None:
    model, chosen = Probe(SHAPES), process_set(0)
    compressor = hvdc.OneBit(model, process_set=chosen, name="of some ranks")
    with pytest.raises(ValueError, match="expected a compressor with process_set=None"):
        TorchState(model, compressor=compressor)


@on_ranks(2)
def test_what_cannot_be_committed() -> None:
    model = Probe(SHAPES)
    with pytest.raises(ValueError, match="got none; without compression, use"):
        TorchState(model, distributed(model, hvd.Compression.none))
    stepped = hvdc.OneBit(model, exchange="two_shot", owner_step=hvdc.AdaGrad(), name="stepped")
    with pytest.raises(ValueError, match="expected a compressor without owner_step"):
        TorchState(model, compressor=stepped)
    training = _Training("busy")
    training.model(targets(SHAPES, hvd.rank(), 0)).backward()
    for call in (training.state.commit, training.state.save):
        with pytest.raises(hvdc.ExchangeError, match="commit: expected no exchange in progress"):
            call()
    training.optimizer.step()
    training.state.commit()
