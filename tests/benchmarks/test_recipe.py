"""The parts of the papers' recipes: learning rates, optimizers with weight decay, averaged weights."""

from __future__ import annotations

import copy
import dataclasses

import horovod.torch as hvd
import keras
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks import arguments, compressions
from benchmarks.models.torch.average import WeightAverage
from benchmarks.paper_recipes import PAPERS
from benchmarks.settings import Settings
from benchmarks.trainers import tensorflow as of_keras
from benchmarks.trainers.torch import TorchSession, optimizer


def test_polynomial_decay_is_that_of_terngrad() -> None:
    settings = Settings("lenet", lr=0.1, schedule="polynomial", power=0.5)
    rates = [settings.learning_rate(step, 4) for step in range(4)]
    assert rates == pytest.approx([0.1, 0.1 * 0.75**0.5, 0.1 * 0.5**0.5, 0.1 * 0.25**0.5])
    assert Settings("lenet", lr=0.1).learning_rate(2, 4) == pytest.approx(0.05), "cosine, still"


def test_a_staircase_falls_at_steps_and_at_shares() -> None:
    steps = Settings("lenet", lr=0.1, schedule="staircase", drops=(2, 6), drop_factor=0.5)
    shares = dataclasses.replace(steps, drops=(0.25, 0.75))
    for settings in (steps, shares):
        rates = [settings.learning_rate(step, 8) for step in range(8)]
        assert rates == pytest.approx([0.1] * 2 + [0.05] * 4 + [0.025] * 2)


@pytest.mark.parametrize("name", ["sgd", "adam", "rmsprop"])
def test_weight_decay_is_in_the_gradient_in_both_frameworks(name: str) -> None:
    """Through momentum and mean squares, as the papers have it, and not past them."""
    settings = Settings("lenet", optimizer=name, lr=0.05, momentum=0.9, weight_decay=0.3)
    start = np.array([[0.5, -1.0, 2.0]], np.float32)
    gradients = np.random.default_rng(0).standard_normal((6, 1, 3)).astype(np.float32)
    model = nn.Linear(3, 1, bias=False)
    model.weight.data = torch.from_numpy(start.copy())
    theirs = optimizer(model, settings)
    variable = keras.Variable(start)
    ours = of_keras._optimizer(settings)
    ours.build([variable])

    for gradient in gradients:
        model.weight.grad = torch.from_numpy(gradient)
        theirs.step()
        ours.apply([keras.ops.convert_to_tensor(gradient)], [variable])

    np.testing.assert_allclose(np.asarray(variable), model.weight.detach().numpy(), rtol=1e-4)
    assert not np.allclose(np.asarray(variable), start, atol=0.05)


def test_top_five_are_counted_beside_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch and by TensorFlow, of the same logits."""
    monkeypatch.setattr(hvd, "broadcast_parameters", lambda state, root_rank: None)
    logits = np.random.default_rng(0).standard_normal((40, 20)).astype(np.float32)
    labels = np.random.default_rng(1).integers(0, 20, 40)
    places = (-logits).argsort(1).argsort(1)[np.arange(40), labels]
    settings, local = Settings("lenet"), compressions.parse("local", {}, last_layer="")
    ours = TorchSession(nn.Linear(20, 20), settings, local, 0)
    ours._plain = nn.Identity()
    theirs = object.__new__(of_keras.TensorFlowSession)
    theirs._model = lambda x, training: x

    for session in (ours, theirs):
        score = session.evaluate(logits, labels)
        assert (score.right, score.near) == ((places < 1).sum(), (places < 5).sum())
    assert 0 < (places < 1).sum() < (places < 5).sum() < 40


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
        bits = session.evaluate(images, labels).bits
        expected, last = (
            8 * float(F.cross_entropy(one(x), y).detach()) / np.log(2)
            for one in (average.model(), beside)
        )
        assert bits == pytest.approx(expected, rel=1e-5)
        assert bits != pytest.approx(last, rel=1e-2)
        found.append(bits)
    assert found[0] != found[1]


@pytest.mark.parametrize("name", PAPERS)
def test_recipes_of_papers_are_options_that_others_override(name: str) -> None:
    given = ["--json", "x", "--compression", "none", "--recipe", name]

    recipe = arguments.settings(arguments.parse(given))
    changed = arguments.settings(arguments.parse([*given, "--steps", "3"]))

    assert recipe.model == PAPERS[name]["--model"]
    assert recipe.steps == int(PAPERS[name]["--steps"])
    assert changed == dataclasses.replace(recipe, steps=3)
