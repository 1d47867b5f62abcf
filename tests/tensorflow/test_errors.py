"""Ranks that fail, differ or leave: an error on every rank, no hang, and the others go on."""

from __future__ import annotations

import itertools
import time
from typing import Any
from unittest import mock

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

import hvd_compress.tensorflow as hvdc
from hvd_compress import ECQ, Int8, NoCompression, PowerSGD, Route
from hvd_compress.exchanges import sum_as_gather
from hvd_compress.tensorflow import tracing
from tests import jobs
from tests.again import initialize_again
from tests.contract import errors
from tests.contract.horovod_tensorflow import HorovodTensorFlow
from tests.ranks import on_ranks
from tests.tensorflow.probes import (
    SHAPES,
    THRESHOLD,
    exchange_with,
    targets,
)

_ONLY_PYTORCH = "which only the PyTorch frontends have; use 'allgather' or 'two_shot'"


# These share one job: an error that left a collective behind on one rank would fail the tests after it.


class _Altered(hvdc.OneBit):
    """Flips a bit of the first gradient's message where it is told to: a network that lies."""

    def __init__(self, where: str, **options: Any) -> None:
        super().__init__(**options)
        self.flip = tf.Variable(0, dtype=tf.uint8)
        gather = self._collectives.all_gather

        def altered(message: tf.Tensor, name: str) -> tf.Tensor:
            if name != "bucket.0":
                return gather(message, name)
            if where == "before":
                return gather(self._flipped(message), name)
            return self._flipped(gather(message, name))

        self._collectives.all_gather = altered

    def _flipped(self, message: tf.Tensor) -> tf.Tensor:
        changed = tf.bitwise.bitwise_xor(message[100], self.flip)
        return tf.tensor_scatter_nd_update(message, [[100]], [changed])


def _afresh(exchange: Any) -> None:
    """Checks that the ranks exchange as before the error."""
    for step in range(3, 5):
        assert all(np.isfinite(g).all() for g in exchange(targets(hvd.rank(), step)))


@on_ranks(2, launcher="tensorflow")
def test_a_payload_altered_on_its_way_to_all() -> None:
    compressor = _Altered("before", threshold=THRESHOLD)
    exchange = exchange_with(compressor, graph=True)
    exchange(targets(hvd.rank(), 0))
    compressor.flip.assign(16 if hvd.rank() == 1 else 0)
    with pytest.raises(tf.errors.DataLossError, match=r"gradient.0: expected rank 1's payload as"):
        exchange(targets(hvd.rank(), 1))
    compressor.flip.assign(0)
    _afresh(exchange)


@on_ranks(2, launcher="tensorflow")
def test_a_payload_altered_on_its_way_to_one() -> None:
    """The others learn of it in the next step's participation check."""
    compressor = _Altered("after", threshold=THRESHOLD)
    exchange = exchange_with(compressor, graph=True)
    exchange(targets(hvd.rank(), 0))
    if hvd.rank() == 1:
        compressor.flip.assign(16)
        with pytest.raises(tf.errors.DataLossError, match=r"gradient.0: expected rank 0's payload"):
            exchange(targets(1, 1))
        compressor.flip.assign(0)
    else:
        exchange(targets(0, 1))
    message = r"(?s)error in an earlier step: absent on rank 0, gradient.0: .* on rank 1"
    with pytest.raises(tf.errors.OpError, match=message):
        exchange(targets(hvd.rank(), 2))
    _afresh(exchange)


@on_ranks(2, launcher="tensorflow", alone=True)
def test_a_rank_that_ends_with_its_error() -> None:
    """The others stop with Horovod's error at the latest in the next step's participation check."""
    compressor = _Altered("after", threshold=THRESHOLD)
    exchange = exchange_with(compressor, graph=True)
    exchange(targets(hvd.rank(), 0))
    compressor.flip.assign(16 if hvd.rank() == 1 else 0)
    steps = 1 if hvd.rank() == 1 else 2
    with pytest.raises(tf.errors.OpError, match=("shut down", r"gradient.0: ")[hvd.rank()]):
        for step in range(1, 1 + steps):
            exchange(targets(hvd.rank(), step))
    if hvd.rank() == 1:
        raise jobs.Leave


@on_ranks(2, launcher="tensorflow")
def test_a_gradient_that_cannot_be_encoded() -> None:
    """One rank's gradient changes its size between two steps, which tracing could not know."""
    variable = tf.Variable(tf.zeros([0]), shape=[None])
    other = tf.Variable(tf.zeros(SHAPES[0]))
    compressor = hvdc.OneBit(threshold=0)

    @tf.function(input_signature=[tf.TensorSpec([None]), tf.TensorSpec(SHAPES[0])])
    def exchange(value: tf.Tensor, dense: tf.Tensor) -> list[tf.Tensor]:
        variable.assign(tf.zeros_like(value))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * value) + tf.reduce_sum(other * dense)
        tape = hvd.DistributedGradientTape(tape, compression=compressor)
        return tape.gradient(loss, [variable, other])

    dense = targets(hvd.rank(), 0)[0]
    exchange(tf.ones([3000]), dense)
    length, message = (
        (3000, r"gradient.0: expected rank 1's payload, got none: encoding failed there"),
        (
            2990,
            r"gradient.0: expected a gradient of 3000 elements as in the steps before, got 2990",
        ),
    )[hvd.rank()]
    with pytest.raises(tf.errors.DataLossError, match=message):
        exchange(tf.ones([length]), dense)
    # Every rank has raised an error of its own: they go on.
    assert np.array_equal(exchange(tf.ones([3000]), dense)[0], tf.ones([3000]))


@on_ranks(2, launcher="tensorflow")
def test_a_long_gradient_that_cannot_be_encoded() -> None:
    """Two ranks add long messages up, whose length may not depend on what a rank has to encode."""
    count = sum_as_gather.LONG
    compressor = hvdc.Int8(threshold=0)

    value = tf.Variable(tf.ones([count]), shape=[None])

    def exchange(length: int | None) -> tf.Tensor:
        with tf.GradientTape() as tape:
            x = tf.ensure_shape(value, [length])
            loss = tf.reduce_sum(x * x) / 2
        return hvd.DistributedGradientTape(tape, compression=compressor).gradient(loss, [value])[0]

    known, unknown = tf.function(lambda: exchange(count)), tf.function(lambda: exchange(None))
    assert np.array_equal(known(), tf.ones([count]))
    length, message = (
        (count, r"gradient.0: expected rank 1's payload, got none: encoding failed there"),
        (count // 2, rf"gradient.0: expected a gradient of {count} elements as when it was first"),
    )[hvd.rank()]
    with pytest.raises(tf.errors.DataLossError, match=message):
        value.assign(tf.ones([length]))
        unknown()
    value.assign(tf.ones([count]))
    assert np.array_equal(unknown(), tf.ones([count]))


@on_ranks(2, launcher="tensorflow")
def test_an_error_of_the_users_own_ends_what_has_failed() -> None:
    """The second gradient never comes: the first one's failed operation must not wait for it."""
    compressor = _Altered("after", threshold=THRESHOLD)
    variables = [tf.Variable(tf.zeros(shape)) for shape in (SHAPES[0], SHAPES[2])]
    broken = False

    def slowly(value: np.ndarray) -> np.ndarray:
        if broken:
            time.sleep(3)  # The first gradient is back by then.
            raise ValueError("the user's own error")
        return value

    @tf.function
    def step(first: tf.Tensor, second: tf.Tensor) -> list[tf.Tensor]:
        second = tf.ensure_shape(tf.numpy_function(slowly, [second], tf.float32), SHAPES[2])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variables[0] * first) + tf.reduce_sum(variables[1] * second)
        return hvd.DistributedGradientTape(tape, compression=compressor).gradient(loss, variables)

    values = targets(hvd.rank(), 0)
    step(values[0], values[2])
    compressor.flip.assign(16)
    broken = True
    with pytest.raises(tf.errors.OpError, match="user's own error"):
        step(values[0], values[2])
    compressor.flip.assign(0)
    broken = False
    step(values[0], values[2])


@on_ranks(2, launcher="tensorflow")
def test_ranks_that_trace_something_else_later() -> None:
    """A gradient more on one rank, after both had agreed."""
    compressor = hvdc.OneBit(threshold=THRESHOLD)
    variables = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]

    @tf.function
    def step(count: int) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v * v) for v in variables[:count]])
        tape = hvd.DistributedGradientTape(tape, compression=compressor)
        return tape.gradient(loss, variables[:count])

    step(2)
    with pytest.raises(tf.errors.OpError, match=r"gradient.2: absent on rank 0, float32 \[3000\]"):
        step(2 + hvd.rank())


@on_ranks(3, launcher="tensorflow", alone=True)
def test_horovod_initialized_again_with_fewer_ranks() -> None:
    """Graphs hold a rank's place: an error says so, and a new compressor goes on."""
    compressor = hvdc.OneBit(threshold=THRESHOLD)
    exchange = exchange_with(compressor, graph=True)
    exchange(targets(hvd.rank(), 0))
    rank = hvd.rank()
    if not initialize_again(hvd, 2):
        return
    before = compressor.counters.message_bytes
    with pytest.raises(
        tf.errors.OpError, match=rf"expected rank {rank} of 3, .*has been initialized again"
    ):
        exchange(targets(rank, 1))
    assert compressor.counters.message_bytes == before
    new = hvdc.OneBit(threshold=THRESHOLD)
    exchange = exchange_with(new, graph=True)
    for step in range(1, 3):
        sums = [float(np.sum(gradient)) for gradient in exchange(targets(rank, step))]
        everybodys = hvd.allgather(tf.constant([sums]), name=f"sums of step {step}").numpy()
        assert np.array_equal(everybodys[0], everybodys[1])
    assert new.counters.message_bytes < 0.1 * new.counters.uncompressed_bytes
    hvd.allreduce(tf.zeros(1), name="barrier at the end")


@on_ranks(2, launcher="tensorflow")
def test_ranks_that_average_and_ranks_that_add_up() -> None:
    for exchange in ("allgather", "two_shot"):
        op = hvd.Sum if hvd.rank() == 0 else hvd.Average
        step = exchange_with(hvdc.OneBit(threshold=1, exchange=exchange), graph=True, op=op)
        with pytest.raises(
            Exception, match=r"(?s)scale 1\.0, .* on rank 0, .*scale 0\.5, .* on rank 1"
        ):
            step(targets(hvd.rank(), 0))


@on_ranks(2, launcher="tensorflow")
def test_gradients_of_one_call_with_different_factors() -> None:
    """No call of today's Horovod has them; a bucket is decoded with one."""
    factors = itertools.count(1.0)
    exchange = exchange_with(hvdc.OneBit(threshold=THRESHOLD), graph=True)
    with (
        mock.patch.object(tracing, "scale_of", lambda *reduction: next(factors)),
        # As autograph passes it on.
        pytest.raises(
            Exception, match=r"ExchangeError: gradient.*: expected the factor 1.0 of the"
        ),
    ):
        exchange(targets(hvd.rank(), 0))


@on_ranks(2, launcher="tensorflow")
def test_ranks_that_disagree() -> None:
    """The contract's own test, on more ranks and of all exchanges, is exhaustive."""
    errors.ranks_that_disagree(HorovodTensorFlow(), "two_shot")


@on_ranks(2, launcher="tensorflow")
def test_functions_that_run_eagerly() -> None:
    exchange = exchange_with(hvdc.OneBit(threshold=THRESHOLD), graph=False)
    tf.config.run_functions_eagerly(True)
    try:
        with pytest.raises(hvdc.ExchangeError, match=r"run_functions_eagerly.True., under"):
            exchange(targets(hvd.rank(), 0))
    finally:
        tf.config.run_functions_eagerly(False)
    exchange(targets(hvd.rank(), 0))


@on_ranks(2, launcher="tensorflow")
def test_what_is_no_compressor() -> None:
    """A codec, a route, or the class of a codec."""
    for given, got in ((Int8(), "the codec Int8"), (Int8, "the codec"), (Route(Int8()), "a Route")):
        with pytest.raises(TypeError, match=f"expected a compressor of Horovod's .* got {got}"):
            exchange_with(given, graph=False)(targets(hvd.rank(), 0))


@on_ranks(2, launcher="tensorflow")
def test_a_codec_without_payloads() -> None:
    message = r"codec: expected a codec that writes payloads, such as .*, got PowerSGD\(rank=4\)"
    with pytest.raises(ValueError, match=f"{message}.* hvd_compress.torch, ddp, fsdp and distrib"):
        hvdc.Compressor(PowerSGD())
    with pytest.raises(ValueError, match=message):
        hvdc.Compressor(Int8(), layers={"*": PowerSGD()})
    with pytest.raises(ValueError, match=r"Compressor.exchange: expected one of .*'low_rank'"):
        hvdc.Compressor(Int8(), exchange="low_rank")


@on_ranks(2, launcher="tensorflow")
def test_an_exchange_that_only_pytorch_has() -> None:
    for exchange in ("integer_sum", "hierarchical"):
        message = rf"got '{exchange}', {_ONLY_PYTORCH}"
        route = Route(ECQ(), exchange=exchange)
        for codec, options in (
            (ECQ(), {"exchange": exchange}),
            (NoCompression(), {"exchange": exchange}),
            (route, {}),
            (ECQ(), {"layers": {"*": route}}),
        ):
            with pytest.raises(ValueError, match=message):
                hvdc.Compressor(codec, **options)
        for field, options in (
            ("exchanges", {"exchanges": (exchange,)}),
            (r"codecs\.exchange", {"codecs": (route,)}),
        ):
            expected = rf"Auto\.{field}: expected one of 'allgather', 'two_shot', {message}"
            with pytest.raises(ValueError, match=expected):
                hvdc.Auto(**options)


@on_ranks(2, launcher="tensorflow")
def test_a_codec_within_hosts() -> None:
    message = rf"expected a Route without a codec within hosts, got inner=Int8\(.*{_ONLY_PYTORCH}"
    for exchange in ("", "hierarchical"):
        route = Route(ECQ(), exchange=exchange, inner=Int8())
        for codec, options, where in (
            (route, {}, "codec"),
            (route, {"exchange": "two_shot"}, "codec"),
            (ECQ(), {"layers": {"a*": route}}, r"layers\['a\*'\]"),
        ):
            with pytest.raises(ValueError, match=rf"Compressor\.{where}: {message}"):
                hvdc.Compressor(codec, **options)
        with pytest.raises(ValueError, match=rf"Auto\.codecs: {message}"):
            hvdc.Auto(codecs=("onebit", route))


@on_ranks(2, launcher="tensorflow")
def test_layers_of_another_exchange() -> None:
    """A route of another exchange is refused even if it would be the default one of more ranks."""
    for own, other in (("allgather", "two_shot"), ("two_shot", "allgather")):
        options = {} if own == "allgather" else {"exchange": own}
        message = rf"Compressor\.layers: expected routes of one exchange, '{own}', .*got '{other}'"
        with pytest.raises(ValueError, match=message):
            hvdc.ECQ(layers={"*": Route(ECQ(), exchange=other)}, **options)
    hvdc.OneBit(layers={"*": Route(Int8(), exchange="allgather")})
    hvdc.FP16(layers={"*": Route(Int8(), exchange="auto")})
