"""The same gradient, seed, rank and step give the same bytes as the torch frontend's encoder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import torch

from hvd_compress.codecs import LevelCodec, NoiseKey
from hvd_compress.exchange import integer_sum
from hvd_compress.exchange.routing import Route
from hvd_compress.exchange.shards import Shards
from hvd_compress.kernels.cpu_levels import CpuLevels
from hvd_compress.tensorflow.coder import Coder, Encoded
from hvd_compress.tensorflow.exchanges.integer_sum import IntegerSum
from hvd_compress.tensorflow.exchanges.two_shot import TwoShot
from hvd_compress.tensorflow.native import operations
from hvd_compress.tensorflow.slots import Slot as GraphSlot
from hvd_compress.torch_common.encoder import Encoder
from hvd_compress.torch_common.executors import Executors
from hvd_compress.torch_common.shots import Shots, owned_of
from hvd_compress.torch_common.slots import Slot
from tests.codecs.rows import ROWS, Row

SHAPE = (37, 5, 29)
"""Six grains, the last one short."""
SEED, RANK, RANKS, INDEX, STEPS = 11, 3, 5, 2, 3
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def _gradients(dtype: str) -> list[tuple[torch.Tensor, tf.Tensor]]:
    """The same numbers for both, one pair a step."""
    generator = np.random.default_rng(5)
    pairs = []
    for _ in range(STEPS):
        numbers = generator.standard_normal(SHAPE).astype(np.float32)
        numbers.reshape(-1)[:3] = (0.0, -0.0, 1e-40)
        pairs.append((torch.from_numpy(numbers).to(DTYPES[dtype]), tf.cast(numbers, dtype)))
    return pairs


def _slots(route: Route, dtype: str) -> tuple[Slot, GraphSlot]:
    ours = GraphSlot(INDEX, tf.as_dtype(dtype), tf.TensorShape(SHAPE), route)
    return Slot("parameter", INDEX, torch.zeros(SHAPE), route), ours


def _coder() -> Coder:
    ops = operations()
    return Coder(ops, ops.hvdc_ledger(), SEED, 0, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_payloads_and_residuals(row: Row, dtype: str) -> None:
    slot, ours = _slots(Route(row.codec, row.feedback), dtype)
    encoder = Encoder(Executors(1), SEED, RANK, None)
    coder = _coder()
    for step, (gradient, same) in enumerate(_gradients(dtype)):
        expected = torch.empty(row.codec.payload_bytes(SHAPE), dtype=torch.uint8)
        encoder.encode(slot, gradient, expected)
        payload, position = coder.encode(ours, same, tf.ones([1]), streams=[RANK], ranks=RANKS)
        assert int(position) == step
        assert payload.numpy().tobytes() == expected.numpy().tobytes()
        assert ours.residual.numpy().tobytes() == slot.residual.numpy().tobytes()


class _Loopback:
    """A rank to which all others send what it would send them."""

    rank, size = RANK, RANKS

    def distribute(self, message: tf.Tensor, sizes: Sequence[int], name: str) -> tf.Tensor:
        """Its own part, once for each rank."""
        return tf.tile(tf.split(message, sizes)[self.rank], [self.size])

    def gather(self, message: tf.Tensor, name: str) -> tf.Tensor:
        """Its own message, once."""
        return message

    def gather_alike(self, message: tf.Tensor, length: int | None, name: str) -> tf.Tensor:
        """Its own message, once."""
        return message

    def maximum(self, values: tf.Tensor, name: str) -> tf.Tensor:
        """Larger than its own."""
        return 2 * values

    def sum(self, values: tf.Tensor, name: str) -> tf.Tensor:
        """Its own, once for each rank."""
        return self.size * values


def _bytes(array: Any) -> bytes:
    return array.numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", [row for row in ROWS if not row.codec.shaped], ids=str)
def test_two_shots(row: Row, dtype: str) -> None:
    route = Route(row.codec, row.feedback, "two_shot")
    slot, ours = _slots(route, dtype)
    encoder = Encoder(Executors(1), SEED, RANK, None)
    exchange = TwoShot(_Loopback(), _coder())  # type: ignore[arg-type]
    assert Shards(slot.count, RANKS, INDEX).length(RANK)
    for gradient, same in _gradients(dtype):
        encoder.own(slot, gradient, owned_of(slot, RANK, RANKS))
        encoder.residual(slot, gradient.device)
        shots = Shots(encoder, RANKS, slot, gradient)
        message, step = exchange.encode(ours, same, tf.ones([1]))
        assert message.numpy().tobytes() == shots.message.numpy().tobytes()
        part = shots.message.split(shots.sizes)[RANK]
        expected = shots.average(part.repeat(RANKS, 1))
        assert _bytes(exchange.send(ours, same, message, step)) == _bytes(expected)
        assert ours.residual.numpy().tobytes() == slot.residual.numpy().tobytes()
        assert ours.owned.numpy().tobytes() == slot.owned.residual.numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", [row for row in ROWS if isinstance(row.codec, LevelCodec)], ids=str)
def test_integer_sums(row: Row, dtype: str) -> None:
    codec, feedback = row.codec, row.feedback
    assert isinstance(codec, LevelCodec)
    ranks = _Loopback()
    ranks.size = min(RANKS, integer_sum.most_ranks(codec))
    bits = integer_sum.bits_of(codec, ranks.size)
    _, ours = _slots(Route(codec, feedback, "integer_sum"), dtype)
    exchange, kernels = IntegerSum(ranks, _coder()), CpuLevels()  # type: ignore[arg-type]
    residual = torch.zeros(math.prod(SHAPE))
    norms = torch.empty(codec.layout(SHAPE).scales)
    words = torch.empty(codec.level_words(SHAPE, bits), dtype=torch.int32)
    for number, (gradient, same) in enumerate(_gradients(dtype)):
        flat, kept = gradient.reshape(-1), {"feedback": feedback, "residual": residual}
        message, step = exchange.encode(ours, same, tf.ones([1]))
        kernels.norms(codec, SHAPE, flat, norms, **kept)
        assert _bytes(message) == _bytes(norms)
        norms *= 2
        noise = NoiseKey(SEED, RANK, INDEX, number)
        kernels.encode(codec, SHAPE, flat, norms, words, bits=bits, noise=noise, **kept)
        total = ranks.size * torch.cat([words, torch.ones(1, dtype=torch.int32)])
        got = exchange.send(ours, same, message, step)
        assert _bytes(got) == _bytes(norms) + _bytes(total)
        assert _bytes(ours.residual) == _bytes(residual)
        encoded = Encoded(ours, same, step, tf.constant(True), got)
        result = torch.empty_like(gradient)
        kernels.decode(codec, SHAPE, norms, total[:-1], result.view(-1), bits=bits, scale=0.2)
        assert _bytes(exchange.decode(encoded, tf.ones([1]), 0.2)) == _bytes(
            result.view(torch.uint8)
        )
