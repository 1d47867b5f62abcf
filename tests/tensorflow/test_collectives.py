"""The data that the collectives transfer."""

from __future__ import annotations

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_compress.tensorflow.collectives import GraphCollectives
from tests.ranks import on_ranks


@on_ranks(2, launcher="tensorflow")
def test_any_bytes_come_through_a_sum() -> None:
    collectives = GraphCollectives(hvd.global_process_set, "bytes")
    messages = np.random.default_rng(1).integers(0, 256, (2, 2**20), np.uint8)
    messages[:, :1024], messages[0, 1024:2048] = 255, 0

    @tf.function
    def gather(message: tf.Tensor) -> tf.Tensor:
        return collectives.all_gather_alike(message, len(message), "all")

    message = tf.constant(messages[hvd.rank()])
    assert np.array_equal(gather(message), messages.reshape(-1))
    kinds = {node.type for node in gather.get_concrete_function(message).graph.get_operations()}
    assert "HorovodAllreduce" in kinds
    assert "HorovodAllgather" not in kinds
