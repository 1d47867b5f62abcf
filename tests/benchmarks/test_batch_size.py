"""Minibatch sizes by trials, and learning rates that follow."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hvd_compress.distributed as hvdc
from benchmarks.papers.batch_size import (
    BatchSizeSelector,
    LearningRateProfile,
    LearningRateSearch,
)
from hvd_compress import OneBit
from hvd_compress.papers import DoubleBuffering
from tests.ranks import on_ranks


def _optimizer(rate: float = 0.1) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


class _Trials:
    """Training whose accuracies are known; each trial leaves its size in the model."""

    def __init__(self, model: torch.nn.Linear, optimizer: Any, right: dict[int, int]) -> None:
        self.model, self.optimizer, self.right = model, optimizer, right
        self.seen: list[tuple[int, float, float]] = []

    def __call__(self, size: int) -> tuple[int, int]:
        self.seen.append(
            (size, self.optimizer.param_groups[0]["lr"], float(self.model.bias.detach()))
        )
        with torch.no_grad():
            self.model.bias.fill_(size)
        return self.right[size], 1000


def test_the_largest_size_that_is_no_worse() -> None:
    for right, size in (
        ({8: 900, 16: 910, 32: 896}, 32),
        ({8: 900, 16: 895, 32: 894}, 16),
        ({8: 900, 16: 880, 32: 990}, 8),  # 32 is not tried.
    ):
        model, optimizer = _optimizer()
        began = float(model.bias.detach())
        trials = _Trials(model, optimizer, right)
        selector = BatchSizeSelector([8, 16, 32], optimizer, [model, optimizer])
        assert selector.size == 8
        found = selector.select(trials)
        assert (found.size, selector.size) == (size, size)
        # From the same state, at the same learning rate for each sample.
        assert [one[2] for one in trials.seen] == [began] * len(trials.seen)
        assert [one[1] for one in trials.seen] == [0.1 * one[0] / 8 for one in trials.seen]
        # Training goes on from the chosen trial.
        assert (
            float(model.bias.detach()) == size and optimizer.param_groups[0]["lr"] == 0.1 * size / 8
        )
        assert list(found.accuracies.values()) == [
            right[one] / 1000 for one in list(right)[: len(trials.seen)]
        ]

        trials.right = {8: 900, 16: 900, 32: 800}
        assert selector.select(trials).size == 16
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2)


@on_ranks(2, launcher="torchrun")
def test_ranks_choose_by_the_samples_of_all() -> None:
    model, optimizer = _optimizer()
    own = {8: 900, 16: 800 if dist.get_rank() else 1000}
    selector = BatchSizeSelector([8, 16], optimizer, [model, optimizer])
    found = selector.select(_Trials(model, optimizer, own))
    assert found.size == 16 and found.accuracies == {8: 0.9, 16: 0.9}


@on_ranks(2, launcher="torchrun")
def test_a_trial_that_was_not_chosen_leaves_no_trace() -> None:
    """Also in what averages gradients, from the first call on."""
    ends = []
    for sizes in ([8, 16], [8]):
        model, optimizer = _optimizer()
        buffering = DoubleBuffering(
            model.named_parameters(),
            optimizer,
            hvdc.Compressor(OneBit(), threshold=0),
            enabled=True,
        )

        def train(
            size: int,
            model: torch.nn.Linear = model,
            buffering: DoubleBuffering = buffering,
        ) -> tuple[int, int]:
            samples = torch.randn(32, 3, generator=torch.Generator().manual_seed(dist.get_rank()))
            for batch in samples.split(size // 2):
                for (x,) in buffering.parts(batch):
                    model(x).square().mean().backward()
                    buffering.step()
            return {8: 30, 16: 20}[size], 32

        selector = BatchSizeSelector(sizes, optimizer, [model, optimizer, buffering])
        for _ in range(2):
            assert selector.select(train).size == 8
        train(8)
        buffering.flush()
        ends.append([parameter.detach().clone() for parameter in model.parameters()])
    for got, expected in zip(*ends, strict=True):
        assert torch.equal(got, expected)


def test_the_size_in_a_checkpoint() -> None:
    model, optimizer = _optimizer()
    selector = BatchSizeSelector([8, 16], optimizer, [model, optimizer])
    selector.select(_Trials(model, optimizer, {8: 900, 16: 900}))
    other_model, other = _optimizer(0.05)
    again = BatchSizeSelector([8, 16], other, [other_model, other])
    again.load_state_dict(selector.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert again.size == 16 and other.param_groups[0]["lr"] == 0.2
    with pytest.raises(ValueError, match=r"expected one of \[8, 16\], got 9"):
        again.load_state_dict({"size": 9})


def test_a_profile_that_was_searched() -> None:
    search = LearningRateSearch(decay=0.5, least=0.01)
    factors = [search.update(1000 * n, a) for n, a in ((1, 0.5), (2, 0.6), (3, 0.605), (4, 0.7))]
    assert factors == [1.0, 1.0, 0.5, 0.5]
    assert search.update(5000, 0.7) == 0.25
    profile = LearningRateProfile(json.loads(json.dumps(search.points)))
    assert [profile.factor(n) for n in (0, 3000, 5000, 10**6)] == [1.0, 0.5, 0.25, 0.25]
    assert profile.factor(4000) == pytest.approx(0.125**0.5)  # Gradually.
    for points in ([], [(5, 1.0), (5, 0.5)], [(0, 1.0), (5, 0.0)]):
        with pytest.raises(ValueError, match="expected rising numbers of samples"):
            LearningRateProfile(points)
