"""``model.fit`` on two ranks with every codec and with none."""

from __future__ import annotations

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest

import hvd_compress.keras as hvdc
from hvd_compress.codecs import CODECS
from tests.keras.probes import (
    BATCH,
    CLASSES,
    SAMPLES,
    THRESHOLD,
    compiled,
    fit,
    same_everywhere,
)
from tests.ranks import on_ranks
from tests.stranger import installed

UPDATES = 2 * SAMPLES // BATCH
"""The number of updates in two epochs."""


def _trained(compression: object, optimizer: keras.optimizers.Optimizer, **options: object) -> list:
    model = compiled(hvdc.DistributedOptimizer(optimizer, compression), **options)
    losses = fit(model, [hvdc.BroadcastVariables()])
    assert same_everywhere([*model.weights, *optimizer.variables])
    assert losses[-1] < 0.95 * losses[0]
    return [v.numpy() for v in model.trainable_variables]


@on_ranks(2, launcher="tensorflow")
def test_every_codec_and_none() -> None:
    for name in CODECS:
        compressor = hvdc.Compressor(name, threshold=THRESHOLD)
        _trained(compressor, keras.optimizers.SGD(0.2, momentum=0.9))
        assert compressor.counters.steps == UPDATES
    plain = _trained(None, keras.optimizers.SGD(0.2, momentum=0.9))
    counted = _trained(hvdc.NoCompression(), keras.optimizers.SGD(0.2, momentum=0.9))
    assert all(map(np.array_equal, plain, counted))


@on_ranks(2, launcher="tensorflow")
def test_the_codec_of_an_installed_package_works_by_name() -> None:
    with installed(), pytest.warns(UserWarning, match="has no kernel for TensorFlow"):
        compressor = hvdc.Compressor("twobit", threshold=THRESHOLD)
        _trained(compressor, keras.optimizers.SGD(0.2, momentum=0.9))
        _trained("twobit", keras.optimizers.SGD(0.2, momentum=0.9))
        counters = compressor.counters
        assert counters.steps == UPDATES
        assert counters.message_bytes < 0.2 * counters.uncompressed_bytes


@on_ranks(2, launcher="tensorflow")
def test_graph_eager_and_several_steps_an_execution_are_the_same() -> None:
    ways: list[dict[str, object]] = [{}, {"run_eagerly": True}, {"steps_per_execution": 2}]
    results = [
        _trained(hvdc.OneBit(threshold=THRESHOLD), keras.optimizers.Adam(0.01), **way)
        for way in ways
    ]
    for result in results[1:]:
        assert all(map(np.array_equal, result, results[0]))


@on_ranks(2, launcher="tensorflow")
def test_a_compressor_that_chooses_by_itself() -> None:
    """The compressor plans in the first update of a compiled fit with several steps in an execution."""
    compressor = hvdc.Auto(threshold=THRESHOLD)
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    model = compiled(hvdc.DistributedOptimizer(optimizer, compressor), steps_per_execution=2)
    assert not compressor.settled
    losses = fit(model, [hvdc.BroadcastVariables(), hvdc.CompareWeights(UPDATES)])
    assert compressor.counters.steps == UPDATES
    assert compressor.settled and "decided: " in compressor.explain()
    explained = hvd.allgather_object(compressor.explain(), name="explained")
    assert explained == [compressor.explain()] * 2
    assert same_everywhere([*model.weights, *optimizer.variables])
    assert losses[-1] < losses[0]


@on_ranks(2, launcher="tensorflow")
def test_accumulated_gradients_are_exchanged_once_an_update() -> None:
    for eagerly in (False, True):
        compressor = hvdc.OneBit(threshold=THRESHOLD)
        optimizer = keras.optimizers.SGD(0.5, gradient_accumulation_steps=4)
        model = compiled(
            hvdc.DistributedOptimizer(optimizer, compressor),
            run_eagerly=eagerly,
        )
        fit(model, [hvdc.BroadcastVariables(), hvdc.CompareWeights(UPDATES)])
        assert compressor.counters.steps == UPDATES // 4
        assert same_everywhere(model.weights)
        assert hvd.size() == 2


@on_ranks(2, launcher="tensorflow")
def test_mixed_precision() -> None:
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    try:
        for name in (None, "onebit"):
            compressor = name and hvdc.Compressor(name, threshold=THRESHOLD)
            optimizer = keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(0.1), initial_scale=2.0**22
            )
            model = compiled(hvdc.DistributedOptimizer(optimizer, compressor))
            losses = fit(model, [hvdc.BroadcastVariables()], epochs=4)
            assert losses[-1] < losses[0]
            assert same_everywhere([*model.weights, *optimizer.variables])
            updates = int(optimizer.iterations)
            assert 0 < updates < 2 * UPDATES  # Some overflowed.
            if compressor:
                assert compressor.counters.steps == updates
        with pytest.raises(hvdc.ExchangeError, match="auto_scale_loss=False"):
            compiled(hvdc.DistributedOptimizer(keras.optimizers.SGD()))
    finally:
        keras.mixed_precision.set_dtype_policy("float32")


@on_ranks(2, launcher="tensorflow")
def test_weights_in_bfloat16() -> None:
    keras.mixed_precision.set_dtype_policy("bfloat16")
    try:
        for compressor in (None, hvdc.OneBit(threshold=THRESHOLD)):
            model = compiled(hvdc.DistributedOptimizer(keras.optimizers.SGD(0.1), compressor))
            assert model.trainable_variables[0].dtype == "bfloat16"
            fit(model, [hvdc.BroadcastVariables(), hvdc.CompareWeights(UPDATES)])
    finally:
        keras.mixed_precision.set_dtype_policy("float32")


@on_ranks(2, launcher="tensorflow")
def test_several_optimizers() -> None:
    first, second = (
        hvdc.DistributedOptimizer(make(0.01), hvdc.OneBit(threshold=THRESHOLD))
        for make in (keras.optimizers.Adam, keras.optimizers.SGD)
    )
    optimizers = keras.optimizers.OptimizerMap(first, {".*/bias": second})
    model = compiled(keras.optimizers.MultiOptimizer(optimizers))
    fit(model, [hvdc.BroadcastVariables(), hvdc.CompareWeights(UPDATES)])
    assert first.compression.counters.steps == second.compression.counters.steps == UPDATES


@on_ranks(2, launcher="tensorflow")
def test_callbacks_that_change_the_learning_rate() -> None:
    optimizer = keras.optimizers.SGD(1.0)
    model = compiled(hvdc.DistributedOptimizer(optimizer, hvdc.OneBit(threshold=THRESHOLD)))
    fit(
        model,
        [
            hvdc.BroadcastVariables(),
            keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (1 + epoch)),
        ],
    )
    assert float(optimizer.learning_rate) == pytest.approx(0.05)
    assert same_everywhere(model.weights)


@on_ranks(2, launcher="tensorflow")
def test_weights_that_differ_are_noticed() -> None:
    for optimizer, first in (
        (keras.optimizers.SGD(0.1), hvdc.BroadcastVariables()),  # Nothing is exchanged.
        (hvdc.DistributedOptimizer(keras.optimizers.SGD(0.1)), None),  # Nothing was broadcast.
    ):
        model = compiled(optimizer)
        name = model.trainable_variables[0].path
        with pytest.raises(
            hvdc.ExchangeError, match=rf"{name} differs: \w+ on rank 0, \w+ on rank 1"
        ):
            fit(model, [*([first] if first else []), hvdc.CompareWeights(steps=1)])


@on_ranks(2, launcher="tensorflow")
def test_a_model_that_its_first_batch_builds_is_broadcast_after_it() -> None:
    keras.utils.set_random_seed(1 + hvd.rank())
    model = keras.Sequential([keras.layers.Dense(CLASSES)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = hvdc.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    model.compile(optimizer, loss)
    assert not model.built
    fit(model, [hvdc.BroadcastVariables(root_rank=1), hvdc.CompareWeights()])
    assert same_everywhere([*model.weights, *optimizer.variables])
