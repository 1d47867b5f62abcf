"""A model that waits instead of computing."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from benchmarks.models.torch import build
from benchmarks.models.torch.paced import Paced


def test_every_parameter_gets_the_same_gradient_in_each_step_the_last_layer_first() -> None:
    model = Paced(build("lenet"), classes=10, seconds=0.01)
    came: list[int] = []
    for number, parameter in enumerate(model.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda _, number=number: came.append(number))
    steps = []
    for _ in range(2):
        model.zero_grad()
        classes = model(torch.zeros(4, 1, 28, 28))
        assert classes.shape == (4, 10)
        F.cross_entropy(classes, torch.arange(4)).backward()
        steps.append([parameter.grad for parameter in model.parameters()])
    assert came == 2 * sorted(came[: len(steps[0])], reverse=True)
    for first, second in zip(*steps, strict=True):
        assert first.abs().max() > 0 and torch.equal(first, second)
        assert first.data_ptr() != second.data_ptr()
