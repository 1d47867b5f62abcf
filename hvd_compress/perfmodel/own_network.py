"""The networks of predictions: named ones, and users' own."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvd_compress.codecs.base import Shape
from hvd_compress.perfmodel.networks import NETWORKS, Layer, Network


def network_of(text: str) -> Network:
    """A network from a name, a file of shapes, or a function.

    A layer of a user's network is assumed to have one multiply-add per parameter, like a linear layer: this
    affects only the distribution of the measured time over the layers.

    Args:
        text: a name in :data:`NETWORKS`; a JSON file, ``{"fc.weight": [10, 20], ...}``, in the order of the
            forward pass; or ``module:function``, a function that returns such a mapping, or a model with
            ``named_parameters()``.

    Raises:
        ValueError: there is no such file, module or function, or it does not contain or return shapes.
    """
    if text in NETWORKS:
        return NETWORKS[text]()
    if ":" in text:
        return _network(text.replace(":", "."), _called(text))
    path = Path(text)
    if path.suffix != ".json":
        raise ValueError(
            f"--model: expected one of {', '.join(NETWORKS)}, a .json file or module:function, got {text!r}"
        )
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
    layers: dict[str, list[Shape]] = {}
    for key, shape in described.items():
        if not all(isinstance(extent, int) and extent > 0 for extent in shape):
            raise ValueError(f"--model: {key}: expected a shape such as [10, 20], got {shape!r}")
        layers.setdefault(key.rpartition(".")[0] or key, []).append(tuple(shape))
    return Network(
        name,
        tuple(
            Layer(layer, tuple(shapes), sum(map(math.prod, shapes)))
            for layer, shapes in layers.items()
        ),
    )
