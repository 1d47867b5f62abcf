"""The compressor that chooses by itself: alike on every rank, and no gradient lost by a change."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

import hvd_compress.tensorflow as hvdc
from hvd_compress.codecs import OneBit
from hvd_compress.exchange.routing import DENSE
from hvd_compress.planner.planner import Need
from tests.planner.budgets import unlimited
from tests.ranks import on_ranks
from tests.tensorflow.auto_probes import (
    EXACT,
    Course,
    every_change_of_way_keeps_every_gradient,
    everywhere,
    start,
)
from tests.tensorflow.probes import (
    SHAPES,
    THRESHOLD,
    assert_same,
    exchange_with,
    kept_by,
    targets,
)


@on_ranks(2, launcher="tensorflow")
def test_changes_of_way_in_a_graph() -> None:
    every_change_of_way_keeps_every_gradient(ways=5)


@on_ranks(2, launcher="tensorflow")
def test_changes_of_way_eagerly() -> None:
    every_change_of_way_keeps_every_gradient(ways=5, graph=False)


@on_ranks(2, launcher="tensorflow")
def test_each_way_is_that_of_a_fixed_choice() -> None:
    """Bit for bit; the first plan is the one that sends the fewest bytes."""
    ways: list[tuple[str, str, dict[str, Any]]] = [
        ("onebit", "allgather", {"groups": 2}),
        ("int8", "two_shot", {"op": hvd.Sum}),
        ("ternary", "integer_sum", {"gradient_predivide_factor": 2.0}),
        ("fp16", "allgather", {}),
    ]
    for codec, exchange, tape in ways:
        fixed = hvdc.Compression.by_name(codec, threshold=THRESHOLD, exchange=exchange, seed=3)
        compressor = start(codecs=(codec,), exchanges=(exchange,), seed=3)
        planned, expected = (exchange_with(c, graph=True, **tape) for c in (compressor, fixed))
        for step in range(2):  # After the second, a slow probe may be enough to try another plan.
            gradients = targets(hvd.rank(), step)
            got = planned(gradients)
            assert step or compressor.slots[0].route.codec.name == codec
            assert_same(got, expected(gradients))
        for one, other in zip(kept_by(fixed), _kept_by_fixed(compressor), strict=True):
            assert np.array_equal(one, other)
        assert not compressor.settled
        spent, plain = compressor.counters, fixed.counters
        assert spent.encoded_elements == plain.encoded_elements
        assert spent.uncompressed_bytes == plain.uncompressed_bytes
        assert spent.message_bytes > plain.message_bytes  # It has measured the links, too.


def _kept_by_fixed(compressor: hvdc.Auto) -> list[np.ndarray]:
    assert not any(slot.kept[-1].shape[0] for slot in compressor.slots)
    return kept_by(compressor)


@on_ranks(2, launcher="tensorflow")
def test_ranks_agree_on_every_plan() -> None:
    with unlimited():
        _ranks_agree_on_every_plan()


def _ranks_agree_on_every_plan() -> None:
    compressor = start(codecs=EXACT)
    assert "nothing is known yet" in compressor.explain() and not compressor.settled
    course, plans, needs = Course(compressor), [], []
    course.step()
    planner = compressor._planner
    assert planner is not None
    ask = planner.need
    planner.need = lambda: needs.append(ask()) or needs[-1]  # type: ignore[method-assign]
    course.until_planned(lambda: plans.append(str(compressor.routes())))
    assert everywhere(plans) == [plans] * 2
    assert len(set(plans)) > 1, "several plans were tried"
    text = compressor.explain()
    assert everywhere(text) == [text] * 2
    assert "decided" in text and "none" in text and "onebit" in text
    assert all(f"gradient.{position} " in text for position in (0, 2, 3))
    assert needs[0] is Need.ALL and needs[-1] is Need.SECONDS
    assert f"step {course.steps}, plan 1" in text
    # From now on, Python is rarely asked, and explanations still tell which step it is.
    asked = len(needs)
    for _ in range(30):
        course.step()
    assert len(needs) == asked and f"step {course.steps}, " in compressor.explain()
    course.step()
    course.step()
    assert len(needs) == asked + 1 and needs[-1] is Need.LINK
    course.assert_nothing_is_lost()


@on_ranks(2, launcher="tensorflow")
def test_a_plan_is_saved_and_gone_on_with() -> None:
    compressor = start(codecs=EXACT)
    course = Course(compressor)
    course.until_planned()
    onebit = compressor.slots[0].tensor.choices[1]
    plan = tuple(onebit if len(slot.tensor.choices) > 1 else DENSE for slot in compressor.slots)
    compressor._planner.plan = plan  # Whatever was decided.
    compressor._apply(plan)
    course.step()
    with tempfile.TemporaryDirectory() as folder:
        path = tf.train.Checkpoint(compressor=compressor).write(os.path.join(folder, "state"))
        later, narrower, fixed = start(codecs=EXACT), start(codecs=("ternary",)), hvdc.OneBit()
        for one in (later, narrower):
            tf.train.Checkpoint(compressor=one).read(path)
        with pytest.raises(ValueError, match="exchange allgather, got auto"):
            tf.train.Checkpoint(compressor=fixed).read(path)
        again = exchange_with(later, graph=True)
        for step in range(2):
            gradients = targets(hvd.rank(), 100 + step)
            assert_same(again(gradients), course._exchange(gradients))
            assert later.settled and later.routes() == compressor.routes()
        assert "goes on with the plan" in later.explain()
        exchange_with(narrower, graph=True)(targets(hvd.rank(), 0))
        assert not narrower.settled
        for route in narrower.routes().values():
            assert route.dense or route.codec.name == "ternary"
        # In a compressor that has made steps of its own, too.
        tf.train.Checkpoint(compressor=compressor).read(path).assert_consumed()
        assert compressor.settled and "goes on with the plan" in compressor.explain()


@on_ranks(2, launcher="tensorflow")
def test_another_number_of_ranks_inherits_from_all_ways() -> None:
    """The mass that some gradients' owners hold, and others' ranks."""
    compressor = start(codecs=("onebit",), exchanges=("allgather", "two_shot"))
    course = Course(compressor)
    course.step()
    first, second = compressor.slots[0].tensor.choices[1:]
    for _ in range(2):
        compressor._apply((second, DENSE, first, second))
        course.step()
    assert np.abs(compressor.slots[0].owned).max() > 0.1
    folder = everywhere(tempfile.mkdtemp())[0]
    path = os.path.join(folder, f"state-{hvd.rank()}")
    tf.train.Checkpoint(compressor=compressor).write(path)
    paths = everywhere(path)
    heir = Course(start(codecs=("onebit",)))
    heir.compressor.load_resized(paths)
    heir.steps, heir.due, heir.sent = course.steps, course.due, course.sent
    heir.step()
    assert not heir.compressor.settled
    heir.assert_nothing_is_lost()
    # Without a choice it goes with the first gradient.
    alone = Course(start(threshold=10**6))
    alone.compressor.load_resized(paths)
    alone.due, alone.sent = [[np.zeros(shape) for shape in SHAPES] for _ in range(2)]
    got = alone.step(scale=0.0)
    assert np.abs(got[0]).max() > 0.1 and alone.compressor.residual_norm() == 0


@on_ranks(2, launcher="tensorflow")
def test_a_dropped_step_keeps_what_was_to_be_sent() -> None:
    """A gradient goes as it is, with what was left unsent, and another one has an Inf."""
    compressor = start(codecs=("onebit",), exchanges=("allgather", "two_shot"))
    course = Course(compressor)
    course.step()
    first, second = compressor.slots[0].tensor.choices[1:]
    compressor._apply((second, DENSE, second, first))
    course.step()
    before = kept_by(compressor)
    for bad, plan in ((2, (DENSE, DENSE, second, first)), (0, (first, DENSE, DENSE, DENSE))):
        compressor._apply(plan)
        gradients = targets(hvd.rank(), course.steps)
        if hvd.rank() == 1:
            gradients[bad].reshape(-1)[5] = np.inf
        course._exchange(gradients)
        for one, other in zip(kept_by(compressor), before, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)
    course.assert_nothing_is_lost()


@on_ranks(2, launcher="tensorflow")
def test_nothing_is_measured_while_warming_up() -> None:
    compressor = start(warmup_steps=3)
    course = Course(compressor)
    for step in range(6):
        course.step()
        planner = compressor._planner
        assert planner is not None
        compressor.explain()  # Counts steps.
        assert planner.step == max(0, step - 2)
        assert (compressor.counters.encoded_elements == 0) == (step < 3)


@on_ranks(2, launcher="tensorflow")
def test_gradients_of_other_kinds() -> None:
    """Half precision is planned; float64 and unknown shapes go as they are."""
    compressor = start(codecs=("onebit", "fp16"))
    kinds = [
        (tf.float16, [40, 70]),
        (tf.bfloat16, [40, 70]),
        (tf.float64, [3000]),
        (tf.float32, None),
    ]
    variables = [
        tf.Variable(tf.zeros(shape or [3000], dtype), shape=tf.TensorShape(shape))
        for dtype, shape in kinds
    ]

    @tf.function
    def step(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            parts = [tf.reduce_sum(v * g) for v, g in zip(variables, gradients, strict=True)]
            loss = tf.add_n([tf.cast(part, tf.float64) for part in parts])
        tape = hvd.DistributedGradientTape(tape, compression=compressor)
        return tape.gradient(loss, variables)

    for number in range(3):
        value = float(1 + hvd.rank() + number)
        got = step([tf.cast(tf.fill(shape or [3000], value), dtype) for dtype, shape in kinds])
        assert [one.dtype for one in got] == [dtype for dtype, _ in kinds]
        for one in got:  # Gradients of one number are what 1-bit codes send without error.
            np.testing.assert_array_equal(tf.cast(one, tf.float32), 1.5 + number)
    assert [len(slot.tensor.choices) for slot in compressor.slots] == [3, 3, 1, 1]


@on_ranks(2, launcher="tensorflow")
def test_without_a_choice() -> None:
    compressor = start(exclude=["gradient.*"])
    course = Course(compressor)
    course.step()
    assert compressor.settled and "no tensor is large enough" in compressor.explain()
    course.assert_nothing_is_lost()


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
    compressor = hvdc.Compression.by_name("auto", codecs=(OneBit(),), threshold=THRESHOLD)
    assert isinstance(compressor, hvdc.Auto) and compressor.settled
    gradients = targets(0, 0)
    assert_same(exchange_with(compressor, graph=True)(gradients), gradients)
    assert "there is one rank" in compressor.explain()


@on_ranks(2, launcher="tensorflow", alone=True)  # Horovod 0.28.1's second join() does not wait.
def test_a_rank_that_joins() -> None:
    """The other goes on uncompressed, and plans nothing; what has not been sent waits."""
    compressor = start(codecs=("onebit",), exchanges=("allgather",))
    course = Course(compressor)
    for _ in range(
        2
    ):  # In the third, a slow probe may have had another plan tried, without a codec.
        course.step()
    steps = compressor._planner.step
    left = compressor.residual_norm()
    assert left > 0
    if hvd.rank() == 0:
        for step in range(5):
            gradients = targets(0, step)
            got = course._exchange(gradients)
            for one, gradient in zip(got, gradients, strict=True):
                np.testing.assert_allclose(one, gradient / 2, atol=1e-5)
    hvd.join()
    compressor.explain()
    assert compressor._planner.step == steps and compressor.residual_norm() == left
    # Ranks that have come back agree again: steps without some of them were not counted.
    course.step()
    course.assert_nothing_is_lost()
