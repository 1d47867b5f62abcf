"""Gradients that are encoded on a GPU, on real ranks.

The GPU is emulated (:mod:`tests.tensorflow.emulated`): the operations, their placement, what they put into
the stream and what they leave to the host are the real ones, and must come to what the CPU's come to,
bit for bit. On a GPU, ``make gpu-check`` runs the same on it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

import hvd_compress.tensorflow as hvdc
from hvd_compress.kernels import cuda_library
from hvd_compress.kernels.native import KernelError
from tests.contract import counters, residuals, results
from tests.contract.frontend import Frontend
from tests.contract.horovod_tensorflow import HorovodTensorFlow
from tests.ranks import on_ranks
from tests.tensorflow import (
    emulated,
    test_errors,
    test_gradients,
)
from tests.tensorflow.probes import THRESHOLD, exchange_with, targets


@pytest.fixture(autouse=True, scope="module")
def built() -> None:
    """The GPU, before any rank asks for it."""
    emulated.build()


def _bodies(*tests: Any) -> None:
    for test in tests:
        test.body()


def _contract(*held: Callable[[Frontend, str], None]) -> None:
    for one in held:
        for exchange in ("allgather", "two_shot"):
            one(HorovodTensorFlow(), exchange)


@on_ranks(2, launcher="tensorflow with a GPU")
def test_every_codec() -> None:
    _contract(results.every_codec)


@on_ranks(2, launcher="tensorflow with a GPU")
def test_gradients_of_every_kind() -> None:
    _contract(results.half_precision)
    _bodies(
        test_gradients.test_gradients_of_float64_go_as_they_are,
        test_gradients.test_shapes_that_tracing_does_not_know,
        test_gradients.test_empty_gradients,
    )


@on_ranks(2, launcher="tensorflow with a GPU")
def test_what_goes_uncompressed() -> None:
    """Steps of a warm-up, whose sums are scaled on the device."""
    _contract(
        results.uncompressed_at_first,
        results.every_form,
        results.each_tensor_its_own_route,
        counters.counters_follow_the_formulas,
    )


@on_ranks(2, launcher="tensorflow with a GPU")
def test_dropped_steps_and_checkpoints() -> None:
    """Steps that are dropped, and checkpoints of residuals that are on the device."""
    _contract(residuals.nonfinite_gradients, residuals.a_checkpoint_goes_on_bit_for_bit)
    residuals.an_average_that_overflows(HorovodTensorFlow(), "two_shot")
    for exchange in ("allgather", "two_shot"):
        residuals.a_sum_beyond_half_precision(HorovodTensorFlow(), exchange)


@on_ranks(2, launcher="tensorflow with a GPU")
def test_residuals_in_bfloat16() -> None:
    _contract(residuals.residuals_in_bfloat16)


def _devices(compressor: hvdc.Compressor) -> set[str]:
    return {
        kept.device.rpartition("device:")[2]
        for slot in compressor.slots
        for kept in (slot.residual, slot.owned)
    }


@on_ranks(2, launcher="tensorflow with a GPU")
def test_where_residuals_are() -> None:
    for exchange, device, expected in (
        ("allgather", None, "GPU:0"),
        ("two_shot", None, "GPU:0"),
        ("two_shot", "CPU:0", "CPU:0"),
    ):
        compressor = hvdc.ECQ(threshold=THRESHOLD, exchange=exchange, device=device)
        got = exchange_with(compressor, graph=True)(targets(hvd.rank(), 0))
        assert all(np.isfinite(gradient).all() for gradient in got)
        assert _devices(compressor) == {expected}
        assert all(slot.exchanges.device.endswith("CPU:0") for slot in compressor.slots)


@on_ranks(2, launcher="tensorflow with a GPU")
def test_an_altered_payload_is_nan_now_and_an_error_in_the_next_step() -> None:
    """If one rank got it, all ranks see the NaN, that rank keeps its residuals, and the job continues."""
    for where in ("before", "after"):
        compressor = test_errors._Altered(where, threshold=THRESHOLD)
        exchange = exchange_with(compressor, graph=True)
        exchange(targets(hvd.rank(), 0))
        compressor.flip.assign(16 if hvd.rank() == 1 else 0)
        before = [slot.residual.numpy() for slot in compressor.slots]
        got = exchange(targets(hvd.rank(), 1))
        wrong = where == "before" or hvd.rank() == 1
        assert np.isnan(got[0]).all() == wrong
        kept = [slot.residual.numpy() for slot in compressor.slots]
        assert any(map(len, before)) and all(map(np.array_equal, before, kept)) == wrong
        assert all(np.isfinite(gradient).all() for gradient in got[1:])
        compressor.flip.assign(0)
        expected = r"on rank 1: gradient.0: expected rank \d's payload as it was sent, .* NaN"
        with pytest.raises(tf.errors.OpError, match=expected):
            exchange(targets(hvd.rank(), 2))
        test_errors._afresh(exchange)


@on_ranks(2, launcher="tensorflow with a GPU")
def test_a_gradient_that_cannot_be_encoded() -> None:
    """The other rank's result is NaN: only the device sees that no payload came."""
    compressor = hvdc.OneBit(threshold=THRESHOLD)
    variable = tf.Variable(tf.zeros([3000]), shape=tf.TensorShape([None]))

    @tf.function(input_signature=[tf.TensorSpec([None])])
    def exchange(value: tf.Tensor) -> tf.Tensor:
        variable.assign(tf.zeros_like(value))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * value)
        tape = hvd.DistributedGradientTape(tape, compression=compressor)
        return tape.gradient(loss, [variable])[0]

    exchange(tf.ones([3000]))
    if hvd.rank() == 1:
        with pytest.raises(tf.errors.DataLossError, match=r"expected a gradient of 3000 elements"):
            exchange(tf.ones([2990]))
    else:
        assert np.isnan(exchange(tf.ones([3000]))).all()
    with pytest.raises(tf.errors.OpError, match=r"on rank 0: gradient.0: expected rank 1's pay"):
        exchange(tf.ones([3000]))


@on_ranks(2, launcher="tensorflow with a GPU")
def test_a_rank_that_joins() -> None:
    residuals.a_rank_that_joins(HorovodTensorFlow(), "allgather")


def _refused(device: str | None, **options: Any) -> str:
    with pytest.raises((ValueError, KernelError)) as error:
        hvdc.OneBit(device=device, **options)
    return str(error.value)


@on_ranks(1, launcher="tensorflow with a GPU")
def test_devices_that_cannot_be() -> None:
    assert re.search(r"expected one of \['CPU:0', 'GPU:0'.*\], got 'GPU:99'", _refused("GPU:99"))
    with mock.patch.object(cuda_library, "LIBRARY", Path("libhvdc_cuda.so")):
        remedy = "`HVDC_CUDA=on pip install .`, .* with device='CPU:0'"
        assert re.search(remedy, _refused(None))
        hvdc.OneBit(device="CPU:0")
