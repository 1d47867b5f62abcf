"""Patterns match the paths of a model's variables."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import pytest
import tensorflow as tf

import hvd_compress.keras as hvdc
from tests.keras.probes import CLASSES, FEATURES, fit
from tests.ranks import on_ranks


def _compiled(compressor: hvdc.Compressor, optimizer: Any = None) -> keras.Model:
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(32, activation="relu", name="hid"),
            layers.Dense(CLASSES, name="head"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = optimizer or keras.optimizers.SGD(0.1)
    model.compile(hvdc.DistributedOptimizer(optimizer, compressor), loss)
    return model


@on_ranks(2, launcher="tensorflow")
def test_paths_are_names() -> None:
    compressor = hvdc.OneBit(threshold=20, exclude=["*hid/bias"], layers={"*head/*": "int8"})
    model = _compiled(compressor)
    fit(model, [hvdc.BroadcastVariables(), hvdc.CompareWeights()], epochs=1)
    routes = {path: route.codec.name for path, route in compressor.routes().items()}
    assert list(routes) == [variable.path for variable in model.trainable_variables]
    assert list(routes.values()) == ["onebit", "none", "int8", "none"]


@on_ranks(2, launcher="tensorflow")
def test_a_pattern_that_matches_nothing() -> None:
    for wrong in ({"exclude": ["hidden/*"]}, {"layers": {"hidden/*": "int8"}}):
        model = _compiled(hvdc.OneBit(**wrong))
        with pytest.raises(
            ValueError, match=r"got 'hidden/\*'; the nearest names are .*hid/kernel"
        ):
            fit(model)


@on_ranks(2, launcher="tensorflow")
def test_warnings_of_what_helps_nobody() -> None:
    """Nothing is compressed, also by Auto; OneBit with Adam, and not with SGD."""
    small, suits = "threshold=1000000", "expected OneBit with SGD or momentum, got Adam"
    cases = [
        (hvdc.OneBit(threshold=10**6), "SGD", (1, 0)),
        (hvdc.Auto(threshold=10**6), "SGD", (1, 0)),
        (hvdc.NoCompression(threshold=10**6), "Adam", (0, 0)),
        (hvdc.OneBit(threshold=20), "SGD", (0, 0)),
        (hvdc.OneBit(threshold=20), "Adam", (0, 1)),
        (hvdc.Int8(threshold=20), "Adam", (0, 0)),
    ]
    for compressor, optimizer, times in cases:
        model = _compiled(compressor, getattr(keras.optimizers, optimizer)(0.1))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(model, epochs=1)
        told = [str(one.message) for one in caught]
        assert tuple(sum(text in one for one in told) for text in (small, suits)) == times, told


@on_ranks(2, launcher="tensorflow")
def test_a_compressor_that_is_made_while_a_function_is_traced() -> None:
    message = r"got one within tf\.function: make it outside"
    with pytest.raises(hvdc.ExchangeError, match=message):
        tf.function(hvdc.OneBit, autograph=False)()
    with pytest.raises(Exception, match=message):  # AutoGraph's own, with the code that it was in.
        tf.function(lambda: hvdc.OneBit())()
