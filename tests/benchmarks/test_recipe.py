"""The parts of a recipe that TernGrad's experiments have: polynomial decay and averaged weights."""

from __future__ import annotations

import copy

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks import compressions, train
from benchmarks.models.torch.average import WeightAverage
from benchmarks.settings import Settings
from benchmarks.trainers.torch import TorchSession


def test_polynomial_decay_is_that_of_terngrad() -> None:
    settings = Settings("lenet", lr=0.1, schedule="polynomial", power=0.5)
    rates = [settings.learning_rate(step, 4) for step in range(4)]
    assert rates == pytest.approx([0.1, 0.1 * 0.75**0.5, 0.1 * 0.5**0.5, 0.1 * 0.25**0.5])
    assert Settings("lenet", lr=0.1).learning_rate(2, 4) == pytest.approx(0.05), "cosine, still"


def test_averaged_weights_are_what_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hvd, "broadcast_parameters", lambda state, root_rank: None)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5))
    beside = copy.deepcopy(model)
    settings = Settings("lenet", lr=0.5, momentum=0.0, averaging=0.9)
    local = compressions.parse("local", {}, last_layer="")
    session, average = TorchSession(model, settings, local, 0), WeightAverage(beside, 0.9)
    optimizer = torch.optim.SGD(beside.parameters(), lr=0.5)
    rng = np.random.default_rng(0)
    images = rng.standard_normal((8, 3, 4, 1)).astype(np.float32)
    labels = rng.integers(0, 5, 8)
    x, y = torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(labels)
    found = []
    for _ in range(2):
        session.train([(images, labels)] * 3, [0.5] * 3, lambda loss: None)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(beside(x), y).backward()
            optimizer.step()
            average.update()
        _, bits = session.evaluate(images, labels)
        expected, last = (
            8 * float(F.cross_entropy(one(x), y).detach()) / np.log(2)
            for one in (average.model(), beside)
        )
        assert bits == pytest.approx(expected, rel=1e-5)
        assert bits != pytest.approx(last, rel=1e-2)
        found.append(bits)
    assert found[0] != found[1]


@pytest.mark.parametrize("framework", ["keras", "diloco"])
def test_other_frameworks_have_no_averages(
    capsys: pytest.CaptureFixture[str], framework: str
) -> None:
    arguments = ["--model", "lenet", "--json", "x", "--compression", "none", "--averaging", "0.9"]
    with pytest.raises(SystemExit):
        train.main([*arguments, "--framework", framework])
    message = f"--averaging: expected 0 with --framework {framework}, got 0.9"
    assert message in capsys.readouterr().err
