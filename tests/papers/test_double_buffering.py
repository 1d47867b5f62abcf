"""Half-batches whose exchange overlaps the next one's computation, beside the same in one process."""

from __future__ import annotations

import copy
import io
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hvd_compress.distributed as hvdc
from hvd_compress import Route
from hvd_compress.codecs import ErrorFeedback, OneBit
from hvd_compress.papers import DoubleBuffering, double_buffering
from tests.ddp.probes import assert_equal_on_all_ranks
from tests.elsewhere import elsewhere
from tests.ranks import on_ranks
from tests.torch_models import DEVICE, Simulation

CODEC = OneBit("column")
SHAPES = {"0.weight": (40, 30), "0.bias": (40,), "2.weight": (5, 40), "2.bias": (5,)}
BATCH = 9


def _model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 5))


def _batch(rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(100 * number + rank)
    x = torch.randn(BATCH, 30, generator=generator)
    return x, torch.randint(5, (BATCH,), generator=generator)


def _make(model: nn.Module, **options: Any) -> tuple[DoubleBuffering, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    compressor = hvdc.Compressor(Route(CODEC, ErrorFeedback()), exchange="two_shot", threshold=0)
    return DoubleBuffering(model.named_parameters(), optimizer, compressor, **options), optimizer


def _train(model: nn.Module, buffering: DoubleBuffering, numbers: range) -> None:
    for number in numbers:
        for x, y in buffering.parts(*_batch(dist.get_rank(), number)):
            nn.functional.cross_entropy(model(x), y).backward()
            buffering.step()


def _gradients(model: nn.Module, rank: int, number: int, begin: int, end: int) -> dict[str, Any]:
    x, y = (one[begin:end] for one in _batch(rank, number))
    model.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    return {n: p.grad * ((end - begin) / BATCH) for n, p in model.named_parameters()}


@on_ranks(2, launcher="torchrun")
def test_updates_are_one_half_batch_late() -> None:
    """As in one process that computes all ranks' half-batches, and encodes by the reference."""
    model = _model(dist.get_rank())  # The first rank's count.
    buffering, _ = _make(model, enabled=True)
    _train(model, buffering, range(3))

    alone = _model(0)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    simulation = Simulation("two_shot", CODEC, ErrorFeedback(), SHAPES, 2)
    late: dict[str, Any] | None = None
    for number in range(3):
        for begin, end in ((0, 5), (5, 9)):
            everybodys = [_gradients(alone, rank, number, begin, end) for rank in range(2)]
            _update(alone, optimizer, late)
            late = simulation.average(everybodys)
    for got, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(got, expected)
    buffering.flush()
    _update(alone, optimizer, late)
    buffering.flush()  # There is nothing left.
    for got, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(got, expected)


def _update(model: nn.Module, optimizer: torch.optim.Optimizer, averages: Any) -> None:
    if averages is not None:
        for name, parameter in model.named_parameters():
            parameter.grad = averages[name]
        optimizer.step()


@on_ranks(2, launcher="torchrun")
def test_a_state_goes_on_bit_for_bit() -> None:
    for enabled in (True, False):
        model = _model()
        buffering, _ = _make(model, enabled=enabled)
        _train(model, buffering, range(4))

        first = _model()
        before, optimizer = _make(first, enabled=enabled)
        _train(first, before, range(2))
        file = io.BytesIO()
        torch.save((first.state_dict(), optimizer.state_dict(), before.state_dict()), file)
        file.seek(0)
        second = _model(7)
        after, optimizer = _make(second, enabled=not enabled)
        loaded = elsewhere(torch.load(file))  # Saved on another device.
        for one, state in zip((second, optimizer, after), loaded, strict=True):
            one.load_state_dict(state)
        for part, rest in ((first, before), (second, after)):
            _train(part, rest, range(2, 4))
            rest.flush()
        buffering.flush()
        for other in (first, second):
            for got, expected in zip(other.parameters(), model.parameters(), strict=True):
                assert torch.equal(got, expected)


@on_ranks(2, launcher="torchrun")
def test_it_is_off_where_it_does_not_pay() -> None:
    """Ranks decide alike: by times that are theirs together."""
    model = _model()
    buffering, optimizer = _make(model, trial_steps=2)
    slow = _Slow(dist.get_rank())
    optimizer.register_step_pre_hook(slow)
    assert buffering.enabled is None
    with mock.patch.object(double_buffering, "time", slow):
        _train(model, buffering, range(6))
    assert buffering.enabled is False and buffering.report is not None
    assert "does not pay" in buffering.report
    reports: list[Any] = [None, None]
    dist.all_gather_object(reports, buffering.report)
    assert reports[0] == reports[1]
    made = slow.calls
    _train(model, buffering, range(6, 8))
    assert slow.calls == made + 2  # One update for each minibatch.
    parameters = [parameter.detach().clone() for parameter in model.parameters()]
    buffering.flush()
    assert all(torch.equal(a, b) for a, b in zip(parameters, model.parameters(), strict=True))


class _Slow:
    """An update that takes longer than the exchange, which two of them cannot win back; on a clock of its
    own, on which nothing else takes any time."""

    def __init__(self, rank: int) -> None:
        self.calls, self._rank, self._now = 0, rank, 0.0

    def __call__(self, *arguments: Any) -> None:
        self.calls += 1
        self._now += 0.05 + 0.05 * self._rank

    def perf_counter(self) -> float:
        return self._now


@on_ranks(2, launcher="torchrun")
def test_what_it_refuses() -> None:
    model = _model()
    buffering, optimizer = _make(model, enabled=True)
    for tensors in ((torch.zeros(1, 3),), (torch.zeros(4), torch.zeros(5))):
        with pytest.raises(ValueError, match="expected tensors of one length of at least 2"):
            list(buffering.parts(*tensors))
    with pytest.raises(ValueError, match=r"DoubleBuffering\.params: expected pairs .*, got none"):
        DoubleBuffering([], optimizer, hvdc.Compressor(OneBit()))
    with pytest.raises(ValueError, match="expected parameters to train, got none"):
        DoubleBuffering(_model().requires_grad_(False), optimizer, hvdc.Compressor(OneBit()))
    wrong: Any = torch.nn.Linear(1, 1)
    with pytest.raises(
        TypeError, match=r"DoubleBuffering\(model.named_parameters\(\), optimizer, "
    ):
        DoubleBuffering(model.named_parameters(), optimizer, wrong)
    state = copy.deepcopy(buffering.state_dict())
    state["delayed"] = {"other": torch.zeros(1)}
    with pytest.raises(ValueError, match="expected averages of"):
        buffering.load_state_dict(state)
    with pytest.raises(hvdc.ExchangeError, match="enabled"):
        _make(model, enabled=dist.get_rank() == 0)


@on_ranks(2, launcher="torchrun")
def test_layers_that_are_unfrozen_or_frozen_later() -> None:
    model = _model(dist.get_rank())
    model[0].requires_grad_(False)
    buffering, _ = _make(model, enabled=True)
    kept = model[0].weight.clone()
    _train(model, buffering, range(3))
    assert torch.equal(model[0].weight, kept)
    model[0].requires_grad_(True)
    model[2].requires_grad_(False)
    _train(model, buffering, range(3, 6))
    buffering.flush()
    assert_equal_on_all_ranks(dict(model.named_parameters()))
    assert not torch.equal(model[0].weight, kept)


@on_ranks(2, launcher="torchrun")
def test_an_optimizer_of_other_parameters_is_an_error_on_every_rank() -> None:
    model = _model()
    other = nn.Linear(5, 5, dtype=torch.float32, device="cpu")
    buffering, optimizer = _make(model, enabled=False)
    wrong = dist.get_rank() == 1
    if wrong:
        optimizer.add_param_group({"params": other.parameters()})
    error = ValueError if wrong else hvdc.ExchangeError
    with pytest.raises(error, match="all parameters that the optimizer trains"):
        _train(model, buffering, range(1))
