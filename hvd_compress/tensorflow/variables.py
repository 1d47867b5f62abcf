"""One rank's values for the variables of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf


def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int = 0,
    process_set: Any | None = None,
    name: str = "hvd_compress.broadcast",
) -> None:
    """Gives all ranks one rank's values, outside of any graph; every rank has to call it.

    Horovod's own function names its collectives by their number in the process so far, which differs on a
    rank that was added later.

    Args:
        variables: variables of TensorFlow or Keras, the same ones on every rank.
        root_rank: the rank whose values are sent.
        process_set: the ranks that take part; None is all ranks.
        name: the prefix of the collectives' names.
    """
    ranks = hvd.global_process_set if process_set is None else process_set
    for position, variable in enumerate(variables):
        value = tf.convert_to_tensor(variable)
        sent = hvd.broadcast(
            known_to_horovod(value), root_rank, name=f"{name}.{position}", process_set=ranks
        )
        variable.assign(tf.cast(sent, value.dtype))


def known_to_horovod(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor in a dtype that Horovod can send; bfloat16 becomes float32."""
    return tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor
