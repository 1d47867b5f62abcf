"""A gradient is known by its variable: heads that take turns, and models that share a compressor."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

import hvd_compress.tensorflow as hvdc
from hvd_compress.tensorflow.slots import common_name
from tests.ranks import on_ranks

SHAPE, STEPS = (40, 70), 6


def _variables(*names: str) -> list[tf.Variable]:
    return [tf.Variable(tf.zeros(SHAPE), name=name) for name in names]


def _gradient(name: str, step: int) -> np.ndarray:
    """Head B's gradients are small, so that a residual of head A's in them would show."""
    size = {"trunk": 1.0, "a": 100.0, "b": 1.0}[name]
    numbers = np.random.default_rng([len(name), ord(name[0]), step, hvd.rank()])
    return (size * numbers.standard_normal(SHAPE)).astype(np.float32)


def _exchange(compressor: Any, graph: bool) -> Callable[..., list[tf.Tensor]]:
    def exchange(gradients: list[tf.Tensor], sources: list[tf.Variable]) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            parts = [tf.reduce_sum(v * g) for v, g in zip(sources, gradients, strict=True)]
            loss = tf.add_n(parts)
        tape = hvd.DistributedGradientTape(tape, compression=compressor)
        return tape.gradient(loss, sources)

    if not graph:
        return exchange
    made: dict[Any, Any] = {}

    def run(gradients: list[tf.Tensor], sources: list[tf.Variable]) -> list[tf.Tensor]:
        key = tuple(map(id, sources))
        made.setdefault(key, tf.function(lambda g: exchange(g, sources)))
        return made[key](gradients)

    return run


def _assert_sums(
    compressor: Any, sent: dict[str, np.ndarray], wanted: dict[str, np.ndarray]
) -> None:
    """Fails unless the sent part of each gradient and the ranks' residuals add up to the computed one."""
    for slot in compressor.slots:
        name = slot.variable_name.partition(":")[0]
        unsent = slot.residual.numpy()
        if owned := len(slot.owned.numpy()):  # An owner owes it to the average.
            begin, end = compressor.shared(slot).shards(hvd.size(), slot.index).of(hvd.rank())
            assert end - begin == owned
            unsent[begin:end] += hvd.size() * slot.owned.numpy()
        left = hvd.allreduce(unsent, name=f"left.{slot.index}").numpy().reshape(SHAPE)
        total = hvd.allreduce(tf.constant(wanted[name]), name=f"wanted.{slot.index}").numpy()
        scale = np.abs(total).max()
        np.testing.assert_allclose(sent[name] + left, total, atol=1e-5 * scale, err_msg=name)


@on_ranks(2, launcher="tensorflow")
def test_two_heads_take_turns() -> None:
    for graph in (True, False):
        compressor = hvdc.OneBit(threshold=0)
        trunk, a, b = _variables("trunk", "a", "b")
        exchange = _exchange(compressor, graph)
        sent = {name: np.zeros(SHAPE, np.float32) for name in ("trunk", "a", "b")}
        wanted = {name: np.zeros(SHAPE, np.float32) for name in sent}
        for step in range(STEPS):
            names, sources = (
                (("trunk", "a"), [trunk, a]) if step % 2 == 0 else (("trunk", "b"), [trunk, b])
            )
            gradients = [_gradient(name, step) for name in names]
            results = exchange([tf.constant(g) for g in gradients], sources)
            for name, gradient, result in zip(names, gradients, results, strict=True):
                sent[name] += result.numpy()
                wanted[name] += gradient
        assert [slot.variable_name for slot in compressor.slots] == ["trunk:0", "a:0", "b:0"]
        assert [int(slot.exchanges) for slot in compressor.slots] == [6, 3, 3]
        _assert_sums(compressor, sent, wanted)


@on_ranks(2, launcher="tensorflow")
def test_sources_in_another_order() -> None:
    """Eagerly, too, where TensorFlow has one trace of Horovod's function for both orders."""
    for graph in (True, False):
        compressor = hvdc.OneBit(threshold=0)
        a, b = _variables("a", "b")
        exchange = _exchange(compressor, graph)
        sent = {name: np.zeros(SHAPE, np.float32) for name in ("a", "b")}
        wanted = {name: np.zeros(SHAPE, np.float32) for name in sent}
        for step in range(STEPS):
            both = [("a", a), ("b", b)]
            both = both[::-1] if step % 2 else both
            gradients = [_gradient(name, step) for name, _ in both]
            results = exchange([tf.constant(g) for g in gradients], [v for _, v in both])
            for (name, _), gradient, result in zip(both, gradients, results, strict=True):
                sent[name] += result.numpy()
                wanted[name] += gradient
        assert len(compressor.slots) == 2
        _assert_sums(compressor, sent, wanted)


@on_ranks(2, launcher="tensorflow")
def test_one_persistent_tape_of_two_models() -> None:
    compressor = hvdc.OneBit(threshold=0, exchange="two_shot")
    a, b = _variables("a", "b")
    sent = {name: np.zeros(SHAPE, np.float32) for name in ("a", "b")}
    wanted = {name: np.zeros(SHAPE, np.float32) for name in sent}
    for step in range(STEPS):
        one, other = (_gradient(name, step) for name in ("a", "b"))
        with tf.GradientTape(persistent=True) as tape:
            first, second = tf.reduce_sum(a * one), tf.reduce_sum(b * other)
        tape = hvd.DistributedGradientTape(tape, compression=compressor)
        sent["a"] += tape.gradient(first, [a])[0].numpy()
        sent["b"] += tape.gradient(second, [b])[0].numpy()
        wanted["a"] += one
        wanted["b"] += other
    _assert_sums(compressor, sent, wanted)


def _heads_of_one_shape() -> None:
    """Both heads, or one of them: TensorFlow has one eager trace for each number of heads."""
    for exchange in ("allgather", "two_shot", "auto"):
        compressor = hvdc.OneBit(threshold=0, exchange=exchange)
        heads = dict(zip("ab", _variables("a", "b"), strict=True))
        run = _exchange(compressor, graph=False)
        sent = {name: np.zeros(SHAPE, np.float32) for name in heads}
        wanted = {name: np.zeros(SHAPE, np.float32) for name in heads}
        for step, names in enumerate(("ab", "a", "b", "ab", "ba", "b")):
            gradients = [_gradient(name, step) for name in names]
            results = run(list(map(tf.constant, gradients)), [heads[name] for name in names])
            for name, gradient, result in zip(names, gradients, results, strict=True):
                sent[name] += result.numpy()
                wanted[name] += gradient
        assert [int(slot.exchanges) for slot in compressor.slots] == [4, 5]
        _assert_sums(compressor, sent, wanted)


@on_ranks(2, launcher="tensorflow")
def test_heads_of_one_shape_on_two_ranks() -> None:
    _heads_of_one_shape()


@on_ranks(3, launcher="tensorflow")
def test_heads_of_one_shape_on_three_ranks() -> None:
    _heads_of_one_shape()


_Step = Callable[[list[tf.Tensor]], list[tf.Tensor]]
"""A step of an outer graph: exchanges gradients of the trunk, and returns their averages."""


def _first_call_makes_the_variable(reduce: Callable[..., tf.Tensor]) -> _Step:
    """TensorFlow traces the inner function twice."""
    made: list[tf.Variable] = []

    @tf.function
    def inner(gradient: tf.Tensor) -> tf.Tensor:
        if not made:
            made.append(tf.Variable(tf.zeros(SHAPE), name="trunk"))
        return reduce(made[0], gradient)

    return tf.function(lambda gradients: [inner(gradient) for gradient in gradients])


def _rest_of_the_samples(reduce: Callable[..., tf.Tensor]) -> _Step:
    """The inner function is traced for a whole batch, and for the rest of the samples."""
    [trunk] = _variables("trunk")

    @tf.function
    def inner(batch: tf.Tensor) -> tf.Tensor:
        return reduce(trunk, tf.reduce_sum(batch, 0))

    return tf.function(lambda g: [inner(tf.stack([g[0] / 2, g[0] / 2])), inner(tf.stack([g[1]]))])


def _branches(reduce: Callable[..., tf.Tensor]) -> _Step:
    """A tape in each branch."""
    [trunk] = _variables("trunk")

    @tf.function
    def step(first: tf.Tensor, second: tf.Tensor, which: tf.Tensor) -> tf.Tensor:
        return tf.cond(which, lambda: reduce(trunk, first), lambda: reduce(trunk, second))

    return lambda g: [step(*g, tf.constant(True)), step(*g, tf.constant(False))]


def _auxiliary_loss(reduce: Callable[..., tf.Tensor]) -> _Step:
    """Two tapes of one variable in the same graph, the second of which is switched off later."""
    [trunk] = _variables("trunk")

    @tf.function
    def step(first: tf.Tensor, second: tf.Tensor, auxiliary: bool) -> list[tf.Tensor]:
        main = reduce(trunk, first)
        # It depends on the first average.
        return [main, *([reduce(trunk, second + 0 * main)] if auxiliary else [])]

    steps = iter(range(10**6))
    return lambda g: step(*g, next(steps) < STEPS // 2)


@on_ranks(2, launcher="tensorflow")
def test_a_variable_has_one_residual_in_all_graphs() -> None:
    """Patterns find it by one name, too."""
    makers = (_first_call_makes_the_variable, _rest_of_the_samples, _branches, _auxiliary_loss)
    for make in makers:
        for exchange in ("allgather", "two_shot"):
            layers = {"gradient.0": "onebit"}
            compressor = hvdc.Int8(threshold=0, exchange=exchange, layers=layers)

            def reduce(variable: tf.Variable, gradient: tf.Tensor, use: Any = compressor) -> Any:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(variable * gradient)
                tape = hvd.DistributedGradientTape(tape, compression=use)
                return tape.gradient(loss, [variable])[0]

            step = make(reduce)
            sent, wanted = np.zeros(SHAPE, np.float32), np.zeros(SHAPE, np.float32)
            for number in range(STEPS):
                gradients = [_gradient("trunk", 2 * number + i) for i in range(2)]
                averages = step(list(map(tf.constant, gradients)))
                sent += np.sum(averages, axis=0)
                wanted += np.sum(gradients[: len(averages)], axis=0)
            assert [slot.label for slot in compressor.slots] == ["gradient.0"], make.__doc__
            assert compressor.routes()["gradient.0"].codec.name == "onebit"
            _assert_sums(compressor, {"trunk": sent}, {"trunk": wanted})


@on_ranks(2, launcher="tensorflow")
def test_two_tapes_in_a_graph_are_dropped_together() -> None:
    """One after the other moves the same residual, which is put back to that before the first."""
    compressor = hvdc.OneBit(threshold=0)
    [trunk] = _variables("trunk")

    @tf.function
    def step(*gradients: tf.Tensor) -> None:
        for gradient in gradients:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(trunk * gradient)
            tape = hvd.DistributedGradientTape(tape, compression=compressor)
            tape.gradient(loss, [trunk])

    numbers = [tf.constant(_gradient("trunk", i)) for i in range(2)]
    step(*numbers)
    [slot] = compressor.slots
    before = slot.residual.numpy().copy()
    step(*numbers)
    assert not np.array_equal(slot.residual, before)
    compressor.drop_step()
    assert np.array_equal(slot.residual, before)
    for infinite in range(2):
        sent = list(numbers)
        if hvd.rank() == 0:
            sent[infinite] = sent[infinite] * np.inf
        step(*sent)
        assert np.array_equal(slot.residual, before)
    assert compressor.counters.steps == 4 and int(slot.exchanges) == 8


@on_ranks(2, launcher="tensorflow")
def test_one_gradient_of_two_variables() -> None:
    """The gradients of both variables are one tensor."""
    compressor = hvdc.OneBit(threshold=0)
    a, b = _variables("a", "b")

    @tf.function
    def step(gradient: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((a + b) * gradient)
        tape = hvd.DistributedGradientTape(tape, compression=compressor)
        return tape.gradient(loss, [a, b])

    one, other = step(tf.constant(_gradient("a", 0)))
    assert np.array_equal(one, other)
    assert [slot.variable_name for slot in compressor.slots] == ["a:0", "b:0"]


@on_ranks(2, launcher="tensorflow")
def test_what_has_no_variable_is_refused() -> None:
    compressor = hvdc.OneBit(threshold=0)
    ones = tf.ones(SHAPE)
    with pytest.raises(Exception, match=r"expected a gradient from hvd\.DistributedGradientTape"):
        tf.function(lambda: hvd.allreduce(ones, compression=compressor))()

    @tf.function
    def of_a_tensor(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(x * x)
        return hvd.DistributedGradientTape(tape, compression=compressor).gradient(loss, [x])

    with pytest.raises(Exception, match="expected variables as sources of compressed gradients"):
        of_a_tensor(ones)


@on_ranks(2, launcher="tensorflow")
def test_ranks_that_exchange_different_variables() -> None:
    """Variables of the same shape: in the first step, and when all ranks know all of them."""
    ones, own = tf.ones(SHAPE), hvd.rank()
    for graph in (True, False):
        for threshold in (0, 10**6):
            heads = _variables("a", "b")
            exchange = _exchange(hvdc.OneBit(threshold=threshold), graph)
            for head in heads:
                exchange([ones], [head])
            absent = r"\(b:0\): absent on rank 0, number 0 on rank 1"
            with pytest.raises(Exception, match=absent):
                exchange([ones], [heads[own]])
        exchange = _exchange(hvdc.OneBit(threshold=0), graph)
        with pytest.raises(Exception, match=r"\(a:0\), .* on rank 0, .*\(b:0\), .* on rank 1"):
            exchange([ones], [_variables("a", "b")[own]])
        with tf.GradientTape() as tape:
            heads = _variables("same", "same")
            loss = tf.reduce_sum(heads[own] * ones)
        tape = hvd.DistributedGradientTape(tape, compression=hvdc.OneBit(threshold=0))
        with pytest.raises(Exception, match=r"source 0 .* on rank 0, .*source 1 .* on rank 1"):
            tape.gradient(loss, heads)
    exchange = _exchange(hvdc.OneBit(threshold=0), graph=True)
    exchange([ones], _variables(("head/w", "head_1/w")[own]))  # One rank has made another before.


@on_ranks(3, launcher="tensorflow")
def test_different_variables_when_a_rank_has_joined() -> None:
    exchange = _exchange(hvdc.OneBit(threshold=0), graph=True)
    a, b = _variables("a", "b")
    for sources in ([a], [b], [a, b]):
        exchange([tf.ones(SHAPE)] * len(sources), sources)
    if hvd.rank() < 2:
        exchange([tf.ones(SHAPE)] * 2, [a, b])
        message = r"got gradient\.\d \([ab]:0\) on this rank and other"
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):  # See elastic training.
            exchange([tf.ones(SHAPE)], [(a, b)[hvd.rank()]])
    hvdc.join()


@on_ranks(2, launcher="tensorflow")
def test_an_eager_tape_within_a_function() -> None:
    """TensorFlow would run the eager call's trace for whatever variables the function has."""
    compressor = hvdc.OneBit(threshold=0)
    a, b = _variables("a", "b")
    with tf.GradientTape(persistent=True) as tape:
        _ = tf.reduce_sum(a * 2) + tf.reduce_sum(b * 3)
    tape = hvd.DistributedGradientTape(tape, compression=compressor)
    gradients = [tf.ones(SHAPE)]
    tape._allreduce_grads(gradients, [a])
    with pytest.raises(Exception, match=r"expected a tape that is made in the tf\.function"):
        tf.function(lambda: tape._allreduce_grads(gradients, [b]))()


@on_ranks(2, launcher="tensorflow")
def test_a_checkpoint_knows_whose_residuals_it_has() -> None:
    folder = hvd.broadcast_object(tempfile.mkdtemp(), name="folder of sources")
    path = os.path.join(folder, f"state-{hvd.rank()}")
    gradient = [tf.ones(SHAPE)]

    def exchange(compressor: Any, *sources: tf.Variable) -> None:
        run = _exchange(compressor, graph=True)
        for source in sources:
            run(gradient, [source])

    old = hvdc.OneBit(threshold=0)
    exchange(old, *_variables("a", "b"))
    tf.train.Checkpoint(compressor=old).write(path)
    for names, fits in ((("a", "b"), True), (("b", "a"), False)):
        new = hvdc.OneBit(threshold=0)
        tf.train.Checkpoint(compressor=new).read(path)
        if fits:
            exchange(new, *_variables(*names))
            assert [int(slot.exchanges) for slot in new.slots] == [2, 2]
        else:
            with pytest.raises(Exception, match="got that of b:0 as number 0"):
                exchange(new, *_variables(*names))
    alike = hvdc.OneBit(threshold=0)
    exchange(alike, *_variables("same", "same"))
    tf.train.Checkpoint(compressor=alike).write(path)
    with pytest.raises(ValueError, match=r"expected names that tell the variables .* apart"):
        tf.train.Checkpoint(compressor=hvdc.OneBit(threshold=0)).read(path)


@on_ranks(2, launcher="tensorflow")
def test_compressors_that_are_made_for_one_step_each() -> None:
    """The residual of each one would be lost; one that stays, or has no feedback, is no reason to warn."""
    (a,), (b,) = _variables("a"), _variables("b")
    ones = tf.ones(SHAPE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = hvdc.OneBit(threshold=0)
        for _ in range(4):
            _exchange(kept, graph=False)([ones], [b])
            _exchange(hvdc.Int8(threshold=0), graph=False)([ones], [a])
        for _ in range(3):
            _exchange(hvdc.OneBit(threshold=0), graph=False)([ones], [a])
    with pytest.warns(UserWarning, match=r"got a fourth one for a:0 after three .* before the lo"):
        _exchange(hvdc.OneBit(threshold=0), graph=False)([ones], [a])


def test_names_without_the_numbers_of_layers() -> None:
    names = {
        "dense_1/kernel": "dense/kernel",
        "w_1_2:0": "w:0",
        "w_1 again": "w again",
        "a_1b": "a_1b",
    }
    assert [common_name(name) for name in names] == list(names.values())
