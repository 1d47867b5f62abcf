"""Local steps and exchanges of their result, beside the same in one process."""

from __future__ import annotations

import copy
import functools
import io
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hvd_compress.diloco
import hvd_compress.distributed as hvdc
from hvd_compress.codecs import ECQ, Int8, NoCompression, OneBit, PowerSGD
from hvd_compress.diloco import AVERAGE, NESTEROV
from tests.contract.cases import ROWS
from tests.ddp.probes import assert_equal_on_all_ranks
from tests.diloco.nesterov import DiLoCo
from tests.elsewhere import elsewhere
from tests.ranks import on_ranks
from tests.torch_models import Probe, Simulation, assert_same_bits, targets

SHAPES = {"first": (70, 40), "second": (3000,), "third": (1500,)}
NAMES = list(SHAPES)


def _compressor(codec: Any = None, exchange: str = "allgather") -> hvdc.Compressor:
    codec = codec or Int8()
    return hvdc.Compressor(codec, exchange=exchange, threshold=0)


def _learn(model: torch.nn.Module, rank: int, step: int) -> None:
    """Makes a small change that differs between ranks, as an inner optimizer would."""
    change = targets(SHAPES, rank, step, 0.1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(change[name])


def _train(diloco: DiLoCo, model: torch.nn.Module, steps: range) -> None:
    for step in steps:
        _learn(model, dist.get_rank(), step)
        diloco.step()


class _Everywhere:
    """The algorithm for all ranks at once, with the reference of the exchange.

    Each fragment has a simulation of its own, since keys and their residuals are separate.
    """

    def __init__(self, ranks: int, codec: Any, exchange: str, fragments: list[list[str]]) -> None:
        self.fragments = fragments
        self.common = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self.velocity: dict[str, torch.Tensor] = {}
        self.ranks = [{n: v.clone() for n, v in self.common.items()} for _ in range(ranks)]
        feedback = codec.feedback
        self._simulations = [
            Simulation(exchange, codec, feedback, {n: SHAPES[n] for n in names}, ranks)
            for names in fragments
        ]

    def average(self, fragment: int) -> dict[str, torch.Tensor]:
        names = self.fragments[fragment]
        differences = [{n: self.common[n] - own[n] for n in names} for own in self.ranks]
        return self._simulations[fragment].average(differences)

    def use(self, average: dict[str, torch.Tensor], mixing: float) -> None:
        # Nesterov's momentum as in Sutskever et al., 2013, with 0.9 and a learning rate of 0.7.
        for name, gradient in average.items():
            old = self.velocity.get(name)
            velocity = gradient if old is None else 0.9 * old + gradient
            self.velocity[name] = velocity
            self.common[name] = self.common[name] - 0.7 * (gradient + 0.9 * velocity)
            for own in self.ranks:
                own[name] = torch.lerp(self.common[name], own[name], mixing)


@on_ranks(2, launcher="torchrun")
def test_all_parameters_at_once() -> None:
    rows: list[tuple[str, Any]] = [
        ("allgather", OneBit()),
        ("allgather", ECQ(norm="l2")),
        ("two_shot", Int8()),
        ("integer_sum", ECQ(norm="l2")),
        ("low_rank", PowerSGD(1)),
    ]
    for exchange, codec in rows:
        if exchange not in ROWS:  # Not for this device.
            continue
        model = Probe(SHAPES)
        diloco = DiLoCo(model, _compressor(codec, exchange), sync_every=3)
        expected = _Everywhere(2, codec, exchange, [NAMES])
        for step in range(9):
            for rank, own in enumerate(expected.ranks):
                for name, change in targets(SHAPES, rank, step, 0.1).items():
                    own[name] = own[name] + change
            if step % 3 == 2:
                expected.use(expected.average(0), mixing=0.0)
            _train(diloco, model, range(step, step + 1))
            # On a device, factors' products are added up in another order.
            _assert_close(
                dict(model.named_parameters()),
                expected.ranks[dist.get_rank()],
                atol=1e-4 if exchange == "low_rank" else 1e-6,
            )
        assert diloco.rounds == 3 and diloco.steps == 9
        assert_equal_on_all_ranks(dict(model.named_parameters()))
        assert_same_bits(diloco.common_parameters, dict(model.named_parameters()))


@on_ranks(3, launcher="torchrun")
def test_fragments_that_arrive_later() -> None:
    model = Probe(SHAPES)
    fragments = [["first"], ["second", "third"]]
    diloco = DiLoCo(model, _compressor(), sync_every=4, fragments=fragments, delay=1, mixing=0.25)
    expected = _Everywhere(3, Int8(), "allgather", fragments)
    due: dict[int, dict[str, torch.Tensor]] = {}
    for step in range(1, 14):
        for rank, own in enumerate(expected.ranks):
            for name, change in targets(SHAPES, rank, step, 0.1).items():
                own[name] = own[name] + change
        if step in due:
            expected.use(due.pop(step), mixing=0.25)
        # The first fragment after 4, 8, 12 steps, the second one after 2, 6, 10.
        if step % 4 in (0, 2):
            due[step + 1] = expected.average(0 if step % 4 == 0 else 1)
        _train(diloco, model, range(step, step + 1))
        _assert_close(dict(model.named_parameters()), expected.ranks[dist.get_rank()])
    assert_equal_on_all_ranks(diloco.common_parameters)


@on_ranks(2, launcher="torchrun")
def test_local_sgd_averages_the_parameters() -> None:
    """This is the default."""
    model = Probe(SHAPES)
    compressor = _compressor(NoCompression())
    diloco = hvd_compress.diloco.DiLoCo(model, compressor, sync_every=5, delay=2)
    _train(diloco, model, range(3))
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    diloco.synchronize()
    for name, parameter in model.named_parameters():
        mean = own[name].clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        torch.testing.assert_close(parameter.detach(), mean, rtol=0, atol=1e-6)


@on_ranks(2, launcher="torchrun")
def test_an_interrupted_run_goes_on_bit_for_bit() -> None:
    """Saved while a fragment is on its way, and within the steps of the others."""

    def begin() -> tuple[Probe, DiLoCo]:
        model = Probe(SHAPES)
        return model, DiLoCo(model, _compressor(OneBit()), sync_every=6, fragments=3, delay=2)

    model, diloco = begin()
    _train(diloco, model, range(15))  # The second fragment left in step 14 and is due in step 16.
    file = io.BytesIO()
    saved = diloco.state_dict()
    assert len(saved["due"]) == 1
    torch.save({"model": model.state_dict(), "diloco": saved}, file)
    _train(diloco, model, range(15, 30))

    file.seek(0)
    state = torch.load(file)
    for loaded in (state, state, elsewhere(state)):  # Training does not change what was loaded.
        again, other = begin()
        again.load_state_dict(loaded["model"])
        other.load_state_dict(loaded["diloco"])
        _train(other, again, range(15, 30))

        assert_same_bits(dict(again.named_parameters()), dict(model.named_parameters()))
        assert_same_bits(other.common_parameters, diloco.common_parameters)
        assert (other.steps, other.rounds) == (diloco.steps, diloco.rounds) == (30, 14)


@on_ranks(2, launcher="torchrun")
def test_a_round_with_an_infinity_is_dropped_everywhere() -> None:
    """Whether the codec sees it, or it is sent as it is."""
    for exclude in ((), ("second",)):
        options: Any = {"exchange": "allgather", "threshold": 0, "exclude": exclude}
        model, clean = Probe(SHAPES), Probe(SHAPES)
        diloco, beside = (
            DiLoCo(one, hvdc.Compressor(OneBit(), **options), sync_every=2)
            for one in (model, clean)
        )
        for one, its_model in ((diloco, model), (beside, clean)):
            _train(one, its_model, range(4))
        before = {name: one.clone() for name, one in diloco.common_parameters.items()}
        _learn(model, dist.get_rank(), 4)
        if dist.get_rank() == 1:
            with torch.no_grad():
                model.second[17] = torch.inf  # type: ignore[index, operator]
        diloco.step()
        diloco.step()
        assert diloco.dropped_rounds == 1 and diloco.rounds == 2
        assert_same_bits(dict(model.named_parameters()), before)
        # As if the round had never been, but for the codec's noise, of which 1-bit SGD has none.
        for one, its_model in ((diloco, model), (beside, clean)):
            _train(one, its_model, range(6, 8))
        assert_same_bits(diloco.common_parameters, beside.common_parameters)


@on_ranks(2, launcher="torchrun")
def test_a_round_that_is_dropped_later_leaves_the_common_parameters() -> None:
    """Nothing of a rank's own is mixed in, which may be an Inf or a NaN."""
    for bad in (torch.inf, torch.nan):
        for delay, mixing in ((0, 0.5), (1, 0.0), (1, 0.5), (1, 1.0)):
            model = Probe(SHAPES)
            diloco = DiLoCo(model, _compressor(), sync_every=2, delay=delay, mixing=mixing)
            _train(diloco, model, range(5 - (1 - delay)))
            common = {name: one.clone() for name, one in diloco.common_parameters.items()}
            if dist.get_rank() == 1:
                with torch.no_grad():
                    model.second[17] = bad  # type: ignore[index, operator]
            _train(diloco, model, range(5, 7))
            assert (diloco.rounds, diloco.dropped_rounds) == (2, 1)
            assert_same_bits(dict(model.named_parameters()), common)
            assert_same_bits(diloco.common_parameters, common)
            _train(diloco, model, range(7, 9))
            assert (diloco.rounds, diloco.dropped_rounds) == (3, 1)
            assert all(parameter.isfinite().all() for parameter in model.parameters())
            assert_equal_on_all_ranks(diloco.common_parameters)


@on_ranks(3, launcher="torchrun")
def test_two_ranks_go_on_where_three_were() -> None:
    model = Probe(SHAPES)
    diloco = DiLoCo(model, _compressor(OneBit()), sync_every=2)
    _train(diloco, model, range(5))
    states: list[Any] = [None] * 3
    dist.all_gather_object(states, copy.deepcopy(diloco.state_dict()))
    pair = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        fewer = Probe(SHAPES)
        compressor = hvdc.Compressor(OneBit(), threshold=0, process_group=pair)
        other = DiLoCo(fewer, compressor, sync_every=2)
        other.load_resized(states)
        assert_same_bits(dict(fewer.named_parameters()), diloco.common_parameters)
        for name in NAMES:  # Residuals are shares of one mean, which does not change.
            before = sum(_residual(state["compressor"], name) for state in states) / 3
            after = _residual(compressor.state_dict(), name).clone()
            dist.all_reduce(after, group=pair)
            torch.testing.assert_close(after / 2, before)
        _train(other, fewer, range(5, 9))
        assert other.rounds == diloco.rounds + 2
        assert_equal_on_all_ranks(other.common_parameters, pair)


def _residual(state: dict[str, Any], name: str) -> torch.Tensor:
    residual: torch.Tensor = state["tensors"][name]["residual"]
    return residual.cpu()  # Until the first exchange, a resized one stays where it was added up.


@on_ranks(2, launcher="torchrun")
def test_parameters_of_half_precision_and_several_begin_alike() -> None:
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Linear(60, 50).to(torch.bfloat16)
    model.bias.requires_grad_(False)
    diloco = DiLoCo(model, _compressor(), sync_every=1)
    assert_equal_on_all_ranks({"weight": model.weight})
    assert {n: p.dtype for n, p in diloco.common_parameters.items()} == {"weight": torch.float32}
    with torch.no_grad():
        model.weight += 0.25 * (dist.get_rank() + 1)
    diloco.step()
    assert torch.equal(model.weight, diloco.common_parameters["weight"].bfloat16())
    assert_equal_on_all_ranks({"weight": model.weight})


@on_ranks(2, launcher="torchrun")
def test_half_precision_does_not_learn_its_own_rounding() -> None:
    model = torch.nn.Linear(60, 50).to(torch.bfloat16)
    diloco = DiLoCo(model, NoCompression(), sync_every=1)
    with torch.no_grad():
        model.weight.add_(torch.randn_like(model.weight), alpha=0.01)
    diloco.step()
    common = diloco.common_parameters["weight"].clone()
    assert not torch.equal(common, common.bfloat16())
    for _ in range(5):  # No rank trains.
        diloco.step()
    assert torch.equal(diloco.common_parameters["weight"], common)


@on_ranks(2, launcher="torchrun")
def test_ranks_that_differ() -> None:
    with pytest.raises(hvdc.ExchangeError, match="sync_every: 5 on rank 0, 6 on rank 1"):
        DiLoCo(Probe(SHAPES), _compressor(), sync_every=5 + dist.get_rank())
    shapes = {"p": (10 + dist.get_rank(),)}
    with pytest.raises(hvdc.ExchangeError, match="parameters p"):
        DiLoCo(Probe(shapes), _compressor(), sync_every=5)


@on_ranks(2, launcher="torchrun")
def test_wrong_arguments() -> None:
    model = Probe(SHAPES)
    with pytest.raises(TypeError, match=r"DiLoCo\(model, Compressor\(Int8\(\)\), ...\)"):
        DiLoCo(model, hvdc.Compressor, sync_every=4)  # type: ignore[arg-type]
    for options, message in [
        ({"sync_every": 0}, "sync_every: expected an integer in"),
        ({"sync_every": 4, "delay": 4}, r"delay: expected an integer in \[0, 3\], got 4"),
        ({"sync_every": 4, "mixing": 1.5}, "mixing: expected a number in"),
        ({"sync_every": 4, "fragments": 9}, "fragments: expected 1 to 3"),
    ]:
        with pytest.raises(ValueError, match=message):
            DiLoCo(model, _compressor(), **options)
    with pytest.raises(ValueError, match="expected a model with parameters, got one without"):
        DiLoCo(torch.nn.ReLU(), _compressor(), sync_every=4)
    with pytest.raises(ValueError, match="expected trainable parameters, got none"):
        DiLoCo(Probe(SHAPES).requires_grad_(False), _compressor(), sync_every=4)
    with pytest.raises(ValueError, match="weight: expected a parameter with memory"):
        DiLoCo(torch.nn.Linear(9, 9, device="meta"), _compressor(), sync_every=4)


@on_ranks(2, launcher="torchrun")
def test_an_outer_rate_that_discards_most_of_a_round() -> None:
    """As does SGD's own, 0.001, which is what ``outer_optimizer=SGD`` takes."""
    rates = {0.001: torch.optim.SGD, 0.09: functools.partial(torch.optim.SGD, lr=0.09)}
    for rate, outer in rates.items():
        with pytest.warns(UserWarning, match=f"learning rate of 0.1 or more, got {rate}: SGD"):
            DiLoCo(Probe(SHAPES), _compressor(), sync_every=4, outer_optimizer=outer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for outer in (AVERAGE, NESTEROV, functools.partial(torch.optim.SGD, lr=0.1)):
            DiLoCo(Probe(SHAPES), _compressor(), sync_every=4, outer_optimizer=outer)


def _assert_close(
    got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float = 1e-6
) -> None:
    # The outer optimizer rounds in another order than the simulation.
    for name, value in expected.items():
        torch.testing.assert_close(got[name].detach(), value, rtol=1e-5, atol=atol)
