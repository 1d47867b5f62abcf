"""Metrics that are the same on every rank."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np

from hvd_compress.ranks.errors import ExchangeError
from hvd_compress.tensorflow.values import tell


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


def _shape(value: Any) -> str:
    """The shape of a metric that has several numbers, as text."""
    return str(np.shape(value)) if np.shape(value) else ""
