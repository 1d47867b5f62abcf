"""Learning rates that change with the epoch, in the same way on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import keras

from hvd_compress.codecs.checks import check_number
from hvd_compress.keras.callbacks import parts_of


class LearningRateSchedule(keras.callbacks.Callback):
    """Sets the learning rate to ``initial_lr * multiplier(epoch)`` in some epochs.

    The arguments are those of Horovod's ``LearningRateScheduleCallback``, which Keras 3 cannot run. Of the
    parts of a ``MultiOptimizer``, the one with the highest rate gets this rate, and the others keep their
    ratios to it.

    Args:
        initial_lr: the rate to multiply.
        multiplier: a function of the epoch, which counts from 0; or a number, which is raised to the power
            of the number of epochs since ``start_epoch``.
        start_epoch: the first epoch in which the rate is set.
        end_epoch: the first epoch in which the rate is no longer set; None sets it in all later epochs.
        staircase: whether the rate changes only between epochs; otherwise it is set before every batch, or
            before every ``steps_per_execution`` batches, and the epochs passed to ``multiplier`` have a
            fraction.
        momentum_correction: whether the velocity of ``SGD`` with momentum, which contains the old learning
            rate, is multiplied by the ratio of the rates (Goyal et al. 2017, section 3).
        steps_per_epoch: the number of batches in an epoch; None asks Keras for it.

    Raises:
        TypeError: the optimizer was made with a schedule of Keras's; raised from ``fit``.
        ValueError: Keras does not know the number of batches, which is needed; raised from ``fit``.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: Callable[[float], float] | float,
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        who = type(self).__name__
        check_number(who, "initial_lr", initial_lr, 0.0, 1e30)
        super().__init__()
        self._initial = initial_lr
        self._multiplier = (
            multiplier
            if callable(multiplier)
            else lambda epoch: multiplier ** (epoch - start_epoch)
        )
        self._start, self._end = start_epoch, end_epoch
        self._staircase = staircase
        self._momentum_correction = momentum_correction
        self._steps_per_epoch = steps_per_epoch
        self._epoch = self._batch = 0
        self._ratios = [1.0]  # Of the optimizer's parts to the highest rate.

    def on_train_begin(self, logs: Any = None) -> None:
        """Checks that the number of batches is known, and notes how the rates of parts compare."""
        self._steps()
        rates = self._rates()
        if max(rates):  # A schedule that has come to 0 says nothing about the next training.
            self._ratios = [rate / max(rates) for rate in rates]
        elif len(self._ratios) != len(rates):
            self._ratios = [1.0] * len(rates)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Sets the rate of the epoch."""
        self._epoch = epoch
        if self._staircase and self._in_force():
            self._set(self._initial * self._multiplier(epoch))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Sets the rate of the batch."""
        self._batch = batch
        if not self._staircase and self._in_force():
            self._set(self._initial * self._multiplier(self._epoch + batch / self._steps()))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Sets the rate of the last batch in force, which stays."""
        # With steps_per_execution, Keras has told only of the first of several batches.
        last = self._steps() - 1
        if self._batch <= last <= batch and self._epoch + 1 == self._end:
            self.on_train_batch_begin(last)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the learning rate to ``logs``."""
        if logs is not None:
            logs["learning_rate"] = max(self._rates())

    def _rates(self) -> list[float]:
        return [float(part.learning_rate) for part in parts_of(self.model.optimizer)]

    def _in_force(self) -> bool:
        return self._start <= self._epoch and (self._end is None or self._epoch < self._end)

    def _steps(self) -> int:
        steps = self._steps_per_epoch or self.params.get("steps")
        if not steps and not self._staircase:
            raise ValueError(
                f"{type(self).__name__}: expected steps_per_epoch, got None, and Keras does not know how "
                f"many batches an epoch has"
            )
        return int(steps or 0)

    def _set(self, rate: float) -> None:
        for part, ratio in zip(parts_of(self.model.optimizer), self._ratios, strict=True):
            before = float(part.learning_rate)
            part.learning_rate = rate * ratio
            if self._momentum_correction and before and isinstance(part, keras.optimizers.SGD):
                for velocity in getattr(part, "momentums", ()):
                    velocity.assign(velocity * (float(part.learning_rate) / before))


class LearningRateWarmup(LearningRateSchedule):
    """Raises the learning rate from ``initial_lr / ranks`` to ``initial_lr`` in the first epochs.

    Follows Goyal et al. 2017, section 2.2. The arguments are those of Horovod's
    ``LearningRateWarmupCallback``, which Keras 3 cannot run.

    Args:
        initial_lr: the rate after the warm-up: where the batch grows with the number of ranks, one rank's
            rate times that number.
        warmup_epochs: the number of epochs in the warm-up.
        momentum_correction, steps_per_epoch: the same as in :class:`LearningRateSchedule`.
        verbose: whether rank 0 prints a line when the warm-up is over.
        process_set: the ranks; None is all ranks.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
        process_set: Any | None = None,
    ) -> None:
        check_number("LearningRateWarmup", "warmup_epochs", warmup_epochs, 1, 2**31, integer=True)
        process_set = hvd.global_process_set if process_set is None else process_set

        def multiplier(epoch: float) -> float:
            ranks = process_set.size()
            # The last batch of the warm-up has the full rate.
            done = (epoch + 1 / self._steps()) / warmup_epochs
            return (1 + done * (ranks - 1)) / ranks

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self._verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Prints that the warm-up is over, if asked to."""
        super().on_epoch_end(epoch, logs)
        if self._verbose and self._end == epoch + 1 and hvd.rank() == 0:
            print(f"\nEpoch {epoch + 1}: the learning rate has come to {max(self._rates()):g}")
