"""What ranks tell each other under Horovod and TensorFlow beside their gradients."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_compress.ranks.values import check_lengths, deserialize, serialize, split
from hvd_compress.tensorflow.collectives import called
from hvd_compress.tensorflow.placement import HOST


def tell(value: Any, name: str, process_set: Any = hvd.global_process_set) -> list[Any]:
    """Every rank's value, by rank; outside of any graph.

    Args:
        value: this rank's, fit for JSON (:func:`hvd_compress.ranks.values.serialize`).
        name: the same on every rank.
        process_set: the ranks.

    Raises:
        ExchangeError: on every rank, a value is too long, or was altered.
    """

    def gather(own: np.ndarray, what: str) -> np.ndarray:
        with tf.init_scope(), tf.device(HOST):
            options = called(f"{name}.{what}", process_set)
            gathered: np.ndarray = hvd.allgather(tf.constant(own), **options).numpy()
            return gathered

    content = serialize(value)
    lengths = gather(np.array([len(content)]), "length").tolist()
    check_lengths(lengths)
    gathered = gather(np.frombuffer(content, np.uint8), "value").tobytes()
    return deserialize(split(gathered, lengths))
