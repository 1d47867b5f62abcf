"""Callbacks for Keras 3: ranks start alike, are seen to stay alike, and have the same metrics."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np

import hvd_compress.tensorflow
from hvd_compress.codecs.checks import check_number
from hvd_compress.ranks.errors import ExchangeError
from hvd_compress.tensorflow.collectives import broadcast_variables, tell


class BroadcastVariables(keras.callbacks.Callback):
    """Gives all ranks one rank's weights and optimizer state, before the first batch.

    If the model is built only by its first batch, this happens after that batch. The states of random
    generators, which should differ between ranks, and of metrics are not changed.

    Args:
        root_rank: the rank whose values are sent.
        process_set: the ranks that take part; None is all ranks.
    """

    def __init__(self, root_rank: int = 0, process_set: Any | None = None) -> None:
        super().__init__()
        self._root_rank = root_rank
        self._process_set = hvd.global_process_set if process_set is None else process_set
        self._done = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcasts the variables, if the model is built."""
        self._done = False
        # A subclass of Model may say that it is built when its layers are not, or are not made yet.
        if self.model.weights and all(layer.built for layer in self.model._flatten_layers()):
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcasts the variables that the first batch has made."""
        if not self._done:
            self._broadcast()

    def _broadcast(self) -> None:
        if not self._process_set.included():
            return
        optimizer = self.model.optimizer
        if not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        variables = [*self.model.weights, *shared_state(optimizer)]
        broadcast_variables(variables, self._root_rank, self._process_set)
        self._done = True


class CompareWeights(keras.callbacks.Callback):
    """Stops the training on every rank if the ranks' weights, or their learning rates, differ.

    Compares after the first updates, and at the end of each epoch, where it also compares whether the
    training is to stop. Works with any optimizer and finds any cause: gradients that are not exchanged,
    weights that were not broadcast, callbacks that decide by one rank's metrics. Trainable weights are
    compared bit for bit, by digests of 8 bytes each; moving averages, such as those of batch normalization,
    belong to each rank and are not compared. Put this callback after all others in the list.

    Args:
        steps: the number of first updates after which to compare.
        process_set: the ranks to compare; None is all ranks.

    Raises:
        ExchangeError: values differ between ranks; raised from ``fit`` on every rank, with the values and
            the ranks in the message.
    """

    def __init__(self, steps: int = 3, process_set: Any | None = None) -> None:
        check_number("CompareWeights", "steps", steps, 1, 2**31, integer=True)
        super().__init__()
        self._steps = steps
        self._process_set = hvd.global_process_set if process_set is None else process_set
        self._batches = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts the count of batches at zero."""
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Compares after each of the first updates; raises ``ExchangeError`` on every rank."""
        # Counted here and not by the optimizer, whose count may differ where the weights do.
        self._batches += 1
        if self._batches <= self._steps * _batches_an_update(self.model.optimizer):
            self._compare(f"batch {self._batches}")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Compares at the end of an epoch; raises ``ExchangeError`` on every rank."""
        self._compare(f"epoch {epoch + 1}")

    def _compare(self, when: str) -> None:
        if not self._process_set.included():
            return
        variables = self.model.trainable_variables
        own_rates = [float(part.learning_rate) for part in parts_of(self.model.optimizer)]
        own = [
            *(_digest(v.numpy()) for v in variables),
            str(own_rates),
            str(self.model.stop_training),
        ]
        ranks = tell(own, "hvd_compress.weights", self._process_set)
        counts = [len(one) - 2 for one in ranks]
        if len(set(counts)) > 1:
            raise ExchangeError(
                f"expected the same model on every rank, got {counts} trainable variables, by rank"
            )
        *weights, rates, stops = zip(*ranks, strict=True)
        for variable, column in zip(variables, weights, strict=True):
            if len(set(column)) > 1:
                raise ExchangeError(
                    f"expected the same weights on every rank behind {when}, but {variable.path} differs: "
                    f"{_groups(column)}. Is the optimizer hvd_compress.keras.DistributedOptimizer (under "
                    f"Keras 3, Horovod's own exchanges nothing), and were the weights broadcast "
                    f"(BroadcastVariables)?"
                )
        for what, column in (("learning rate", rates), ("decision to stop", stops)):
            if len(set(column)) > 1:
                raise ExchangeError(
                    f"expected the same {what} on every rank behind {when}, but they differ: "
                    f"{_groups(column)}. Callbacks that decide by metrics need the ranks' average: put "
                    f"MetricAverage before them"
                )


class MetricAverage(keras.callbacks.Callback):
    """Averages the metrics of an epoch over the ranks, for all callbacks that follow in the list.

    Each rank computes metrics on its own samples. Callbacks that decide by them, such as
    ``ReduceLROnPlateau``, ``EarlyStopping`` and ``ModelCheckpoint``, decide differently on each rank unless
    this callback precedes them.

    Args:
        process_set: the ranks; None is all ranks.

    Raises:
        ExchangeError: the ranks have different metrics, for example because only one of them validates;
            raised from ``fit`` on every rank.
    """

    def __init__(self, process_set: Any | None = None) -> None:
        super().__init__()
        self._process_set = hvd.global_process_set if process_set is None else process_set

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes the averages to ``logs``."""
        if logs is None or not self._process_set.included():
            return
        own = {name: np.asarray(value, float).tolist() for name, value in logs.items()}
        ranks = tell(own, "hvd_compress.metrics", self._process_set)
        names = [sorted(name + _shape(value) for name, value in one.items()) for one in ranks]
        if any(one != names[0] for one in names):
            raise ExchangeError(
                f"expected the same metrics on every rank behind epoch {epoch + 1}, got by rank {names}: "
                f"validate on all of them, or on none"
            )
        for name, value in own.items():
            values = [one[name] for one in ranks]
            # Equal ones, as learning rates, stay as they are: a division could round them.
            mean = value if all(one == value for one in values) else np.mean(values, axis=0)
            logs[name] = np.asarray(mean) if np.ndim(mean) else float(mean)


class CompressionMetrics(keras.callbacks.Callback):
    """Adds a compressor's metrics to those of each epoch, for all callbacks that follow in the list.

    They are those of :meth:`hvd_compress.tensorflow.Compressor.metrics`, of this rank. ``TensorBoard``,
    ``CSVLogger`` and Weights & Biases' callbacks write them where they follow this one.

    Args:
        compressor: the compressor of ``DistributedOptimizer(compression=compressor)``.
    """

    def __init__(self, compressor: hvd_compress.tensorflow.Compressor) -> None:
        super().__init__()
        self._compressor = compressor

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes the metrics to ``logs``."""
        if logs is not None:
            logs.update(self._compressor.metrics())


def shared_state(optimizer: Any) -> list[Any]:
    """An optimizer's variables without the gradients that a rank has accumulated."""
    own = set(map(id, accumulated(optimizer)))
    return [v for v in optimizer.variables if id(v) not in own]


def accumulated(optimizer: Any) -> list[Any]:
    """The variables in which an optimizer accumulates a rank's own gradients."""
    return [v for part in parts_of(optimizer) for v in getattr(part, "_accumulated_gradients", ())]


def _batches_an_update(optimizer: Any) -> int:
    steps = (getattr(part, "gradient_accumulation_steps", None) for part in parts_of(optimizer))
    return max(n or 1 for n in steps)


def parts_of(optimizer: Any) -> list[Any]:
    """The optimizers that update variables: this one, or those in a LossScale- or MultiOptimizer."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return getattr(inner, "_inner_optimizers", None) or [inner]


def _digest(values: np.ndarray) -> str:
    content = np.ascontiguousarray(values).tobytes()
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _groups(values: Sequence[str]) -> str:
    """The ranks that have each value, as text."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ", ".join(
        f"{value} on rank {', '.join(map(str, held))}" for value, held in ranks.items()
    )


def _shape(value: Any) -> str:
    """The shape of a metric that has several numbers, as text."""
    return str(np.shape(value)) if np.shape(value) else ""
