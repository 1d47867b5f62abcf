"""One rank's values for the variables of all of them."""

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
    """Gives all ranks one rank's values, outside of any graph; every rank has to come here.

    Horovod's own names its collectives by how many the process has had before, which a rank that came later
    counts otherwise.

    Args:
        variables: TensorFlow's or Keras's, the same ones on every rank.
        root_rank: whose.
        process_set: among which ranks; None is all.
        name: what the collectives' names begin with.
    """
    ranks = hvd.global_process_set if process_set is None else process_set
    for position, variable in enumerate(variables):
        value = tf.convert_to_tensor(variable)
        sent = hvd.broadcast(
            known_to_horovod(value), root_rank, name=f"{name}.{position}", process_set=ranks
        )
        variable.assign(tf.cast(sent, value.dtype))


def known_to_horovod(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor in a type that Horovod can send, which bfloat16 is not."""
    return tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor
