"""The networks have the parameters that everybody counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.models.torch import build
from benchmarks.predict.layers import network_of
from benchmarks.predict.networks import NETWORKS


@pytest.mark.parametrize(
    ("name", "elements", "giga"),
    (
        ("alexnet", 61_100_840, 0.71),  # torchvision's alexnet
        ("googlenet", 6_998_552, 1.58),  # Caffe's bvlc_googlenet
        ("vgg_a", 132_863_336, 7.61),  # torchvision's vgg11
        ("resnet50", 25_557_032, 4.09),  # torchvision's resnet50
    ),
)
def test_known_totals(name: str, elements: int, giga: float) -> None:
    network = NETWORKS[name]()
    assert network.name == name
    assert network.elements == elements
    assert round(network.multiply_adds / 1e9, 2) == giga


@pytest.mark.parametrize("name", NETWORKS)
def test_these_are_the_networks_that_benchmarks_train(name: str) -> None:
    with torch.device("meta"):
        trained = [tuple(parameter.shape) for parameter in build(name).parameters()]
    assert [
        shape for layer in NETWORKS[name]().layers for shape in layer.shapes.values()
    ] == trained


def test_the_example_of_a_file_has_alexnets_shapes() -> None:
    example = network_of(str(Path(__file__).parent.parent.parent / "docs/examples/alexnet.json"))
    assert [(layer.name, layer.shapes) for layer in example.layers] == [
        (layer.name, layer.shapes) for layer in NETWORKS["alexnet"]().layers
    ]
