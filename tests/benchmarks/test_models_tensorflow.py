"""The models in Keras are the same models."""

from __future__ import annotations

import re

import keras
import numpy as np
import pytest

from benchmarks.models import MODELS
from benchmarks.models.tensorflow import build, parameter_name
from benchmarks.models.torch import build as build_torch

BIASES_BEFORE_BATCH_NORM = {"resnet50": 26_560}
"""The biases of ``keras.applications``; no other implementation has them."""


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("gpt2", "gpt_history")])
def test_parameters_layer_names_and_shapes(name: str) -> None:
    model = build(name)
    variables = model.trainable_variables

    spec = MODELS[name]
    count = sum(int(np.prod(variable.shape)) for variable in variables)
    assert count - BIASES_BEFORE_BATCH_NORM.get(name, 0) == spec.parameters
    names = [parameter_name(variable) for variable in variables]
    last = [n for n in names if n.startswith(spec.last_layer.removesuffix("*"))]
    assert last == names[-2:]
    assert model.input_shape == (None, *spec.input)
    places = spec.input if spec.data == "text" else ()
    assert model.output_shape == (None, *places, spec.classes)


@pytest.mark.parametrize("name", ["lenet", "cifarnet", "dnn", "resnet20"])
def test_weights_begin_where_those_of_torch_do(name: str) -> None:
    """By standard deviation, layer by layer; batch normalisation begins with ones and zeros."""
    ours = [np.asarray(v) for v in build(name).trainable_variables]
    theirs = [p.detach().numpy() for p in build_torch(name).parameters()]

    for left, right in zip(ours, theirs, strict=True):
        assert left.size == right.size
        if left.size > 1000:
            assert left.std() == pytest.approx(right.std(), rel=0.15)


@pytest.mark.parametrize(
    ("name", "norm"),
    [("resnet32", None), ("cifarnet", None), ("googlenet", None), ("googlenet", "batch")],
)
def test_models_with_the_weights_of_torch_give_its_logits(name: str, norm: str | None) -> None:
    """Weights are moved to where TensorFlow keeps them."""
    import torch

    theirs, ours = build_torch(name, 10, norm).eval(), build(name, 10, norm)
    variables = sorted(ours.trainable_variables, key=lambda one: _place(parameter_name(one)))
    for variable, parameter in zip(variables, theirs.parameters(), strict=True):
        value = parameter.detach().numpy()
        axes = {4: (2, 3, 1, 0), 2: (1, 0), 1: (0,)}[value.ndim]
        if name == "cifarnet" and len(value.shape) == 2 and len(value) == 384:
            value = value.reshape(384, 64, 36).transpose(0, 2, 1).reshape(384, -1)
        variable.assign(value.transpose(axes))
    images = np.random.default_rng(0).standard_normal((2, *MODELS[name].input), np.float32)

    got = keras.ops.convert_to_numpy(ours(images, training=False))

    with torch.no_grad():
        wanted = theirs(torch.from_numpy(images.transpose(0, 3, 1, 2))).numpy()
    np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-4)
    assert wanted.std() > 0.01


def _place(name: str) -> tuple[int, ...]:
    """Keras sorts by distance from the input, which mixes the branches of an inception."""
    kind = ("conv", "inception", "fc")
    at = [position for position, one in enumerate(kind) if re.match(rf"{one}\d+[._]", name)]
    return (at[0], *map(int, re.findall(r"\d+", name))) if at else ()


def test_the_transformer_with_the_weights_of_torch_gives_its_logits() -> None:
    import torch

    theirs, ours = build_torch("gpt").eval(), build("gpt")
    state = {name: p.detach().numpy() for name, p in theirs.named_parameters()}
    of_torch = {
        "tokens.embeddings": state["tokens.weight"],
        "places.embeddings": state["places.weight"],
        **_norm("norm", state, "norm"),
        **_linear("head", state, "head"),
    }
    for index in range(2):
        block, own = f"blocks.{index}", f"block{index}"
        for part in ("wide", "narrow"):
            of_torch |= _linear(f"{own}_{part}", state, f"{block}.{part}")
        for part in ("norm1", "norm2"):
            of_torch |= _norm(f"{own}_{part}", state, f"{block}.{part}")
        kernels = state[f"{block}.qkv.weight"].T.reshape(128, 3, 4, 32)
        biases = state[f"{block}.qkv.bias"].reshape(3, 4, 32)
        for which, part in enumerate(("query", "key", "value")):
            of_torch[f"{own}_attention.{part}.kernel"] = kernels[:, which]
            of_torch[f"{own}_attention.{part}.bias"] = biases[which]
        out = f"{own}_attention.attention_output"
        of_torch[f"{out}.kernel"] = state[f"{block}.out.weight"].T.reshape(4, 32, 128)
        of_torch[f"{out}.bias"] = state[f"{block}.out.bias"]
    for variable in ours.trainable_variables:
        variable.assign(of_torch.pop(parameter_name(variable)))
    assert not of_torch
    tokens = np.random.default_rng(0).integers(0, 256, (2, 64))

    got = keras.ops.convert_to_numpy(ours(tokens, training=False))

    with torch.no_grad():
        wanted = theirs(torch.from_numpy(tokens)).numpy()
    np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-3)


def _linear(name: str, state: dict[str, np.ndarray], theirs: str) -> dict[str, np.ndarray]:
    return {f"{name}.kernel": state[f"{theirs}.weight"].T, f"{name}.bias": state[f"{theirs}.bias"]}


def _norm(name: str, state: dict[str, np.ndarray], theirs: str) -> dict[str, np.ndarray]:
    return {f"{name}.gamma": state[f"{theirs}.weight"], f"{name}.beta": state[f"{theirs}.bias"]}
