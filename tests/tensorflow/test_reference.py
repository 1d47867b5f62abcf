"""A codec of another package, NumPy only, in TensorFlow: its reference runs in the operations' place."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

import hvd_compress.tensorflow as hvdc
from hvd_compress.codecs import ErrorFeedback, codec_class
from hvd_compress.exchanges.reference import Simulation as Reference
from hvd_compress.exchanges.routing import Route
from hvd_compress.kernels.native import Tensor
from hvd_compress.tensorflow import reference
from hvd_compress.tensorflow.native import operations
from tests.codecs import rows
from tests.ranks import on_ranks
from tests.stranger import installed
from tests.stranger.twobit import TwoBit
from tests.tensorflow.probes import (
    SHAPES,
    THRESHOLD,
    Simulation,
    assert_residuals,
    exchange_with,
    targets,
)


@on_ranks(2, launcher="tensorflow")
def test_the_codec_of_an_installed_package_works_by_name() -> None:
    """It gives the reference's bits in graphs and eagerly, by both exchanges of payloads."""
    with installed():
        codec = codec_class("test", "codec", "twobit")()
        for number, (exchange, graph, dtype) in enumerate(
            (
                ("allgather", True, "float32"),
                ("two_shot", True, "bfloat16"),
                ("allgather", False, "bfloat16"),
            )
        ):
            feedback = ErrorFeedback(0.8, 0.9, dtype)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                compressor = hvdc.Compressor(
                    "twobit", exchange=exchange, feedback=feedback, threshold=THRESHOLD
                )
                simulation = Simulation(exchange, codec, feedback, hvd.size())
                run = exchange_with(compressor, graph=graph)
                for step in range(3):
                    gradients = [targets(rank, step) for rank in range(hvd.size())]
                    expected = simulation.sum(gradients, 1 / hvd.size())
                    for got, want in zip(run(gradients[hvd.rank()]), expected, strict=True):
                        assert np.array_equal(got, want)
                assert_residuals(compressor, simulation)
            said = [
                str(one.message) for one in caught if "has no kernel for TensorFlow" in str(one)
            ]
            assert len(said) == (number == 0), said


@on_ranks(2, launcher="tensorflow")
def test_every_codec_of_this_package_keeps_its_kernels() -> None:
    """In a process in which a codec of another package has been used."""
    with installed():
        exchange_with(hvdc.Compressor("twobit", threshold=1), graph=False)(targets(hvd.rank(), 0))
    every = [{"gradient.0": targets(rank, 1)[0]} for rank in range(hvd.size())]
    variable = tf.Variable(tf.zeros(SHAPES[0]))
    for codec in (row.codec for row in rows.ROWS):
        if codec.varies or Route(codec).uncompressed:
            continue
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * every[hvd.rank()]["gradient.0"])
        tape = hvd.DistributedGradientTape(tape, compression=hvdc.Compressor(codec))
        [got] = tape.gradient(loss, [variable])
        shapes = {"gradient.0": SHAPES[0]}
        ranks = Reference("allgather", codec, codec.feedback, shapes, hvd.size())
        assert np.array_equal(got, ranks.average(every, 0.5)["gradient.0"]), codec


@on_ranks(2, launcher="tensorflow")
def test_half_precision_gradients() -> None:
    """Widened for the codec, and rounded once."""
    with installed():
        for dtype in (tf.float16, tf.bfloat16):
            compressor = hvdc.Compressor("twobit", threshold=0)
            variable = tf.Variable(tf.zeros(SHAPES[0], dtype))
            # Its four levels carry these exactly.
            numbers = np.random.default_rng(0).choice([-0.75, -0.25, 0.25, 0.75], SHAPES[0])
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable * tf.cast(numbers * (hvd.rank() + 1), dtype))
            tape = hvd.DistributedGradientTape(tape, compression=compressor)
            [got] = tape.gradient(loss, [variable])
            assert got.dtype == dtype
            assert np.array_equal(tf.cast(got, tf.float32).numpy(), numbers * 1.5)


@on_ranks(1, launcher="tensorflow")
def test_its_errors_reach_the_operations() -> None:
    """An altered payload is found, and by whom; what the codec raises is a status, not a crash."""
    with installed():
        codec = codec_class("test", "codec", "twobit")()
        operations()
        spec = reference.reference_spec(codec, (5, 7))
        functions = reference._FUNCTIONS
        size = functions.payload_bytes(spec)
        assert size == codec.payload_bytes((5, 7))
        values, message = targets(0, 0)[0].reshape(-1)[:35].copy(), np.zeros(2 * size, np.uint8)
        for rank in range(2):
            tensor = Tensor(spec=spec, values=values.ctypes.data, payload_bytes=size)
            tensor.offset = rank * size
            assert functions.encode_batch(tensor, 1, message.ctypes.data, 1, None) == 0
        out, bad = np.zeros(35, np.float32), reference.I32(-1)

        def decode(step: int = 0) -> int:
            tensor = Tensor(spec=spec, values=out.ctypes.data, payload_bytes=size)
            tensor.noise.step = step
            return functions.decode_batch(
                tensor, 1, message.ctypes.data, size, 2, 0.5, 1, None, bad
            )

        assert decode() == 0 and np.corrcoef(out, values)[0, 1] > 0.8
        assert decode(step=1) == reference._BAD_HEADER and bad.value == 0
        message[-1] ^= 1
        assert decode() == reference._BAD_CHECKSUM and bad.value == 1
        spec.config_hash ^= 1  # No codec that anyone gave.
        assert functions.payload_bytes(spec) == -1
        tensor = Tensor(spec=spec, values=values.ctypes.data, payload_bytes=size)
        assert (
            functions.encode_batch(tensor, 1, message.ctypes.data, 1, None) == reference._BAD_SPEC
        )


@on_ranks(1, launcher="tensorflow")
def test_a_class_that_is_defined_again() -> None:
    """Graphs that are traced after the second definition run the new class, as in a notebook."""
    operations()
    for scale in (1, 2):

        @dataclass(frozen=True)
        class Scaled(TwoBit):
            factor: ClassVar[int] = scale

            def dequantize(self, scales: Any, codes: Any, shape: Any) -> Any:
                return super().dequantize(scales, codes, shape) * np.float32(self.factor)

        spec = reference.reference_spec(Scaled(), (1,))
        assert reference._known[spec.codec, spec.config_hash].factor == scale


@on_ranks(1, launcher="tensorflow")
def test_what_needs_kernels() -> None:
    message = r"Compressor.device: expected one of .* for TwoBit"
    with installed(), pytest.raises(ValueError, match=message):
        hvdc.Compressor("twobit", device="GPU:0")
