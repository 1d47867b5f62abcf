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


@pytest.mark.parametrize("name", [name for name in MODELS if MODELS[name].data != "text"])
def test_images_become_logits(name):
    height, width, channels = MODELS[name].input

    logits = build(name, classes=7)(torch.zeros(2, channels, height, width))

    assert logits.shape == (2, 7)


def test_a_token_is_predicted_from_those_before_it():
    model = build("gpt", classes=7)
    tokens = torch.randint(7, (2, 64))
    changed = tokens.clone()
    changed[:, 40] = (changed[:, 40] + 1) % 7

    before, after = model(tokens), model(changed)

    assert before.shape == (2, 64, 7)
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.equal(before[:, 40:], after[:, 40:])
