"""Horovod's collectives: in graphs, among a compressor's ranks, and outside of any graph."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_compress.exchanges import sum_as_gather
from hvd_compress.ranks import agreement, threads
from hvd_compress.ranks.errors import ExchangeError
from hvd_compress.ranks.values import check_lengths, deserialize, serialize, split
from hvd_compress.tensorflow.placement import HOST

TIMEOUT = 120.0
"""Seconds for the other ranks to make a compressor that plans, or to plan."""


def digest(value: Any, ranks: int) -> np.ndarray:
    """Numbers that tell values apart in a sum over ranks, shape=(3,), float32.

    If all ranks have the same value, the sum is the number of ranks times each rank's digest, exactly;
    otherwise it differs from that on every rank, but for one case in 2^36 with thousands of ranks.

    Args:
        value: fit for JSON.
        ranks: the number of ranks.
    """
    content = hashlib.blake2b(json.dumps(value).encode(), digest_size=24).digest()
    # Integers whose sums float32 holds.
    return (np.frombuffer(content, np.uint64) % np.uint64(2**24 // ranks)).astype(np.float32)


class GraphCollectives:
    """Named collectives in one process set.

    Args:
        process_set: the ranks, registered.
        prefix: the prefix of the collectives' names.
        on_gpu: whether messages come from a GPU.

    Attributes:
        process_set: the ranks.
        included: whether this process is one of them.
        rank: the number of this process among them, -1 if it is not one of them.
        size: the number of ranks.
    """

    def __init__(self, process_set: Any, prefix: str, on_gpu: bool = False) -> None:
        self.process_set = process_set
        self.included = bool(process_set.included())
        self.rank = process_set.rank() if self.included else -1
        self.size = process_set.size()
        self._prefix = prefix
        self._on_gpu = on_gpu

    def compare_now(self, settings: dict[str, Any], name: str, what: str) -> None:
        """Compares the ranks' settings, outside of any graph; waits for all of them.

        Args:
            settings: the settings that have to be the same on every rank.
            name: the name of the collective.
            what: the action of all ranks when they call this, for the message.

        Raises:
            ExchangeError: settings differ; or a rank has not called this within :data:`TIMEOUT` seconds.
        """
        line = agreement.serialize(settings)
        gathered: list[bytes | Exception] = []

        def gather() -> None:
            try:
                with tf.init_scope(), tf.device(HOST):
                    message = tf.constant(np.frombuffer(line, np.uint8))
                    gathered.append(self.all_gather(message, name).numpy().tobytes())
            except Exception as error:
                gathered.append(error)

        # A thread of a pool would keep the process from ending while it waits.
        threads.start(gather, stop=hvd.shutdown, name=f"hvd_compress {name}").join(TIMEOUT)
        if not gathered:
            raise ExchangeError(
                f"expected all {self.size} ranks to {what} within {TIMEOUT:g} seconds of each other, got "
                f"only some"
            )
        if isinstance(gathered[0], Exception):
            raise gathered[0]
        agreement.check(gathered[0])

    def all_reduce(self, values: tf.Tensor, name: str) -> tf.Tensor:
        """The sum of all ranks' values, which have the same shape and dtype on all ranks."""
        return hvd.allreduce(values, op=hvd.Sum, **self._called(name))

    def all_gather(self, message: tf.Tensor, name: str) -> tf.Tensor:
        """All ranks' messages, shape=(bytes,), one after the other in the order of ranks."""
        return hvd.allgather(message, **self._called(name))

    def all_gather_alike(self, message: tf.Tensor, length: int | None, name: str) -> tf.Tensor:
        """The same as :meth:`all_gather`, for messages whose length is the same on all ranks.

        It may run as a sum: see :mod:`hvd_compress.exchanges.sum_as_gather`.

        Args:
            message: shape=(bytes,), uint8.
            length: the least number of bytes, the same on all ranks; None if it is not known when the graph
                is made.
            name: the name of the collective.
        """
        if self._on_gpu or length is None or not sum_as_gather.as_sum(self.size, length):
            return self.all_gather(message, name)
        own = self.numbers(message, tf.int32)
        other = self.all_reduce(own, name) - own
        rows = [own, other] if self.rank == 0 else [other, own]
        return self.bytes(tf.concat(rows, 0))

    def all_to_all(
        self, message: tf.Tensor, sizes: tf.Tensor | Sequence[int], name: str
    ) -> tf.Tensor:
        """The messages of all ranks for this one, one after the other in the order of ranks.

        Args:
            message: this rank's messages for all ranks, one after the other, shape=(sum(sizes),).
            sizes: the number of bytes for each rank, shape=(size,), int32.
            name: the name of the collective.
        """
        splits = tf.convert_to_tensor(sizes, tf.int32)
        received, _ = hvd.alltoall(message, splits, **self._called(name))
        return received

    @staticmethod
    def numbers(message: tf.Tensor, dtype: tf.DType = tf.float32) -> tf.Tensor:
        """A message as 32-bit numbers, shape=(bytes / 4,)."""
        return tf.bitcast(tf.reshape(message, [-1, 4]), dtype)

    @staticmethod
    def bytes(numbers: tf.Tensor) -> tf.Tensor:
        """Numbers as a message, shape=(bytes,), uint8."""
        return tf.reshape(tf.bitcast(numbers, tf.uint8), [-1])

    def _called(self, name: str) -> dict[str, Any]:
        return called(f"{self._prefix}.{name}", self.process_set)


def called(name: str, process_set: Any) -> dict[str, Any]:
    """The arguments that give a collective of Horovod its name and its ranks.

    Args:
        name: the same on every rank.
        process_set: the ranks.
    """
    return {
        # hvd.elastic.run recognizes errors that TensorFlow reports for Horovod by this word. It does not
        # report any other error, and training ends as if it were complete.
        "name": f"{name}.HorovodAllreduce",
        "ignore_name_scope": True,
        "process_set": process_set,
    }


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


def join() -> int:
    """Says that this rank has no more data, and waits until all ranks have said so.

    The same as ``hvd.join()``, which with Horovod 0.28.1 and TensorFlow 2.21 waits only in its first call:
    Horovod does not register its operation as stateful, and TensorFlow keeps the result of the first call.

    Returns:
        The rank that joined last.
    """
    # A function traced anew holds an operation that has not been run.
    return int(tf.function(hvd.join, autograph=False)())
