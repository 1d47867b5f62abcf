"""Elastic Horovod with compressed gradients in TensorFlow 2 and Keras 3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.common.elastic import ObjectState
from horovod.common.exceptions import HorovodInternalError

from hvd_compress.codecs.calls import expect_instance
from hvd_compress.elastic.state import ResidualState
from hvd_compress.tensorflow.collectives import broadcast_variables
from hvd_compress.tensorflow.commits import TensorFlowCommits
from hvd_compress.tensorflow.compressor import Compressor

AnyCompressor = TypeVar("AnyCompressor", bound=Compressor)


class _VariableState(ObjectState):
    """The state of variables and other objects.

    Args:
        variables: the variables, in the same order on every rank.
        kwargs: the other objects.
    """

    def __init__(self, variables: Sequence[Any], **kwargs: Any) -> None:
        self._variables = list(variables)
        super().__init__(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, **kwargs)
        self._keep_variables()

    def save(self) -> None:
        self._keep_variables()
        super().save()

    def restore(self) -> None:
        for variable, value in zip(self._variables, self._values, strict=True):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        try:
            broadcast_variables(self._variables, name="hvd_compress.elastic.variable")
            super().sync()
        except tf.errors.UnknownError as error:  # hvd.elastic.run does not expect it here.
            raise HorovodInternalError(str(error)) from error
        self._keep_variables()

    def _keep_variables(self) -> None:
        # Not a view: a variable's memory is written again.
        self._values = [tf.identity(tf.convert_to_tensor(one)).numpy() for one in self._variables]


class TensorFlowState(ResidualState, _VariableState):
    """The state of elastic training with a compressor, for ``hvd.elastic.run``.

    Replaces ``hvd.elastic.TensorFlowState``, with which a new rank and those that stayed wait for each
    other forever, and ``hvd.elastic.TensorFlowKerasState``, which fails under Keras 3.

    Graphs hold a rank's number, so the function that elastic Horovod runs makes a new compressor, and
    traces its steps again, each time it is called::

        @hvd.elastic.run
        def train(state):
            compressor = state.begin(hvdc.OneBit())

            @tf.function
            def step(inputs, labels): ...

    :meth:`begin` gives the new compressor what the rank has not sent. Each rank begins with the same state
    as in :class:`hvd_compress.torch.elastic.TorchState`.

    Args:
        variables: the variables of the model and the optimizer, TensorFlow's or Keras's, built, and in the
            same order on every rank.
        share_residuals: whether each commit adds up what all ranks have not sent, in an all_reduce of the
            model's size in float32.
        kwargs: objects that all ranks share, as for ``hvd.elastic.TensorFlowState``; they become attributes
            of the state.
    """

    def __init__(
        self, variables: Sequence[Any], *, share_residuals: bool = False, **kwargs: Any
    ) -> None:
        self._share_residuals = share_residuals
        self._commits: list[TensorFlowCommits] = []
        self._begun = 0
        super().__init__(variables, **kwargs)

    def begin(self, compressor: AnyCompressor) -> AnyCompressor:
        """Gives a new compressor what this rank has not sent; all ranks call it before their first step.

        With several compressors, call it for each of them, in the same order each time.

        Args:
            compressor: a compressor for all ranks of the job, with which nothing has been traced.

        Returns:
            The compressor.

        Raises:
            TypeError: the argument is not a compressor.
            ValueError: the compressor has a process set, or it has been used.
        """
        expect_instance("TensorFlowState.begin", compressor, Compressor, "state.begin({})")
        if self._begun == len(self._commits):
            self._commits.append(TensorFlowCommits())
        self._commits[self._begun].continue_with(compressor)
        self._begun += 1
        return compressor

    def commit(self) -> None:
        """Keeps the state in memory, and checks whether hosts were added or removed; a call of all ranks.

        Raises:
            HostsUpdatedInterrupt: hosts were added or removed; ``hvd.elastic.run`` handles it.
            ValueError: :meth:`begin` was not called since the last reset.
        """
        if not self._begun or self._begun < len(self._commits):
            raise ValueError(
                f"TensorFlowState.commit: expected state.begin(compressor) at the start of the function "
                f"that hvd.elastic.run runs, got {self._begun} calls of it since the last reset"
            )
        super().commit()

    def reset(self) -> None:
        """Called by ``hvd.elastic.run`` when Horovod has been initialized again."""
        super().reset()
        self._begun = 0
