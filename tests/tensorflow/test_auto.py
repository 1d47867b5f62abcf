"""The compressor that chooses by itself: alike on every rank, and then as fixed choices do."""

from __future__ import annotations

import os
import tempfile
from typing import Any
from unittest import mock

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

import hvd_compress.tensorflow as hvdc
from hvd_compress.codecs import OneBit
from hvd_compress.exchanges.routing import UNCOMPRESSED_ROUTE
from hvd_compress.tensorflow import collectives
from tests.ranks import on_ranks
from tests.tensorflow.auto_probes import EXACT, Course, by, deciding, everywhere, start, variables
from tests.tensorflow.probes import SHAPES, THRESHOLD, assert_same, exchange_with, kept_by, targets


@on_ranks(2, launcher="tensorflow")
def test_each_plan_is_that_of_a_fixed_choice() -> None:
    """Bit for bit."""
    plans: list[tuple[str, str, dict[str, Any]]] = [
        ("onebit", "allgather", {"groups": 2}),
        ("int8", "two_shot", {"op": hvd.Sum}),
        ("ternary", "allgather", {"gradient_predivide_factor": 2.0}),
        ("fp16", "allgather", {}),
    ]
    for codec, exchange, tape in plans:
        fixed = hvdc.Compressor(codec, threshold=THRESHOLD, exchange=exchange, seed=3)
        route = by(codec, exchange)
        with deciding(lambda routes, route=route: [route(routes)] * len(SHAPES)):  # type: ignore[misc]
            compressor = start(codecs=(codec,), exchanges=(exchange,), seed=3)
        assert compressor.settled
        planned, expected = (exchange_with(c, graph=True, **tape) for c in (compressor, fixed))
        for step in range(3):
            gradients = targets(hvd.rank(), step)
            assert_same(planned(gradients), expected(gradients))
        assert_same(kept_by(fixed), kept_by(compressor))
        assert compressor.routes() == fixed.routes()
        spent, plain = compressor.counters, fixed.counters
        assert spent.encoded_elements == plain.encoded_elements
        assert spent.uncompressed_bytes == plain.uncompressed_bytes
        assert spent.message_bytes > plain.message_bytes  # It has measured the links, too.


def _mixed() -> hvdc.Auto:
    """Each gradient in a way of its own; the second one stays below the threshold."""
    first, second, third = by("onebit", "two_shot"), by("int8", "two_shot"), by("onebit")
    with deciding(
        lambda routes: [first(routes), UNCOMPRESSED_ROUTE, second(routes), third(routes)]
    ):
        return start(codecs=EXACT)


@on_ranks(2, launcher="tensorflow")
def test_the_variables_of_a_keras_model() -> None:
    """Variables of Keras 3, which are not TensorFlow's, tell as much as the tape's sources do."""
    import keras

    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(100), keras.layers.Dense(10)])
    own = model.trainable_variables
    assert not any(isinstance(variable, tf.Variable) for variable in own)
    with deciding(lambda routes: [by("onebit")(routes), *[UNCOMPRESSED_ROUTE] * 3]):
        compressor = hvdc.Auto(own, codecs=("onebit",), exchanges=("allgather",), threshold=1024)
    assert compressor.settled
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(tf.ones((2, 64))) ** 2)
    tape = hvd.DistributedGradientTape(tape, compression=compressor)
    gradients = tape.gradient(loss, [variable.value for variable in own])
    assert [tuple(one.shape) for one in gradients] == [tuple(one.shape) for one in own]
    sent = [route.uncompressed for route in compressor.routes().values()]
    assert sent == [False, True, True, True]


@on_ranks(2, launcher="tensorflow")
def test_gradients_in_ways_of_their_own() -> None:
    """Each as in a compressor that sends all of them so; nothing is lost when a step is dropped."""
    compressor = _mixed()
    fixed = [
        hvdc.OneBit(threshold=THRESHOLD, exchange="two_shot"),
        hvdc.OneBit(threshold=THRESHOLD),
        hvdc.Compressor(EXACT[1], threshold=THRESHOLD, exchange="two_shot"),
        hvdc.OneBit(threshold=THRESHOLD),
    ]
    mixed, courses = Course(compressor), [Course(one) for one in fixed]
    for _ in range(3):
        got = mixed.step()
        for index, course in enumerate(courses):
            expected = course.step()[index]
            assert index == 1 or np.array_equal(got[index], expected), index
    before = kept_by(compressor)
    for bad in (0, 2, 3):
        gradients = targets(hvd.rank(), 10 + bad)
        if hvd.rank() == 1:
            gradients[bad].reshape(-1)[5] = np.inf
        mixed.exchange(gradients)
        for one, other in zip(kept_by(compressor), before, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)


@on_ranks(2, launcher="tensorflow")
def test_ranks_agree_on_the_plan() -> None:
    unplanned = hvdc.Auto(codecs=EXACT, threshold=THRESHOLD)
    assert "nothing is known yet" in unplanned.explain() and not unplanned.settled
    with pytest.raises(Exception, match=r"pass the tape's sources, Auto\(model.trainable_variab"):
        exchange_with(unplanned, graph=True)(targets(hvd.rank(), 0))
    compressor = start(codecs=EXACT)
    text = compressor.explain()
    assert compressor.settled and everywhere(text) == [text] * 2
    assert "decided: " in text and "none" in text and "onebit" in text
    course, sent = Course(compressor), compressor.counters.message_bytes
    assert sent > 0
    for _ in range(4):
        got = course.step()
        assert everywhere([one.tobytes() for one in got])[0] == [one.tobytes() for one in got]
    routes = {name: str(route) for name, route in compressor.routes().items()}
    assert everywhere(routes) == [routes] * 2
    compressor.plan(variables())  # Again: nothing happens.
    assert compressor.explain() == text


@on_ranks(2, launcher="tensorflow")
def test_ranks_that_differ() -> None:
    with pytest.raises(hvdc.ExchangeError, match=r"gradient.3: absent on rank 0"):
        hvdc.Auto(variables()[: 3 + hvd.rank()], threshold=THRESHOLD)
    with pytest.raises(hvdc.ExchangeError, match="seed"):
        start(seed=hvd.rank())
    if hvd.rank() == 0:
        with (
            mock.patch.object(collectives, "TIMEOUT", 1.0),
            pytest.raises(hvdc.ExchangeError, match="expected all 2 ranks to make Auto"),
        ):
            start(name="alone")
    hvd.allreduce(tf.zeros(1), name="rank 0 has given up")
    if hvd.rank() == 1:  # It finds what rank 0 has sent.
        with pytest.raises(hvdc.ExchangeError, match="seed"):
            start(name="alone", seed=1)


@on_ranks(2, launcher="tensorflow")
def test_a_plan_is_saved_and_gone_on_with() -> None:
    compressor = _mixed()
    course = Course(compressor)
    for _ in range(2):
        course.step()
    with tempfile.TemporaryDirectory() as folder:
        path = tf.train.Checkpoint(compressor=compressor).write(os.path.join(folder, "state"))
        # One that has a plan of its own, and one without.
        for later in (start(codecs=EXACT), hvdc.Auto(codecs=EXACT, threshold=THRESHOLD)):
            tf.train.Checkpoint(compressor=later).read(path)
            assert later.settled and "goes on with the plan" in later.explain()
            again = exchange_with(later, graph=True)
            first = [one.copy() for one in kept_by(compressor)]
            for step in range(2):
                gradients = targets(hvd.rank(), 100 + step)
                assert_same(again(gradients), course.exchange(gradients))
            assert later.routes() == compressor.routes()
            assert_same(kept_by(later), kept_by(compressor))
            tf.train.Checkpoint(compressor=compressor).read(path).assert_consumed()
            assert_same(kept_by(compressor), first)
        narrower, fixed = start(codecs=("ternary",)), hvdc.OneBit()
        with pytest.raises(ValueError, match="routes that are allowed now"):
            tf.train.Checkpoint(compressor=narrower).read(path)
        with pytest.raises(ValueError, match="exchange allgather, got auto"):
            tf.train.Checkpoint(compressor=fixed).read(path)
        with deciding(lambda routes: [by("onebit")(routes)] * len(SHAPES)):
            other = start(codecs=EXACT)
        Course(other).step()
        with pytest.raises(ValueError, match="restore before the first step"):
            tf.train.Checkpoint(compressor=other).read(path)


@on_ranks(2, launcher="tensorflow")
def test_another_number_of_ranks_inherits_from_all_ways() -> None:
    """Owners hold the residuals of some gradients, and all ranks those of others."""
    compressor = _mixed()
    course = Course(compressor)
    for _ in range(3):
        course.step()
    assert np.abs(compressor.slots[0].owned).max() > 0.1
    folder = everywhere(tempfile.mkdtemp())[0]
    path = os.path.join(folder, f"state-{hvd.rank()}")
    tf.train.Checkpoint(compressor=compressor).write(path)
    with deciding(lambda routes: [by("onebit")(routes)] * len(SHAPES)):
        heir = Course(start(codecs=("onebit",)))
    heir.compressor.load_resized(everywhere(path))
    heir.steps, heir.due, heir.sent = course.steps, course.due, course.sent
    heir.step()
    for index in (0, 2, 3):
        left = heir.compressor.slots[index].residual.numpy().reshape(SHAPES[index])
        unsent = sum(everywhere(left)) / 2
        np.testing.assert_allclose(heir.sent[index] + unsent, heir.due[index], atol=1e-3)


@on_ranks(2, launcher="tensorflow")
def test_warm_up() -> None:
    with deciding(lambda routes: [by("onebit")(routes)] * len(SHAPES)):
        compressor = start(warmup_steps=3)
    course = Course(compressor)
    for step in range(5):
        course.step()
        assert (compressor.counters.encoded_elements == 0) == (step < 3)


@on_ranks(2, launcher="tensorflow")
def test_gradients_of_other_kinds() -> None:
    """Half precision is planned; float64, unknown shapes and what is excluded go as they are."""
    kinds = [
        (tf.float16, [40, 70]),
        (tf.bfloat16, [40, 70]),
        (tf.float64, [3000]),
        (tf.float32, None),
        (tf.float32, [3000]),
        (tf.float32, [3000]),
    ]
    sources = [
        tf.Variable(tf.zeros(shape or [3000], dtype), shape=tf.TensorShape(shape))
        for dtype, shape in kinds
    ]
    onebit = by("onebit")
    with deciding(
        lambda r: [
            onebit(r),
            onebit(r),
            UNCOMPRESSED_ROUTE,
            UNCOMPRESSED_ROUTE,
            onebit(r),
            UNCOMPRESSED_ROUTE,
        ]
    ):
        compressor = hvdc.Auto(
            sources, codecs=("onebit", "fp16"), threshold=THRESHOLD, exclude=["gradient.5"]
        )

    @tf.function
    def step(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            parts = [tf.reduce_sum(v * g) for v, g in zip(sources, gradients, strict=True)]
            loss = tf.add_n([tf.cast(part, tf.float64) for part in parts])
        tape = hvd.DistributedGradientTape(tape, compression=compressor)
        return tape.gradient(loss, sources)

    for number in range(3):
        value = float(1 + hvd.rank() + number)
        got = step([tf.cast(tf.fill(shape or [3000], value), dtype) for dtype, shape in kinds])
        assert [one.dtype for one in got] == [dtype for dtype, _ in kinds]
        for one in got:  # Gradients of one number are what 1-bit codes send without error.
            np.testing.assert_array_equal(tf.cast(one, tf.float32), 1.5 + number)
    dense = [slot.route.uncompressed for slot in compressor.slots]
    assert dense == [False, False, True, True, False, True]


@on_ranks(2, launcher="tensorflow")
def test_a_gradient_that_is_missing_moves_no_other_ones_plan() -> None:
    with deciding(
        lambda routes: [
            UNCOMPRESSED_ROUTE,
            UNCOMPRESSED_ROUTE,
            by("onebit")(routes),
            UNCOMPRESSED_ROUTE,
        ]
    ):
        compressor = start()
    one, other = tf.Variable(tf.zeros(SHAPES[0])), tf.Variable(tf.zeros(SHAPES[2]))

    @tf.function
    def gradient() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(other * other)
        tape = hvd.DistributedGradientTape(tape, compression=compressor)
        none, got = tape.gradient(loss, [one, other])
        assert none is None
        return got

    assert not gradient().numpy().any()
    assert compressor.slots[0].route.codec.name == "onebit"


@on_ranks(2, launcher="tensorflow")
def test_without_a_choice() -> None:
    compressor = start(exclude=["gradient.*"])
    course = Course(compressor)
    got = course.step()
    assert compressor.settled and "no tensor is large enough" in compressor.explain()
    for one, due in zip(got, course.due, strict=True):
        np.testing.assert_allclose(one, due, atol=1e-6)


@on_ranks(1, launcher="tensorflow")
def test_arguments() -> None:
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TypeError, "expected a sequence of codecs", {"codecs": "onebit"}),
        (ValueError, "expected one of", {"exchanges": ("ring",)}),
        (TypeError, "unexpected keyword", {"layers": {}}),
        (ValueError, "warmup_steps", {"warmup_steps": -1}),
        (ValueError, "threshold", {"threshold": -1}),
    ]
    for error, message, options in wrong:
        with pytest.raises(error, match=message):
            hvdc.Auto(**options)
    compressor = hvdc.Auto(codecs=(OneBit(),), threshold=THRESHOLD)
    assert isinstance(compressor, hvdc.Auto) and compressor.settled
    gradients = targets(0, 0)
    assert_same(exchange_with(compressor, graph=True)(gradients), gradients)
    assert "there is one rank" in compressor.explain()


@on_ranks(2, launcher="tensorflow")
def test_a_rank_that_joins() -> None:
    """The other goes on uncompressed; what has not been sent waits."""
    with deciding(lambda routes: [by("onebit")(routes)] * len(SHAPES)):
        compressor = start(codecs=("onebit",), exchanges=("allgather",))
    course = Course(compressor)
    for _ in range(2):
        course.step()
    left = compressor.residual_norm()
    assert left > 0
    if hvd.rank() == 0:
        for step in range(5):
            gradients = targets(0, step)
            got = course.exchange(gradients)
            for one, gradient in zip(got, gradients, strict=True):
                np.testing.assert_allclose(one, gradient / 2, atol=1e-5)
    hvdc.join()
    assert compressor.residual_norm() == left
