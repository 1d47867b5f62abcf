"""Patterns match the paths of a model's variables."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

import hvd_compress.keras as hvdc
from tests.keras.probes import CLASSES, FEATURES, fit
from tests.ranks import on_ranks


def _compiled(compressor: hvdc.Compressor) -> keras.Model:
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(32, activation="relu", name="hid"),
            layers.Dense(CLASSES, name="head"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(hvdc.DistributedOptimizer(keras.optimizers.SGD(0.1), compressor), loss)
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
def test_a_compressor_that_is_made_while_a_function_is_traced() -> None:
    message = r"got one within tf\.function: make it outside"
    with pytest.raises(hvdc.ExchangeError, match=message):
        tf.function(hvdc.OneBit, autograph=False)()
    with pytest.raises(Exception, match=message):  # AutoGraph's own, with the code that it was in.
        tf.function(lambda: hvdc.OneBit())()
