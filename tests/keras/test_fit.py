"""``model.fit`` on two ranks with every codec and with none."""

from __future__ import annotations

import horovod.tensorflow as hvd
import keras
import numpy as np

import hvd_compress.keras as hvdc
from hvd_compress.codecs import SCHEMES
from tests.keras.probes import BATCH, SAMPLES, THRESHOLD, compiled, fit, same_everywhere
from tests.ranks import on_ranks

UPDATES = 2 * SAMPLES // BATCH
"""Of two epochs."""


def _trained(compression: object, optimizer: keras.optimizers.Optimizer, **options: object) -> list:
    model = compiled(hvdc.DistributedOptimizer(optimizer, compression), **options)
    losses = fit(model, [hvdc.BroadcastVariables()])
    assert same_everywhere([*model.weights, *optimizer.variables])
    assert losses[-1] < 0.95 * losses[0]
    return [v.numpy() for v in model.trainable_variables]


@on_ranks(2, launcher="tensorflow")
def test_every_codec_and_none() -> None:
    for name in SCHEMES:
        compressor = hvdc.Compression.by_name(name, threshold=THRESHOLD)
        _trained(compressor, keras.optimizers.SGD(0.2, momentum=0.9))
        assert compressor.counters.steps == UPDATES
    plain = _trained(None, keras.optimizers.SGD(0.2, momentum=0.9))
    counted = _trained(hvdc.NoCompression(), keras.optimizers.SGD(0.2, momentum=0.9))
    assert all(map(np.array_equal, plain, counted))


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
