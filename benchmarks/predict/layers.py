"""A network as the performance model sees it: the shapes and the arithmetic of its layers."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_compress.codecs.base import Shape


@dataclass(frozen=True)
class Layer:
    """One layer with parameters.

    Attributes:
        name: the name of the layer.
        shapes: the shapes of the parameters by their names in the network.
        multiply_adds: the multiply-adds in the forward pass for one image; the backward pass has twice
            this number.
    """

    name: str
    shapes: Mapping[str, Shape]
    multiply_adds: int

    @property
    def elements(self) -> int:
        """The number of elements in the layer's gradients."""
        return sum(map(math.prod, self.shapes.values()))


@dataclass(frozen=True)
class Network:
    """A network's layers, from input to output."""

    name: str
    layers: tuple[Layer, ...]

    @property
    def elements(self) -> int:
        """The number of parameters."""
        return sum(layer.elements for layer in self.layers)

    @property
    def multiply_adds(self) -> int:
        """The multiply-adds in the forward pass for one image."""
        return sum(layer.multiply_adds for layer in self.layers)


def network_of(text: str) -> Network:
    """A network from a file of shapes, or from a function.

    A layer of a user's network is assumed to have one multiply-add per parameter, like a linear layer: this
    affects only the distribution of the measured time over the layers.

    Args:
        text: a JSON file, ``{"fc.weight": [10, 20], ...}``, in the order of the forward pass; or
            ``module:function``, a function that returns such a mapping, or a model with
            ``named_parameters()``.

    Raises:
        ValueError: there is no such file, module or function, or it does not contain or return shapes.
    """
    if ":" in text:
        return _network(text.replace(":", "."), _called(text))
    path = Path(text)
    if path.suffix != ".json":
        raise ValueError(f"--model: expected a .json file or module:function, got {text!r}")
    try:
        described = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--model: expected a file of shapes by parameter's name, in JSON, got {text!r}: {error}"
        ) from None
    return _network(path.stem, described)


def _called(text: str) -> Any:
    name, _, function = text.partition(":")
    sys.path.insert(0, "")  # A module in the folder where the command runs.
    try:
        found = getattr(importlib.import_module(name), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--model: expected module:function, got {text!r}: {error}") from None
    finally:
        sys.path.remove("")
    return found()


def _network(name: str, described: Any) -> Network:
    if hasattr(described, "named_parameters"):
        described = {key: tuple(one.shape) for key, one in described.named_parameters()}
    if not isinstance(described, Mapping) or not described:
        raise ValueError(
            f"--model: expected shapes by parameter's name, or a model with named_parameters(), got "
            f"{type(described).__name__}"
        )
    layers: dict[str, dict[str, Shape]] = {}
    for key, shape in described.items():
        if not all(isinstance(extent, int) and extent > 0 for extent in shape):
            raise ValueError(f"--model: {key}: expected a shape such as [10, 20], got {shape!r}")
        layers.setdefault(key.rpartition(".")[0] or key, {})[key] = tuple(shape)
    made = (
        Layer(layer, shapes, sum(map(math.prod, shapes.values())))
        for layer, shapes in layers.items()
    )
    return Network(name, tuple(made))
