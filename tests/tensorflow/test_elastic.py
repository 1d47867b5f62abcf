"""Compressors in elastic states of TensorFlow, and in the ranks that come after them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

import hvd_compress.tensorflow as hvdc
from hvd_compress.codecs import Int8, OneBit
from hvd_compress.tensorflow.elastic import TensorFlowState
from tests.again import initialize_again
from tests.ranks import on_ranks
from tests.tensorflow.probes import SHAPES, THRESHOLD, exchange_with, targets


class _Training:
    """A compressor's gradients, and an elastic state.

    Args:
        state: the state of the training.
        options: the options of the compressor.
    """

    def __init__(self, state: TensorFlowState, **options: Any) -> None:
        self.state, self._options = state, options
        self.again()

    def again(self) -> None:
        """Makes the compressor again, as the function that elastic Horovod runs does."""
        self.compressor = self.state.begin(hvdc.OneBit(threshold=THRESHOLD, **self._options))
        self._step = exchange_with(self.compressor, graph=True)

    def run(self, steps: int) -> list[np.ndarray]:
        """The sums of what the ranks averaged."""
        sums = [np.zeros(shape, np.float32) for shape in SHAPES]
        for _ in range(steps):
            for total, average in zip(
                sums, self._step(targets(hvd.rank(), self.state.step)), strict=True
            ):
                total += average
            self.state.step += 1
        return sums

    def unsent(self) -> list[np.ndarray]:
        """Returns the part of the gradients that all ranks have yet to add to the average."""
        parts = []
        for slot in self.compressor.slots:
            own = np.zeros(int(np.prod(slot.shape)), np.float32)
            residual, owned = slot.residual.numpy(), np.zeros_like(own)
            own[: len(residual)] += residual
            begin, end = _part(slot)
            owned[begin:end] = slot.owned.numpy()
            average = hvd.allreduce(own, op=hvd.Average, name=f"own.{slot.index}")
            owners = hvd.allreduce(owned, op=hvd.Sum, name=f"owned.{slot.index}")
            parts.append((average + owners).numpy().reshape(slot.shape))
        return parts


def _part(slot: Any) -> tuple[int, int]:
    """Returns the range that a rank owns; ranges follow the order of the ranks from the first owner on."""
    lengths = hvd.allgather_object(len(slot.owned.numpy()), name=f"length.{slot.index}")
    order = [(slot.index + place) % len(lengths) for place in range(len(lengths))]
    begin = sum(lengths[rank] for rank in order[: order.index(hvd.rank())])
    return begin, begin + lengths[hvd.rank()]


def _average_gradients(ranks: int, steps: Iterable[int]) -> list[np.ndarray]:
    """The sum over the steps of the average of the ranks' gradients."""
    every = [targets(rank, step) for step in steps for rank in range(ranks)]
    return [np.sum(one, axis=0) / ranks for one in zip(*every, strict=True)]


def _assert_sum(parts: list[list[np.ndarray]], expected: list[np.ndarray]) -> None:
    for *some, whole in zip(*parts, expected, strict=True):
        np.testing.assert_allclose(np.sum(some, axis=0), whole, rtol=1e-4, atol=2e-4)


@on_ranks(3, launcher="tensorflow", alone=True)
def test_nothing_is_lost_with_a_rank() -> None:
    """Averages and what is unsent add up to the ranks' gradients, before and after."""
    whole = _average_gradients(3, range(3))
    trainings = []
    for exchange in ("allgather", "two_shot", "auto"):
        state = TensorFlowState([tf.Variable(1.0)], share_residuals=True, step=0)
        training = _Training(state, exchange=exchange, name=exchange)
        averaged = training.run(3)
        _assert_sum([averaged, training.unsent()], whole)
        state.commit()
        training.run(2)  # As if the rank were lost then.
        trainings.append((training, averaged))
    for training, _ in trainings:
        training.state.restore()
        assert training.state.step == 3
    if not initialize_again(hvd, 2):
        return
    step = _average_gradients(2, [3])
    for training, averaged in trainings:
        training.state.on_reset()
        training.again()
        again = training.run(1)
        slots = [slot for slot in training.compressor.slots if not slot.route.uncompressed]
        assert {int(slot.exchanges) for slot in slots} == {4}
        if slots[0].route.reason:
            assert {(slot.route.exchange, slot.route.reason) for slot in slots} == {
                ("allgather", "auto, 2 ranks")
            }
        parts = [averaged, again, training.unsent()]
        _assert_sum(parts, [a + b for a, b in zip(whole, step, strict=True)])


_HEADS = {"a": 100.0, "b": 1.0}
"""Two variables of one shape, and the size of their gradients."""


def _head_gradient(name: str, step: int) -> np.ndarray:
    numbers = np.random.default_rng([ord(name), step, hvd.rank()])
    return (_HEADS[name] * numbers.standard_normal((40, 70))).astype(np.float32)


@on_ranks(2, launcher="tensorflow")
def test_a_head_that_comes_first_after_a_reset_has_its_own_residual() -> None:
    """One head a step, in another order after each reset, and not all of them."""
    state = TensorFlowState([tf.Variable(0.0)], step=0)
    heads = {name: tf.Variable(tf.zeros((40, 70)), name=name) for name in _HEADS}
    sent = {name: np.zeros((40, 70)) for name in _HEADS}
    wanted = {name: np.zeros((40, 70)) for name in _HEADS}
    for turn, names in enumerate(("ab", "ba", "b", "ab")):
        compressor = state.begin(hvdc.OneBit(threshold=THRESHOLD))
        for name in names:
            gradient = _head_gradient(name, turn)
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(heads[name] * gradient)
            tape = hvd.DistributedGradientTape(tape, compression=compressor)
            [average] = tape.gradient(loss, [heads[name]])
            sent[name] += average.numpy()
            wanted[name] += gradient
        state.commit()
        state.on_reset()
    for slot in compressor.slots:
        name = slot.variable_name.partition(":")[0]
        left = hvd.allreduce(slot.residual, name=f"left.{name}").numpy().reshape(40, 70)
        whole = hvd.allreduce(tf.constant(wanted[name]), name=f"wanted.{name}").numpy()
        np.testing.assert_allclose(sent[name] + left, whole, atol=1e-5 * np.abs(whole).max())
    exchanges = {slot.variable_name[0]: int(slot.exchanges) for slot in compressor.slots}
    assert exchanges == {"a": 3, "b": 4}


@on_ranks(2, launcher="tensorflow")
def test_variables_that_a_commit_cannot_tell_apart() -> None:
    state = TensorFlowState([tf.Variable(0.0)])
    compressor = state.begin(hvdc.OneBit(threshold=THRESHOLD))
    for _ in range(2):
        variable = tf.Variable(tf.zeros((40, 70)), name="same")
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable)
        hvd.DistributedGradientTape(tape, compression=compressor).gradient(loss, [variable])
    with pytest.raises(ValueError, match=r"commit: expected names that tell the variables"):
        state.commit()


@on_ranks(2, launcher="tensorflow")
def test_a_model_made_again_after_a_reset() -> None:
    """The new model's variables have other names, so that their residuals are not found."""
    state = TensorFlowState([tf.Variable(0.0)])

    def train(name: str) -> None:
        compressor = state.begin(hvdc.OneBit(threshold=THRESHOLD))
        variable = tf.Variable(tf.zeros((40, 70)), name=name)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable)
        hvd.DistributedGradientTape(tape, compression=compressor).gradient(loss, [variable])

    train("dense")
    state.commit()
    state.on_reset()
    with pytest.warns(UserWarning, match=r"\['dense:0'\], got a gradient of 'dense_1:0'"):
        train("dense_1")


@on_ranks(2, launcher="tensorflow")
def test_variables_and_objects_go_back_to_the_last_commit() -> None:
    variable = tf.Variable([float(hvd.rank()), 1.0])
    state = TensorFlowState([variable], step=0)
    state.sync()
    assert variable.numpy().tolist() == [0.0, 1.0]
    _Training(state).run(1)
    variable.assign([5.0, 6.0])
    state.commit()
    variable.assign([7.0, 8.0])
    state.step = 9
    state.restore()
    assert variable.numpy().tolist() == [5.0, 6.0] and state.step == 1


@on_ranks(2, launcher="tensorflow")
def test_a_rank_that_made_fewer_compressors_before() -> None:
    state = TensorFlowState([tf.Variable(0.0)], step=0)
    _Training(state).run(1)
    state.commit()
    if hvd.rank() == 1:  # As a new rank, which has made none.
        state.on_reset()
        state = TensorFlowState([tf.Variable(0.0)], step=0)
    else:
        state.on_reset()
    training = _Training(state)
    state.sync()
    training.run(1)
    exchanges = [int(s.exchanges) for s in training.compressor.slots if not s.route.uncompressed]
    assert set(exchanges) == {2}


@on_ranks(2, launcher="tensorflow")
def test_a_rank_that_counts_layers_differently() -> None:
    """A new rank has made another model before, so that its layers have other numbers."""
    layers = (
        ["sequential/dense", "sequential/dense_1"],
        ["sequential_1/dense_2", "sequential_1/dense_3"],
    )
    state = TensorFlowState([tf.Variable(0.0)], step=0)
    for turn in range(3):
        new = turn == 1 and hvd.rank() == 1
        if new:
            state = TensorFlowState([tf.Variable(0.0)], step=0)
        compressor = state.begin(hvdc.OneBit(threshold=THRESHOLD))
        if turn < 2:
            heads = [tf.Variable(tf.zeros((40, 70)), name=f"{name}/kernel") for name in layers[new]]
        for head in heads[turn % 2 :] + heads[: turn % 2]:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(head * targets(hvd.rank(), turn)[0])
            hvd.DistributedGradientTape(tape, compression=compressor).gradient(loss, [head])
        assert [int(slot.exchanges) for slot in compressor.slots] == [turn + 1] * 2
        state.commit()
        state.on_reset()
    for slot in compressor.slots:
        assert np.linalg.norm(slot.residual) > 0


@on_ranks(2, launcher="tensorflow")
def test_an_error_in_a_graph_ends_elastic_training() -> None:
    """Its words reach the script: ``hvd.elastic.run`` takes some of TensorFlow's errors for the end."""
    heads = [tf.Variable(tf.zeros((40, 70)), name=name) for name in "ab"]

    def other_codecs(state: TensorFlowState) -> None:
        codec = (OneBit(), Int8())[hvd.rank()]
        compressor = state.begin(hvdc.Compressor(codec, threshold=THRESHOLD))
        exchange_with(compressor, graph=True)(targets(hvd.rank(), 0))

    def no_gradient_on_one_rank(state: TensorFlowState) -> None:
        compressor = state.begin(hvdc.OneBit(threshold=THRESHOLD))

        @tf.function
        def step(used: int) -> None:
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(head) for head in heads[:used]])
            hvd.DistributedGradientTape(tape, compression=compressor).gradient(loss, heads)

        step(2)
        step(2 - hvd.rank())

    for train, words in (
        (other_codecs, r"OneBit\(.* on rank 0, .*Int8\(.* on rank 1"),
        (no_gradient_on_one_rank, r"\(b:0\): number 1 on rank 0, absent on rank 1"),
    ):
        state = TensorFlowState([tf.Variable(0.0)])
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"(?s)ExchangeError: .*{words}"):
            hvd.elastic.run(train)(state)


@on_ranks(3, launcher="tensorflow", environment={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
def test_what_cannot_be_elastic() -> None:
    state = TensorFlowState([tf.Variable(0.0)])
    with pytest.raises(TypeError, match=r"state\.begin\(.*OneBit\(\)"):
        state.begin(hvdc.OneBit)
    some = hvd.add_process_set([0, 2])
    with pytest.raises(ValueError, match=r"got one with process set [1-9]"):
        state.begin(hvdc.OneBit(process_set=some))
    with pytest.raises(ValueError, match=r"expected state\.begin\(compressor\) at the start"):
        state.commit()
    used = hvdc.OneBit(threshold=THRESHOLD, name="used")
    exchange_with(used, graph=True)(targets(hvd.rank(), 0))
    with pytest.raises(ValueError, match="expected a compressor that is new, got one with which"):
        state.begin(used)
