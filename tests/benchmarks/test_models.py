"""Models are the papers' models: their sizes, their layers' names, what they take and give."""

import pytest
import torch

from benchmarks.models import MODELS
from benchmarks.models.torch import build


@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_layer_names(name):
    with torch.device("meta"):
        parameters = dict(build(name).named_parameters())

    assert sum(p.numel() for p in parameters.values()) == MODELS[name].parameters
    last = [n for n in parameters if n.startswith(MODELS[name].last_layer.removesuffix("*"))]
    assert last == list(parameters)[-2:]
    assert parameters[last[-1]].numel() == MODELS[name].classes


@pytest.mark.parametrize("name", MODELS)
def test_images_become_logits(name):
    height, width, channels = MODELS[name].image

    logits = build(name, classes=7)(torch.zeros(2, channels, height, width))

    assert logits.shape == (2, 7)
