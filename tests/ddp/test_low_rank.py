"""PowerSGD beside PyTorch's own hook, and what is its own: factors, bits, failures, states."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as stock
from torch.nn.parallel import DistributedDataParallel

import hvd_compress.ddp as hvdc
from hvd_compress import Int8, OneBit, PowerSGD, Route
from hvd_compress.engine import low_rank
from hvd_compress.exchanges.low_rank import first
from tests.contract.cases import FULL, NONE
from tests.ddp.probes import assert_equal_on_all_ranks, distributed, exchange
from tests.ranks import on_ranks
from tests.torch_models import Probe, assert_same_bits, targets

SHAPES = {"a": (60, 90), "bias": (70,), "c": (16, 8, 5, 5)}
"""Matrices of 60 by 90 and 16 by 200."""
RANK, WARM_UP = 3, 2


class _Stock:
    """A model with PyTorch's hook, in one bucket, which begins with the same factors."""

    def __init__(self) -> None:
        self.state = stock.PowerSGDState(
            None, RANK, start_powerSGD_iter=WARM_UP, min_compression_rate=1
        )
        self.ddp = DistributedDataParallel(Probe(SHAPES), bucket_cap_mb=25)
        self._names = {parameter: name for name, parameter in self.ddp.module.named_parameters()}
        self.order: list[str] = []
        self.ddp.register_comm_hook(None, self._hook)

    # Without annotations, which DDP would look at.
    def _hook(self, state, bucket):  # type: ignore[no-untyped-def]
        self.order = [self._names[parameter] for parameter in bucket.parameters()]
        if self.state.iter == WARM_UP:
            firsts = [
                torch.from_numpy(first(SHAPES[name], RANK, 0, list(SHAPES).index(name))).view(-1)
                for name in self.order
                if name != "bias"
            ]
            self.state.q_memory_dict[0] = torch.cat(firsts)
            rows = sum(SHAPES[name][0] for name in self.order if name != "bias")
            self.state.p_memory_dict[0] = torch.empty(RANK * rows)
        return stock.powerSGD_hook(self.state, bucket)

    def errors(self) -> dict[str, torch.Tensor]:
        """Returns this rank's unsent gradients, by parameter."""
        sizes = [torch.Size(SHAPES[name]).numel() for name in self.order]
        return dict(zip(self.order, self.state.error_dict[0].split(sizes), strict=True))


@on_ranks(2, launcher="torchrun")
def test_it_is_pytorchs_hook_up_to_rounding() -> None:
    """The tolerance is that of float32: PyTorch multiplies, orthogonalizes and adds in another order.

    The ranks' residuals differ by numbers whose sum is zero, and so do not count.
    """
    theirs = _Stock()
    ours, compressor = distributed(
        Probe(SHAPES), PowerSGD(RANK), FULL, warmup_steps=WARM_UP, bucket_cap_mb=25
    )
    for step in range(8):
        gradients = targets(SHAPES, dist.get_rank(), step)
        got, expected = exchange(ours, gradients), exchange(theirs.ddp, gradients)
        for name in SHAPES:
            torch.testing.assert_close(got[name], expected[name], rtol=0, atol=3e-5)
    kept = compressor.state_dict()["tensors"]
    for name, error in theirs.errors().items():
        if name != "bias":
            both = torch.stack([kept[name]["residual"], error])
            dist.all_reduce(both)
            assert both[0].norm() > 10
            torch.testing.assert_close(both[0], both[1], rtol=0, atol=3e-4)
    assert (
        compressor.residual_norm()
        < sum(float(e.norm()) ** 2 for e in theirs.errors().values()) ** 0.5
    )


@on_ranks(3, launcher="torchrun")
def test_all_ranks_have_the_same_bits_however_many_threads_they_have() -> None:
    shapes, threads = {"a": (300, 700), "b": (512, 65)}, torch.get_num_threads()
    torch.set_num_threads(1 + dist.get_rank())
    try:
        ddp, compressor = distributed(Probe(shapes), PowerSGD(5), FULL)
        for step in range(3):
            got = exchange(ddp, targets(shapes, dist.get_rank(), step))
            assert_equal_on_all_ranks(got)
            assert int(torch.linalg.matrix_rank(got["a"])) == 5
        tensors = compressor.state_dict()["tensors"]
        assert_equal_on_all_ranks({name: tensors[name]["factor"] for name in shapes})
    finally:
        torch.set_num_threads(threads)


@on_ranks(2, launcher="torchrun")
def test_a_rank_keeps_what_its_own_factor_does_not_hold() -> None:
    """Differences between ranks do not make the residual grow: each factor has the gradients' sum."""
    shapes = {"a": (40, 60)}
    ddp, compressor = distributed(Probe(shapes), PowerSGD(4), FULL)
    for step in range(4):
        got = exchange(ddp, targets(shapes, dist.get_rank(), step))["a"]
        sent = torch.linalg.svd(got).U[:, :4]
        kept = compressor.state_dict()["tensors"]["a"]["residual"].view(40, 60)
        assert kept.norm() > 10 and (sent.T @ kept).norm() < 1e-4 * kept.norm()


@on_ranks(2, launcher="torchrun")
def test_a_gradient_of_zeros_does_not_end_the_iteration() -> None:
    shapes = {"a": (30, 40)}
    ddp, compressor = distributed(Probe(shapes), PowerSGD(2), NONE)
    exchange(ddp, {"a": torch.zeros(30, 40)})
    factor = compressor.state_dict()["tensors"]["a"]["factor"]
    assert torch.equal(factor, torch.from_numpy(first((30, 40), 2, 0, 0)))
    assert int(torch.linalg.matrix_rank(exchange(ddp, targets(shapes, 0, 1))["a"])) == 2


@on_ranks(2, launcher="torchrun")
def test_a_checkpoint_goes_on_with_the_same_bits() -> None:
    ddp, compressor = distributed(Probe(SHAPES), PowerSGD(2), FULL)
    for step in range(2):
        exchange(ddp, targets(SHAPES, dist.get_rank(), step))
    again, other = distributed(Probe(SHAPES), PowerSGD(2), FULL)
    state = copy.deepcopy(compressor.state_dict())
    other.load_state_dict(state)
    for step in range(2, 5):
        gradients = targets(SHAPES, dist.get_rank(), step)
        assert_same_bits(exchange(again, gradients), exchange(ddp, gradients))
    for bad, error in (
        (torch.zeros(3, 2), r"a.factor: expected a matrix of 90 rows, got shape \(3, 2\)"),
        (torch.full((90, 2), torch.nan), "a.factor: expected finite numbers"),
        (torch.zeros(90, 2, dtype=torch.int32), "a.factor: expected floating-point numbers"),
        ([1.0], "a.factor: expected a Tensor"),
    ):
        wrong = copy.deepcopy(state)
        wrong["tensors"]["a"]["factor"] = bad
        with pytest.raises((TypeError, ValueError), match=error):
            other.load_state_dict(wrong)
    other.load_state_dict(state)


@on_ranks(2, launcher="torchrun")
def test_another_rank_begins_anew_and_a_dropped_step_brings_the_factor_back() -> None:
    ddp, compressor = distributed(Probe(SHAPES), PowerSGD(2), FULL)
    exchange(ddp, targets(SHAPES, dist.get_rank(), 0))
    before = copy.deepcopy(compressor.state_dict()["tensors"])
    compressor.set_codec(PowerSGD(3))
    exchange(ddp, targets(SHAPES, dist.get_rank(), 1))
    assert compressor.state_dict()["tensors"]["a"]["factor"].shape == (90, 3)
    compressor.drop_step()
    after = compressor.state_dict()["tensors"]
    for field in ("factor", "residual"):
        assert torch.equal(after["a"][field], before["a"][field])


def _a_rank_that_fails(call: int) -> None:
    ddp, compressor = distributed(Probe(SHAPES), PowerSGD(2), FULL, bucket_cap_mb=25)
    exchange(ddp, targets(SHAPES, dist.get_rank(), 0))
    before = copy.deepcopy(compressor.state_dict()["tensors"])
    error: tuple[type[Exception], str] = (
        hvdc.ExchangeError,
        "expected the factors of all 3 ranks, got those of 2; the own errors",
    )
    usual, calls = low_rank.orthonormal, []
    if dist.get_rank() == 1:
        error = (ArithmeticError, "on purpose")

    def failing(matrices: Any) -> Any:
        calls.append(matrices)
        if len(calls) == call and dist.get_rank() == 1:
            raise ArithmeticError("on purpose")
        return usual(matrices)

    low_rank.orthonormal = failing
    try:
        with pytest.raises(error[0], match=error[1]):
            exchange(ddp, targets(SHAPES, dist.get_rank(), 1))
    finally:
        low_rank.orthonormal = usual
    for name, one in compressor.state_dict()["tensors"].items():
        if one["residual"] is not None:
            assert torch.equal(one["residual"], before[name]["residual"]), "mass is lost"
            assert torch.equal(one["factor"], before[name]["factor"])
    dist.barrier()  # All of them are still there.


@on_ranks(3, launcher="torchrun")
def test_a_rank_that_fails_before_the_sums() -> None:
    _a_rank_that_fails(1)


@on_ranks(3, launcher="torchrun")
def test_a_rank_that_fails_between_the_sums() -> None:
    _a_rank_that_fails(2)


@on_ranks(2, launcher="torchrun")
def test_what_is_not_smaller_as_factors_travels_uncompressed() -> None:
    shapes = {"wide": (4, 300), "vector": (3000,), "square": (64, 64), "small": (3, 3)}
    ddp, compressor = distributed(Probe(shapes), PowerSGD(4), FULL)
    routes = compressor.routes()
    assert {name for name in shapes if not routes[name].uncompressed} == {"square"}
    assert routes["square"].exchange == "low_rank"
    both = [targets(shapes, rank, 0) for rank in range(2)]
    got = exchange(ddp, both[dist.get_rank()])
    for name in ("wide", "vector", "small"):
        assert torch.equal(got[name], (both[0][name] + both[1][name]) / 2)


@on_ranks(2, launcher="torchrun")
def test_layers_with_other_codecs_and_ranks() -> None:
    """Ranks of factors may differ in a bucket; what is encoded otherwise has another exchange."""
    shapes = {"a": (60, 90), "b": (50, 80), "c": (64, 64)}
    layers = {"b": PowerSGD(1), "c": OneBit()}
    ddp, compressor = distributed(Probe(shapes), PowerSGD(6), FULL, layers=layers, bucket_cap_mb=25)
    got = exchange(ddp, targets(shapes, dist.get_rank(), 0))
    assert [int(torch.linalg.matrix_rank(got[name])) for name in ("a", "b")] == [6, 1]
    assert compressor.routes()["c"].exchange == "allgather"
    compressor.set_codec(Int8())
    exchange(ddp, targets(shapes, dist.get_rank(), 1))
    assert {route.exchange for route in compressor.routes().values()} == {"allgather"}


def test_settings_that_cannot_be() -> None:
    for rank, error in ((0, ValueError), (1025, ValueError), (2.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match=r"PowerSGD.rank: expected an integer in \[1, 1024\], got"):
            PowerSGD(rank)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"PowerSGD: expected settings of the codec \(rank\), got"):
        PowerSGD(warmup_steps=3)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"expected 'low_rank' for .*, got 'allgather': write"):
        Route(PowerSGD(), exchange="allgather")
    with pytest.raises(ValueError, match="expected alpha <= beta"):
        PowerSGD().check_feedback(hvdc.ErrorFeedback(1.0, 0.5), (9, 9))
    with pytest.raises(ValueError, match=r"Auto.codecs: expected a codec that writes payloads"):
        hvdc.Auto(torch.nn.Linear(3, 3), codecs=(PowerSGD(),))  # type: ignore[arg-type]
