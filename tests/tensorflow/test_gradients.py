"""Gradients of every kind, and programs of every shape."""

from __future__ import annotations

import os
import tempfile
import warnings

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

import hvd_compress.tensorflow as hvdc
from hvd_compress.codecs import ErrorFeedback, OneBit
from tests.ranks import on_ranks
from tests.tensorflow.probes import (
    SHAPES,
    THRESHOLD,
    Simulation,
    exchange_with,
    process_set,
    targets,
)


def _two_valued(shape: tuple[int, ...], rank: int, step: int = 0) -> np.ndarray:
    """Numbers that one bit an element carries exactly."""
    signs = np.random.default_rng(1000 * rank + step).choice([-1.0, 1.0], shape)
    return (signs * (rank + 1)).astype(np.float32)


def _mean(shape: tuple[int, ...], step: int = 0) -> np.ndarray:
    return np.mean([_two_valued(shape, rank, step) for rank in range(hvd.size())], axis=0)


@on_ranks(2, launcher="tensorflow")
def test_sparse_gradients() -> None:
    """An embedding between two dense variables; the ranks look up different numbers of rows."""
    rank, size = hvd.rank(), hvd.size()
    rows = [tf.constant(list(range(3 + r)) * 2) for r in range(size)]
    for sparse_as_dense in (False, True):
        first, table, last = (tf.Variable(tf.zeros(s)) for s in ((40, 70), (300, 8), (3000,)))
        compressor = hvdc.OneBit(threshold=THRESHOLD)

        def gradients(
            compressor: hvdc.Compressor = compressor,
            sources: list[tf.Variable] = [first, table, last],  # noqa: B006
            sparse_as_dense: bool = sparse_as_dense,
        ) -> list:
            a, embedding, b = sources
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(a * _two_valued((40, 70), rank))
                loss += tf.reduce_sum(tf.gather(embedding, rows[rank])) * (rank + 1)
                loss += tf.reduce_sum(b * _two_valued((3000,), rank))
            tape = hvd.DistributedGradientTape(
                tape, compression=compressor, sparse_as_dense=sparse_as_dense
            )
            return tape.gradient(loss, sources)

        got = tf.function(gradients)()
        assert np.array_equal(got[0], _mean((40, 70)))
        assert np.array_equal(got[2], _mean((3000,)))
        assert isinstance(got[1], tf.IndexedSlices) != sparse_as_dense
        expected = np.zeros((300, 8), np.float32)
        for r in range(size):
            expected[: 3 + r] += 2 * (r + 1) / size
        dense = tf.convert_to_tensor(got[1]).numpy()
        if sparse_as_dense:
            # One bit does not carry it exactly; what is missing is kept.
            residual = compressor.slots[1].residual.numpy().reshape(300, 8)
            dense = dense + hvd.allreduce(residual, name="residual").numpy()
        np.testing.assert_allclose(dense, expected, atol=1e-6)
        shapes = [slot.kind for slot in compressor.slots]
        table_too = ["float32 [300, 8]"] if sparse_as_dense else []
        assert shapes == ["float32 [40, 70]", *table_too, "float32 [3000]"]


@on_ranks(2, launcher="tensorflow")
def test_missing_gradients_do_not_count() -> None:
    used, unused, other = (tf.Variable(tf.zeros(s)) for s in ((40, 70), (50, 50), (3000,)))
    compressor = hvdc.OneBit(threshold=THRESHOLD)

    @tf.function
    def gradients() -> list:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(used * _two_valued((40, 70), hvd.rank()))
            loss += tf.reduce_sum(other * _two_valued((3000,), hvd.rank()))
        tape = hvd.DistributedGradientTape(tape, compression=compressor)
        one, none, two = tape.gradient(loss, [used, unused, other])
        assert none is None
        return [one, two]

    for left, shape in zip(gradients(), ((40, 70), (3000,)), strict=True):
        assert np.array_equal(left, _mean(shape))
    assert len(compressor.slots) == 2


def _send(
    compressor: hvdc.Compressor, signature: tf.TensorSpec, name: str = "Variable"
) -> tf.Function:
    """Sends its argument as the gradient of a variable whose static shape is the signature's."""
    dimensions = signature.shape.as_list() if signature.shape.rank is not None else [0]
    initial = tf.zeros([dimension or 0 for dimension in dimensions], signature.dtype)
    variable = tf.Variable(initial, shape=signature.shape, name=name)

    def run(value: tf.Tensor) -> tf.Tensor:
        variable.assign(tf.zeros_like(value))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.cast(variable * value, tf.float32))
        tape = hvd.DistributedGradientTape(tape, compression=compressor)
        return tape.gradient(loss, [variable])[0]

    return tf.function(run, input_signature=[signature])


@on_ranks(2, launcher="tensorflow")
def test_shapes_that_tracing_does_not_know() -> None:
    for shape in ([None, 70], [None, None], None):
        compressor = hvdc.OneBit(threshold=THRESHOLD)
        run = _send(compressor, tf.TensorSpec(shape, tf.float32))
        simulation = Simulation("allgather", OneBit(), ErrorFeedback(), hvd.size())
        for step in range(2):
            everywhere = [targets(rank, step) for rank in range(hvd.size())]
            expected = simulation.sum(everywhere, 0.5)[0]
            assert np.array_equal(run(everywhere[hvd.rank()][0]), expected)
        assert "None" in compressor.slots[0].kind or "unknown" in compressor.slots[0].kind


@on_ranks(3, launcher="tensorflow", environment={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
def test_the_default_exchange_of_shapes_that_tracing_does_not_know() -> None:
    """Ranks can divide other gradients, and only those, also in a checkpoint for another job."""
    compressor = hvdc.OneBit(threshold=0, name="known_and_not")
    signatures = {
        "known": tf.TensorSpec((40, 70), tf.float32),
        "unknown": tf.TensorSpec([None, 70], tf.float32),
    }
    runs = [_send(compressor, signature, name) for name, signature in signatures.items()]
    simulations = [
        Simulation(name, OneBit(), ErrorFeedback(), hvd.size())
        for name in ("two_shot", "allgather")
    ]
    for step in range(2):
        everywhere = [targets(rank, step) for rank in range(hvd.size())]
        got = runs[0](everywhere[hvd.rank()][0])
        assert np.array_equal(got, simulations[0].sum(everywhere, 1 / hvd.size())[0])
        assert np.isfinite(runs[1](everywhere[hvd.rank()][0])).all()
    routes = list(compressor.routes().values())
    assert [route.exchange for route in routes] == ["two_shot", "allgather"]
    assert [route.reason for route in routes] == ["auto, 3 ranks", "auto, 3 ranks, unknown shape"]
    kept = [slot.residual.numpy() for slot in compressor.slots]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "state")
        tf.train.Checkpoint(compressor=compressor).write(path)
        paths = hvd.allgather_object(path, name="paths of checkpoints")
        again = hvdc.OneBit(threshold=0, name="again")
        again.load_resized(paths)
        hvd.allreduce(tf.zeros(1), name="all have read")
    for name, signature in signatures.items():
        sent = _send(again, signature, name)(np.zeros((40, 70), np.float32))
        assert np.isfinite(sent).all()
    assert [slot.residual.numpy().any() for slot in again.slots] == [one.any() for one in kept]


@on_ranks(2, launcher="tensorflow")
def test_an_exchange_that_has_to_know_the_shape() -> None:
    run = _send(hvdc.ECQ(threshold=0, exchange="two_shot"), tf.TensorSpec([None, 70], tf.float32))
    message = r"shape tracing knows .*exchange='two_shot', got float32 \[None, 70\]"
    with pytest.raises(Exception, match=message):
        run.get_concrete_function()


@on_ranks(2, launcher="tensorflow")
def test_empty_gradients() -> None:
    run = _send(hvdc.OneBit(threshold=0), tf.TensorSpec([None, 70], tf.float32))
    for _ in range(2):
        assert run(np.zeros((0, 70), np.float32)).shape == (0, 70)


@on_ranks(2, launcher="tensorflow")
def test_gradients_of_float64_go_as_they_are() -> None:
    for options in ({}, {"exclude": ["*"]}):
        double = _send(hvdc.OneBit(**options), tf.TensorSpec((40, 70), tf.float64))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = double(_two_valued((40, 70), hvd.rank()).astype(np.float64))
        assert any("(float64)" in str(one.message) for one in caught) == (not options)
        assert got.dtype == tf.float64
        assert np.array_equal(got, _mean((40, 70)))


@on_ranks(2, launcher="tensorflow")
def test_two_tapes_in_one_function_and_a_loop() -> None:
    """The variables have one shape, as in a GAN; two calls make four steps."""
    variables = [tf.Variable(tf.zeros(SHAPES[0])) for _ in range(2)]
    shared = hvdc.OneBit(threshold=THRESHOLD)
    own = [hvdc.Ternary(threshold=THRESHOLD), hvdc.OneBit(threshold=THRESHOLD)]
    for compressors in ([shared, shared], own):

        @tf.function
        def steps(values: tf.Tensor, compressors: list[hvdc.Compressor] = compressors) -> tf.Tensor:
            results = tf.TensorArray(tf.float32, size=4)
            for step in tf.range(2):
                for i in range(2):
                    with tf.GradientTape() as tape:
                        loss = tf.reduce_sum(variables[i] * values[2 * step + i])
                    tape = hvd.DistributedGradientTape(tape, compression=compressors[i])
                    results = results.write(
                        2 * step + i, tape.gradient(loss, variables[i : i + 1])[0]
                    )
            return results.stack()

        def of(rank: int, call: int) -> np.ndarray:
            return np.stack([_two_valued(SHAPES[0], rank, 10 * call + i) for i in range(4)])

        for call in range(2):
            got = steps(of(hvd.rank(), call)).numpy()
            expected = np.mean([of(rank, call) for rank in range(hvd.size())], axis=0)
            assert np.array_equal(got[1::2], expected[1::2])
            if compressors[0] is shared:
                assert np.array_equal(got[::2], expected[::2])
    assert [int(slot.exchanges) for slot in shared.slots] == [4, 4]
    assert [int(compressor.slots[0].exchanges) for compressor in own] == [4, 4]


@on_ranks(2, launcher="tensorflow")
def test_retracing_goes_on_with_the_same_state() -> None:
    """Another batch size is another graph; residuals and noise go on."""
    variable = tf.Variable(tf.zeros(SHAPES[0]))
    compressor = hvdc.OneBit(threshold=THRESHOLD)
    simulation = Simulation("allgather", OneBit(), ErrorFeedback(), hvd.size())

    @tf.function
    def gradient(batch: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * tf.reduce_sum(batch, axis=0))
        return hvd.DistributedGradientTape(tape, compression=compressor).gradient(loss, [variable])[
            0
        ]

    for step, count in enumerate((1, 2, 1, 3)):
        if hvd.rank() == 1:
            count = 1  # Only one rank is retraced: nothing that is sent depends on it.
        everywhere = [targets(rank, step) for rank in range(hvd.size())]
        mine = everywhere[hvd.rank()][0]
        batch = np.stack([mine, *[np.zeros_like(mine)] * (count - 1)])
        assert np.array_equal(gradient(batch), simulation.sum(everywhere, 0.5)[0])
    assert gradient.experimental_get_tracing_count() == (1 if hvd.rank() == 1 else 3)
    assert len(compressor.slots) == 1


@on_ranks(2, launcher="tensorflow")
def test_gradients_do_not_wait_for_each_other() -> None:
    """TensorFlow would have each wait for those traced before it."""
    variables = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]

    def gradients(compressor: hvdc.Compressor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v * v) for v in variables])
        return hvd.DistributedGradientTape(tape, compression=compressor).gradient(loss, variables)

    for name in ("allgather", "two_shot"):
        compressor = hvdc.ECQ(threshold=THRESHOLD, exchange=name)
        traced = tf.function(gradients).get_concrete_function(compressor)
        operations = traced.graph.get_operations()
        branches = [
            op
            for op in operations
            if op.type == "If" and len(op.outputs) and "/cond/" not in op.name
        ]
        assert len(branches) == len(SHAPES)
        for branch in branches:
            assert not set(branch.control_inputs) & set(branches), branch.name


@on_ranks(2, launcher="tensorflow")
def test_what_xla_would_compile_fails_when_traced() -> None:
    variable = tf.Variable(tf.zeros(SHAPES[0]))

    def gradient(compressor: hvdc.Compressor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * targets(hvd.rank(), 0)[0])
        return hvd.DistributedGradientTape(tape, compression=compressor).gradient(loss, [variable])[
            0
        ]

    compiled = tf.function(gradient, jit_compile=True)
    for step in (compiled, tf.function(lambda c: compiled(c))):
        with pytest.raises(Exception, match=r"(?s)jit_compile=False .*, got jit_compile=True"):
            step(hvdc.OneBit(threshold=THRESHOLD))
    with tf.Graph().as_default(), pytest.raises(hvdc.ExchangeError, match=r"in a tf\.function"):
        hvdc.OneBit(threshold=0).compress(tf.zeros([5000]))


@on_ranks(3, launcher="tensorflow", environment={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
def test_another_process_set_than_the_tapes() -> None:
    members = process_set(0, 2)
    for theirs, ours in ((members, None), (hvd.global_process_set, members)):
        options = {"process_set": theirs}
        exchange = exchange_with(hvdc.OneBit(process_set=ours), graph=True, **options)
        with pytest.raises(Exception, match="expected the compressor's process set"):
            exchange(targets(hvd.rank(), 0))


@on_ranks(2, launcher="tensorflow", environment={"TF_USE_LEGACY_KERAS": "1"})
def test_backward_passes_per_step() -> None:
    """Legacy Keras: Horovod adds gradients up for so many passes, and exchanges the sum."""
    for graph in (False, True):
        for average in (False, True):
            compressor = hvdc.OneBit(threshold=THRESHOLD)
            import horovod.tensorflow.keras as hvd_keras

            optimizer = hvd_keras.DistributedOptimizer(
                tf.keras.optimizers.legacy.SGD(1.0),
                compression=compressor,
                backward_passes_per_step=2,
                average_aggregated_gradients=average,
            )
            variable = tf.Variable(tf.zeros(SHAPES[0]))

            def one(
                value: tf.Tensor,
                variable: tf.Variable = variable,
                optimizer: object = optimizer,
            ) -> None:
                optimizer.minimize(lambda: tf.reduce_sum(variable * value), [variable])

            run = tf.function(one) if graph else one
            for _ in range(4):
                run(tf.constant(_two_valued(SHAPES[0], hvd.rank())))
            expected = -4 * _mean(SHAPES[0]) / (2 if average else 1)
            assert np.array_equal(variable, expected), (graph, average)
            assert int(compressor.slots[0].exchanges) == 2
