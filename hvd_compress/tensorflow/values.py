"""The values that ranks send each other under Horovod and TensorFlow besides gradients."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_compress.ranks.values import check_lengths, deserialize, serialize, split
from hvd_compress.tensorflow.collectives import called
from hvd_compress.tensorflow.placement import HOST


def tell(value: Any, name: str, process_set: Any = hvd.global_process_set) -> list[Any]:
    """Returns every rank's value, in the order of ranks; outside of any graph.

    Args:
        value: this rank's value, fit for JSON (:func:`hvd_compress.ranks.values.serialize`).
        name: the name of the collectives, the same on every rank.
        process_set: the ranks.

    Raises:
        ExchangeError: a value is too long or was altered; raised on every rank.
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
