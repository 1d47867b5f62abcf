"""Elastic Horovod with compressed gradients under Keras 3."""

from __future__ import annotations

from typing import Any

import keras

from hvd_compress.codecs.checks import check_number
from hvd_compress.keras.callbacks import accumulated, shared_state
from hvd_compress.keras.optimizer import DistributedOptimizer, distribute_again, is_distributed
from hvd_compress.tensorflow.elastic import AnyCompressor, TensorFlowState

_NAME = "hvd_compress.keras.elastic"


class KerasState(TensorFlowState):
    """The state of a Keras 3 model that elastic Horovod trains with a compressor.

    Replaces ``hvd.elastic.KerasState``, which fails under Keras 3. The function that elastic Horovod runs
    makes a new compressor each time it is called, and gives it to :meth:`begin`::

        model.compile(optimizer=keras.optimizers.SGD(0.1), loss=..., jit_compile=False)
        state = KerasState(model, epoch=0)

        @hvd.elastic.run
        def train(state):
            state.begin(hvdc.OneBit())
            model.fit(..., initial_epoch=state.epoch, callbacks=[CommitState(state)])

    Args:
        model: a built model, compiled with an optimizer of Keras's own, to which :meth:`begin` adds the
            exchange of gradients.
        share_residuals: the same as in :class:`~hvd_compress.tensorflow.elastic.TensorFlowState`.
        kwargs: the same as there.

    Attributes:
        model: the model.

    Raises:
        ValueError: the model is not built, or not compiled, or its optimizer is already distributed.
    """

    def __init__(self, model: keras.Model, *, share_residuals: bool = False, **kwargs: Any) -> None:
        optimizer = getattr(model, "optimizer", None)
        if not model.built or optimizer is None:
            raise ValueError(
                "KerasState: expected a model that is built and compiled, got one that is not: call "
                "model.build(input_shape) and model.compile() first"
            )
        if is_distributed(optimizer):
            raise ValueError(
                "KerasState: expected a model compiled with an optimizer of Keras's own, got a "
                "DistributedOptimizer, which state.begin() will make of it"
            )
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        self.model = model
        variables = [*model.weights, *shared_state(optimizer)]
        super().__init__(variables, share_residuals=share_residuals, **kwargs)

    def restore(self) -> None:
        """Goes back to the last commit, or to the beginning."""
        super().restore()
        for variable, value in zip(
            accumulated(self.model.optimizer), self._accumulated, strict=True
        ):
            variable.assign(value)

    def _keep_variables(self) -> None:
        super()._keep_variables()
        # Each rank's own, so that they are not among the variables that all ranks share.
        self._accumulated = [
            keras.ops.convert_to_numpy(one).copy() for one in accumulated(self.model.optimizer)
        ]

    def begin(self, compressor: AnyCompressor, **options: Any) -> AnyCompressor:
        """Makes the model's optimizer use a new compressor; all ranks call it before ``fit()``.

        Args:
            compressor: the same as in :class:`~hvd_compress.tensorflow.elastic.TensorFlowState`.
            options: options of :func:`~hvd_compress.keras.DistributedOptimizer`, used in the first call.

        Returns:
            The compressor, which continues with what this rank has not sent.

        Raises:
            TypeError, ValueError: the same as from both of them.
        """
        super().begin(compressor)
        optimizer = self.model.optimizer
        if is_distributed(optimizer):
            distribute_again(optimizer, compressor, _NAME)
        else:
            DistributedOptimizer(optimizer, compressor, name=_NAME, **options)
        self.model.train_function = None  # Traced with what was there before.
        return compressor


class CommitState(keras.callbacks.Callback):
    """Commits an elastic state at the end of each epoch, and within epochs if asked to.

    ``state.epoch``, which the state needs, is the number of complete epochs. Where ranks go back to a
    commit, ``fit()`` begins that epoch again, with the weights of the commit.

    Args:
        state: a state with an ``epoch``.
        batches: the number of batches of an epoch after which to commit as well; None commits only at the
            end of an epoch.

    Raises:
        ValueError: the state has no ``epoch``.
    """

    def __init__(self, state: KerasState, batches: int | None = None) -> None:
        super().__init__()
        if batches is not None:
            check_number("CommitState", "batches", batches, 1, 2**62, integer=True)
        if not hasattr(state, "epoch"):
            raise ValueError(
                "CommitState: expected a state with an epoch, as KerasState(model, epoch=0), got one "
                "without"
            )
        self._state, self._batches = state, batches

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commits after every ``batches`` batches."""
        if self._batches and (batch + 1) % self._batches == 0:
            self._state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commits, and notes that the epoch is complete."""
        self._state.epoch = epoch + 1
        self._state.commit()
