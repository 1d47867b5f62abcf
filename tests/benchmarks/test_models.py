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
    if not MODELS[name].last_layer:  # It is the embedding's.
        return
    last = [n for n in parameters if n.startswith(MODELS[name].last_layer.removesuffix("*"))]
    assert last == list(parameters)[-2:]
    assert parameters[last[-1]].numel() == MODELS[name].classes


def test_gpt2_keeps_its_vocabulary_for_bytes():
    with torch.device("meta"):
        model = build("gpt2", classes=256)

    assert sum(p.numel() for p in model.parameters()) == MODELS["gpt2"].parameters


@pytest.mark.parametrize("name", [name for name in MODELS if MODELS[name].data != "text"])
def test_images_become_logits(name):
    *sides, channels = MODELS[name].input

    with torch.no_grad():
        logits = build(name, classes=7).eval()(torch.zeros(2, channels, *sides))

    assert logits.shape == (2, 7)


@pytest.mark.parametrize(
    ("name", "million"),
    # The ResNets: He et al., table 6. The DNN: Seide et al., section 5. CifarNet: TensorFlow's tutorial.
    [
        *(("resnet20", 0.27), ("resnet32", 0.46), ("resnet44", 0.66), ("resnet56", 0.85)),
        *(("resnet110", 1.7), ("dnn", 46), ("cifarnet", 1.07)),
    ],
)
def test_papers_round_to_these_numbers(name, million):
    decimals = len(str(million).partition(".")[2])
    assert round(MODELS[name].parameters / 1e6, decimals) == million


@pytest.mark.parametrize(
    ("name", "channels"),
    [("alexnet", 1152), ("vgg_a", 2752), ("cifarnet", 128), ("googlenet", 7280)],
)
def test_batch_normalization_takes_the_place_of_biases(name, channels):
    with torch.device("meta"):
        model = build(name, norm="batch")

    count = sum(p.numel() for p in model.parameters())
    assert count == MODELS[name].parameters + channels, "two numbers a channel instead of one"
    kinds = {type(module).__name__ for module in model.modules()}
    assert "BatchNorm2d" in kinds and "LocalResponseNorm" not in kinds


def test_responses_are_normalized_as_in_the_paper():
    model = build("alexnet", norm="lrn")
    x = torch.randn(1, 8, 1, 1)

    got = model.lrn1(x).flatten()

    squares = [(x[0, max(0, i - 2) : i + 3] ** 2).sum() for i in range(8)]
    wanted = x.flatten() / (2 + 1e-4 * torch.stack(squares)) ** 0.75
    assert torch.allclose(got, wanted)
    assert not hasattr(build("alexnet"), "lrn1")


def test_a_token_is_predicted_from_those_before_it():
    model = build("gpt", classes=7)
    tokens = torch.randint(7, (2, 64))
    changed = tokens.clone()
    changed[:, 40] = (changed[:, 40] + 1) % 7

    before, after = model(tokens), model(changed)

    assert before.shape == (2, 64, 7)
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.equal(before[:, 40:], after[:, 40:])
