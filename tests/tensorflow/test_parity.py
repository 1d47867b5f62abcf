"""The same gradient, seed, rank and step give the same bytes as the torch frontend's encoder."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import torch

from hvd_compress.exchange.routing import Route
from hvd_compress.tensorflow.native import operations, spec_bytes
from hvd_compress.tensorflow.slots import Slot as GraphSlot
from hvd_compress.torch_common.encoder import Encoder
from hvd_compress.torch_common.executors import Executors
from hvd_compress.torch_common.slots import Slot
from tests.codecs.rows import ROWS, Row

SHAPE = (37, 5, 29)
SEED, RANK, RANKS, INDEX, STEPS = 11, 3, 5, 2, 3
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_payloads_and_residuals(row: Row, dtype: str) -> None:
    route = Route(row.codec, row.feedback)
    slot = Slot("parameter", INDEX, torch.zeros(SHAPE), route)
    encoder = Encoder(Executors(1), SEED, RANK, None)
    ours = GraphSlot(INDEX, tf.as_dtype(dtype), tf.TensorShape(SHAPE), route)
    ops = operations()
    ledger = ops.hvdc_ledger()
    generator = np.random.default_rng(5)
    for step in range(STEPS):
        numbers = generator.standard_normal(SHAPE).astype(np.float32)
        numbers.reshape(-1)[:3] = (0.0, -0.0, 1e-40)
        gradient = torch.from_numpy(numbers).to(DTYPES[dtype])
        expected = torch.empty(row.codec.payload_bytes(SHAPE), dtype=torch.uint8)
        encoder.encode(slot, gradient, expected)
        payload, position = ops.hvdc_encode(
            tf.cast(numbers, dtype),
            tf.ones([1]),
            ours.residual.handle,
            ours.exchanges.handle,
            ledger,
            label="gradient",
            spec=spec_bytes(row.codec),
            tensor=INDEX,
            threads=2,
            alpha=row.feedback.alpha,
            beta=row.feedback.beta,
            seed=SEED,
            rank=RANK,
            ranks=RANKS,
            warmup=0,
        )
        assert int(position) == step
        assert payload.numpy().tobytes() == expected.numpy().tobytes()
        assert ours.residual.numpy().tobytes() == slot.residual.numpy().tobytes()
