"""Dropped steps, checkpoints, and ranks that differ."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

import hvd_compress.tensorflow as hvdc
from hvd_compress.codecs import ECQ, QSGD, ErrorFeedback, Int8, OneBit
from hvd_compress.tensorflow.elastic import TensorFlowState
from tests.ranks import on_ranks
from tests.tensorflow.probes import SHAPES, THRESHOLD, assert_same, exchange_with, targets


def _residuals(compressor: hvdc.Compressor) -> list[np.ndarray]:
    return [slot.residual.numpy() for slot in compressor.slots if not slot.route.uncompressed]


# AutoGraph raises an exception of its own in the place of what is raised while it traces.


@on_ranks(2, launcher="tensorflow")
def test_operations_that_cannot_be_done() -> None:
    """An error where a tape is made, eagerly or while a function is traced."""
    compressor = hvdc.OneBit(threshold=THRESHOLD)
    for name in ("Min", "Max", "Product", "Adasum"):
        message = f"expected op=Average or op=Sum with a compressor, got {name}"
        options = {"compression": compressor, "op": getattr(hvd, name)}
        with pytest.raises(hvdc.ExchangeError, match=message):
            hvd.DistributedGradientTape(tf.GradientTape(), **options)
        with pytest.raises(Exception, match=f"ExchangeError: {message}"):
            exchange_with(graph=True, **options)(targets(hvd.rank(), 0))


@on_ranks(1, launcher="tensorflow")
def test_wrong_uses() -> None:
    with pytest.raises(ValueError, match="multiple of 64"):
        hvdc.OneBit(group=100)
    for options in ({}, {"layers": {"*": ECQ(coding="entropy")}, "coding": "plain"}):
        with pytest.raises(ValueError, match=r"expected coding='plain', got ECQ\(.*'entropy'"):
            hvdc.ECQ(**{"coding": "entropy", **options})
    with pytest.raises(ValueError, match="owner_step: expected None in TensorFlow, got 'adagrad'"):
        hvdc.OneBit(exchange="two_shot", owner_step="adagrad")  # type: ignore[arg-type]
    with pytest.raises(hvdc.ExchangeError, match="registered process set"):
        hvdc.OneBit(process_set=hvd.ProcessSet([0]))
    with pytest.raises(hvdc.ExchangeError, match=r"in a tf\.function"):
        hvdc.OneBit().compress(tf.zeros([5000]))
    compressor = hvdc.OneBit(threshold=0)
    direct = tf.function(lambda: compressor.compress(tf.zeros(SHAPES[0]))[0])
    with pytest.raises(Exception, match="cannot tell which variable"):
        direct.get_concrete_function()
    assert compressor != hvdc.OneBit(threshold=0)


@on_ranks(2, launcher="tensorflow")
def test_a_checkpoint_of_another_rank_is_refused_and_changes_nothing() -> None:
    folder = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None, 0)
    compressor = hvdc.OneBit(threshold=THRESHOLD)
    exchange = exchange_with(compressor, graph=True)
    exchange(targets(hvd.rank(), 0))
    path = os.path.join(folder, f"state-{hvd.rank()}")
    checkpoint = tf.train.Checkpoint(compressor=compressor)
    checkpoint.write(path)
    exchange(targets(hvd.rank(), 1))
    before = _residuals(compressor)
    hvd.allreduce(tf.zeros(1), name="all have written")
    other = 1 - hvd.rank()
    message = rf"expected a compressor's checkpoint of rank {hvd.rank()}, got {other}"
    with pytest.raises(ValueError, match=message):
        checkpoint.read(os.path.join(folder, f"state-{other}"))
    assert_same(_residuals(compressor), before)
    seeded = hvdc.OneBit(threshold=THRESHOLD, seed=1)
    with pytest.raises(ValueError, match="expected a compressor's checkpoint of seed 1, got 0"):
        tf.train.Checkpoint(compressor=seeded).read(path)
    # Its own goes back, and a rank that restores alone is told so.
    checkpoint.read(path).assert_consumed()
    again = exchange(targets(hvd.rank(), 1))
    assert_same(_residuals(compressor), before)
    if hvd.rank() == 1:
        checkpoint.read(path)
    with pytest.raises(tf.errors.OpError, match=r"exchange 2 on rank 0, .*exchange 1 on rank 1"):
        exchange(targets(hvd.rank(), 2))
    assert np.isfinite(again[0]).all()


@on_ranks(2, launcher="tensorflow")
def test_residuals_of_the_other_dtype() -> None:
    """A checkpoint is refused, before or after the first step; load_resized() converts the residuals."""
    folder = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None, 0)
    dtypes = ("float32", "bfloat16")

    def make(dtype: Any) -> hvdc.Compressor:
        feedback = ErrorFeedback(residual_dtype=dtype)
        return hvdc.Compressor(OneBit(), feedback=feedback, threshold=THRESHOLD)

    paths = {
        dtype: [os.path.join(folder, f"{dtype}-{rank}") for rank in (0, 1)] for dtype in dtypes
    }
    for dtype in dtypes:
        old = make(dtype)
        exchange_with(old, graph=True)(targets(hvd.rank(), 0))
        assert all(kept.dtype == tf.as_dtype(dtype).as_numpy_dtype for kept in _residuals(old))
        tf.train.Checkpoint(compressor=old).write(paths[dtype][hvd.rank()])
    hvd.allreduce(tf.zeros(1), name="all have written")
    for dtype, other in (dtypes, dtypes[::-1]):
        path, message = paths[other][hvd.rank()], f"in {dtype}, got {other}: .*load_resized"
        used, new = make(dtype), make(dtype)
        exchange = exchange_with(used, graph=True)
        exchange(targets(hvd.rank(), 0))
        before = _residuals(used)
        with pytest.raises(ValueError, match=message):
            tf.train.Checkpoint(compressor=used).read(path)
        assert_same(_residuals(used), before)
        tf.train.Checkpoint(compressor=new).read(path)
        with pytest.raises(Exception, match=message):  # AutoGraph raises one of its own.
            exchange_with(new, graph=True)(targets(hvd.rank(), 1))
        used.load_resized(paths[other])
        reader = tf.train.load_checkpoint(path)
        for slot in used.slots:
            at = f"compressor/slots/{slot.index}/residual/.ATTRIBUTES/VARIABLE_VALUE"
            saved = tf.cast(reader.get_tensor(at), tf.as_dtype(dtype)).numpy()
            assert np.array_equal(slot.residual.numpy(), saved)
        norm = np.linalg.norm(np.concatenate([one.astype(np.float64) for one in _residuals(used)]))
        assert used.residual_norm() == pytest.approx(norm, rel=1e-5)
        assert all(np.isfinite(one).all() for one in exchange(targets(hvd.rank(), 1)))


def _tampered(path: str, to: str, name: str, change: Any) -> str:
    """A copy of a checkpoint, in which the first residual of a name is changed."""
    reader = tf.train.load_checkpoint(path)
    at = f"compressor/slots/0/{name}/.ATTRIBUTES/VARIABLE_VALUE"
    names = sorted(reader.get_variable_to_shape_map())
    tensors = [change(reader.get_tensor(n)) if n == at else reader.get_tensor(n) for n in names]
    tf.raw_ops.SaveV2(
        prefix=to, tensor_names=names, shape_and_slices=[""] * len(names), tensors=tensors
    )
    return to


def _with_a_nan(numbers: np.ndarray) -> np.ndarray:
    numbers[3] = np.nan
    return numbers


@on_ranks(2, launcher="tensorflow")
def test_residuals_that_cannot_be_this_ranks() -> None:
    """All ranks raise the error of one rank's checkpoint, before the next exchange."""
    folder = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None, 0)

    def make(codec: Any = "onebit", exchange: str = "two_shot") -> hvdc.Compressor:
        return hvdc.Compressor(codec, exchange=exchange, threshold=THRESHOLD)

    old = make()
    exchange_with(old, graph=True)(targets(hvd.rank(), 0))
    path = tf.train.Checkpoint(compressor=old).write(f"{folder}/{hvd.rank()}")
    others = hvd.allgather_object(path, name="paths of two ranks")
    changes: list[tuple[str, Any, str]] = [
        (
            "residual",
            _with_a_nan,
            "expected 2800 finite numbers as its residual, got 2800, 1 of them Inf",
        ),
        (
            "owned",
            _with_a_nan,
            r"expected 1\d+ finite numbers as the residual of the part .*, 1 of them",
        ),
        (
            "owned",
            lambda numbers: numbers[:-64],
            r"expected 1\d+ .* of the part that this rank owns, got 1\d+, 0",
        ),
        ("residual", lambda numbers: numbers[:-1], r"expected 2800 .* got 2799, 0 of them"),
    ]
    for number, (name, change, words) in enumerate(changes):
        new, resized, read = make(), make(), path
        if hvd.rank() == 1:
            read = _tampered(path, f"{folder}/{number}-changed", name, change)
            with pytest.raises(
                ValueError, match=r"load_resized: .* on rank 1: expected \d+ finite"
            ):
                resized.load_resized([others[0], read])
        tf.train.Checkpoint(compressor=new).read(read)
        message = rf"on rank 1: ValueError: gradient\.0: {words}"
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            exchange_with(new, graph=True)(targets(hvd.rank(), 1))


@on_ranks(2, launcher="tensorflow")
def test_residuals_of_another_codec() -> None:
    """Refused where they are in another order, or would never be sent; else the next codec sends them."""
    with tempfile.TemporaryDirectory() as folder:
        for codec, exchange, words in (
            (OneBit("column"), "two_shot", r"in the order of columns.*, got .*rows.*load_resized"),
            (
                OneBit("row"),
                "two_shot",
                r"multiples of 70 el.*, got .* multiples of 1 el.*load_res",
            ),
            (QSGD(), "two_shot", r"expected a route with error feedback, .*QSGD.* never send it: "),
            ("none", "allgather", r"expected a route with error feedback, .* never send it: use"),
            (OneBit(512), "two_shot", None),
            (
                Int8(),
                "allgather",
                r"expected a route with error feedback, .*got Int8.* never send it",
            ),
            (ECQ(norm="l2"), "allgather", None),
        ):
            old = hvdc.OneBit(threshold=THRESHOLD, exchange=exchange)
            exchange_with(old, graph=True)(targets(hvd.rank(), 0))
            path = tf.train.Checkpoint(compressor=old).write(f"{folder}/{hvd.rank()}")
            new = hvdc.Compressor(codec, threshold=THRESHOLD, exchange=exchange)
            tf.train.Checkpoint(compressor=new).read(path)
            exchange_on = exchange_with(new, graph=True)
            if words:
                with pytest.raises(Exception, match=words):
                    exchange_on(targets(hvd.rank(), 1))
            else:
                exchange_on(targets(hvd.rank(), 1))


@on_ranks(2, launcher="tensorflow")
def test_residuals_of_gradients_that_come_after_the_reset() -> None:
    """A checkpoint was read before the first step, in which gradients meet their residuals."""
    old, new = (hvdc.OneBit(threshold=THRESHOLD) for _ in range(2))
    exchange_with(old, graph=True)(targets(hvd.rank(), 0))
    with tempfile.TemporaryDirectory() as folder:
        path = tf.train.Checkpoint(compressor=old).write(f"{folder}/{hvd.rank()}")
        tf.train.Checkpoint(compressor=new).read(path)
        new.reset()
        old.reset()
        results = [exchange_with(c, graph=True)(targets(hvd.rank(), 1)) for c in (new, old)]
        assert_same(*results)
        tf.train.Checkpoint(compressor=new).read(path)  # They are back.
        assert new.residual_norm() > 0


@on_ranks(2, launcher="tensorflow")
def test_wrong_calls_of_reset() -> None:
    compressor = hvdc.OneBit(threshold=THRESHOLD)
    exchange = exchange_with(compressor, graph=True)
    exchange(targets(hvd.rank(), 0))
    with pytest.raises(
        Exception, match=r"reset: expected a call between two steps, got one within"
    ):
        tf.function(compressor.reset)()


def _steps_of(compressor: hvdc.Compressor, variables: list[tf.Variable]) -> Any:
    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(variable * x) for variable in variables])
        tape = hvd.DistributedGradientTape(tape, compression=compressor)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(gradient)

    return lambda number: step(tf.constant(targets(hvd.rank(), number)[0]))


def _kept(compressor: hvdc.Compressor) -> list[tuple[np.ndarray, int]]:
    return [(slot.residual.numpy(), int(slot.exchanges)) for slot in compressor.slots]


@on_ranks(2, launcher="tensorflow")
def test_going_back_to_before_a_layer_was_unfrozen() -> None:
    """The residual comes from steps that are taken back."""
    compressor = hvdc.OneBit(threshold=1)
    frozen, other = (tf.Variable(tf.zeros(SHAPES[0]), name=name) for name in ("frozen", "other"))
    _steps_of(compressor, [other])(0)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = tf.train.Checkpoint(compressor=compressor)
        path = checkpoint.write(f"{folder}/of_rank_{hvd.rank()}")
        both = _steps_of(compressor, [other, frozen])
        both(1)
        both(2)
        assert _kept(compressor)[1][0].any()
        checkpoint.read(path)
        (_, exchanges), (residual, of_frozen) = _kept(compressor)
        assert (exchanges, of_frozen) == (1, 0) and not residual.any()

        both(3)
        compressor.load_resized(hvd.allgather_object(path))
        (_, exchanges), (residual, of_frozen) = _kept(compressor)
        assert (exchanges, of_frozen) == (1, 0) and not residual.any()
        hvd.allgather_object(None)  # The others have read it, too.


@on_ranks(2, launcher="tensorflow")
def test_an_elastic_state_that_the_script_restores() -> None:
    """Residuals go back with the weights."""
    for commits in (False, True):
        variable = tf.Variable(tf.zeros(SHAPES[0]), name=f"weights_{commits}")
        state = TensorFlowState([variable], step=0)
        compressor = state.begin(hvdc.OneBit(threshold=1))
        step = _steps_of(compressor, [variable])
        step(0)
        if commits:
            state.commit()
        want = variable.numpy(), *_kept(compressor)
        step(1)
        step(2)
        state.restore()
        ((residual, exchanges),) = _kept(compressor)
        if commits:
            np.testing.assert_array_equal(variable.numpy(), want[0])
            np.testing.assert_array_equal(residual, want[1][0])
        else:
            assert not variable.numpy().any() and not residual.any()
        assert exchanges == int(commits)
