"""The same gradient, seed, rank and step give the same bytes as the torch frontend's encoder."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import torch

from hvd_compress.codecs import ErrorFeedback
from hvd_compress.engine.batches import Batches
from hvd_compress.engine.executors import Executors
from hvd_compress.engine.parameters import Slot
from hvd_compress.engine.plan import Common
from hvd_compress.exchanges.comm import Group
from hvd_compress.exchanges.routing import Route
from hvd_compress.exchanges.shards import Shards
from hvd_compress.tensorflow.buckets import GraphBucket
from hvd_compress.tensorflow.coder import Coder
from hvd_compress.tensorflow.exchanges.allgather import Allgather
from hvd_compress.tensorflow.exchanges.base import GraphExchange
from hvd_compress.tensorflow.exchanges.two_shot import TwoShot
from hvd_compress.tensorflow.slots import GraphSlot
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


def _route(row: Row, exchange: str) -> Route:
    """A codec with a fixed range takes no error feedback."""
    feedback = ErrorFeedback(0.0) if row.codec.saturates else row.feedback
    return Route(row.codec, feedback, exchange)


def _slots(route: Route, dtype: str) -> tuple[Slot, GraphSlot]:
    ours = GraphSlot(INDEX, tf.as_dtype(dtype), tf.TensorShape(SHAPE), route)
    return Slot(name="parameter", index=INDEX, parameter=torch.zeros(SHAPE), route=route), ours


def _batches() -> Batches:
    return Batches(Common(Executors(1), Group(RANK, RANKS), SEED))


class _Steps:
    """Steps of a bucket of one gradient, eagerly."""

    def __init__(self, exchange: type[GraphExchange], ranks: _Loopback, slot: GraphSlot) -> None:
        self._coder = Coder(SEED, 0, 2)
        self.exchange = exchange(ranks, self._coder)  # type: ignore[arg-type]
        self.bucket = GraphBucket(0, "allgather", scale=0.2)
        self.bucket.add(slot)
        self._coder.expect(0, 1)
        self._coder.lay_out(0, self.bucket, [slot], self.exchange.layouts([slot]))

    def encode(self, gradient: tf.Tensor) -> Any:
        """Begins a step, and encodes its gradient."""
        operations = self._coder.operations
        begun, _ = operations.hvdc_begin(self._coder.ledger, graph=0, first=True)
        handles = self.bucket.slots[0].handles
        token = self._coder.submit(self.bucket, 0, gradient, begun, handles)
        message = self.exchange.encode(self.bucket, token, tf.constant(True))
        self.bucket.encoded = message.encoded
        return message


class _Loopback:
    """A rank to which all others send what it would send them."""

    rank, size = RANK, RANKS

    def all_to_all(self, message: tf.Tensor, sizes: tf.Tensor, name: str) -> tf.Tensor:
        """Returns its own part, once for each rank."""
        return tf.tile(tf.split(message, sizes.numpy())[self.rank], [self.size])

    def all_gather_alike(self, message: tf.Tensor, length: int | None, name: str) -> tf.Tensor:
        """Returns its own message, once."""
        return message


def _bytes(array: Any) -> bytes:
    return array.numpy().tobytes()


def _assert_same_residual(ours: tf.Variable, expected: torch.Tensor | None) -> None:
    """Fails unless both have the same bytes; without error feedback, TensorFlow's one is empty."""
    assert _bytes(ours) == (b"" if expected is None else _bytes(expected))


PLAIN = [row for row in ROWS if not row.codec.varies]
"""TensorFlow's frontend has no entropy code, because messages in graphs have fixed lengths."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", PLAIN, ids=str)
def test_payloads_and_residuals(row: Row, dtype: str) -> None:
    slot, ours = _slots(_route(row, "allgather"), dtype)
    batches = _batches()
    steps = _Steps(Allgather, _Loopback(), ours)
    for step, (gradient, same) in enumerate(_gradients(dtype)):
        batch, exchanging = batches.make([slot], [gradient])
        expected = next(exchanging).message[: row.codec.payload_bytes(SHAPE)]
        batch.settle(False)
        message = steps.encode(same)
        assert int(ours.exchanges) == step + 1
        assert _bytes(message.message) == _bytes(expected)
        _assert_same_residual(ours.residual, slot.residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", [row for row in PLAIN if not row.codec.shaped], ids=str)
def test_two_shots(row: Row, dtype: str) -> None:
    route = _route(row, "two_shot")
    slot, ours = _slots(route, dtype)
    batches = _batches()
    steps = _Steps(TwoShot, _Loopback(), ours)
    assert Shards(slot.count, RANKS, INDEX).length(RANK)
    for gradient, same in _gradients(dtype):
        batch, exchanging = batches.make([slot], [gradient])
        sent = next(exchanging)
        message = steps.encode(same)
        assert _bytes(message.message) == _bytes(sent.message)
        part = sent.message.split(sent.sizes)[RANK]
        expected = exchanging.send(part.repeat(RANKS, 1)).message[: len(part)]
        batch.settle(False)
        assert _bytes(steps.exchange.send(steps.bucket, *message[:2])) == _bytes(expected)
        _assert_same_residual(ours.residual, slot.residual)
        _assert_same_residual(ours.owned, slot.owned.residual)
