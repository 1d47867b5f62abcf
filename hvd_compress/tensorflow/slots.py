"""The state that a compressor keeps for one variable's gradient."""

from __future__ import annotations

import re

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from hvd_compress.exchanges.routing import Route
from hvd_compress.ranks.errors import ExchangeError
from hvd_compress.tensorflow.placement import HOST


class GraphSlot(tf.Module):
    """The state of one gradient, in variables, which checkpoints save.

    Attributes:
        index: its position among the compressor's gradients, in the order of their first exchanges; its
            number in the noise and in the order of owners' parts.
        label: its name in patterns and messages.
        variable_name: the name of its variable.
        place: the position of its variable among the sources of the call in which it was first exchanged.
        call: the number of the call of Horovod in which it was first exchanged.
        spec, dtype: its spec, and its dtype, when first traced.
        kind: the spec as text, with None for unknown dimensions.
        shape: its shape when first traced; None where a dimension was unknown.
        route: the route by which it travels.
        scale: the factor of the ranks' sum, from the operation that was traced last; None before, and for a
            gradient that travels uncompressed.
        residual: the part that has been computed but not sent, shape=(n,), in the ``residual_dtype`` of the
            route's feedback; empty before the first step.
        owned: the residual of the average of the part that this rank owns, shape=(n_owned,), of the same
            dtype; empty where the exchange has no owners.
        exchanges: the number of exchanges so far, shape=(), int64.
    """

    def __init__(
        self,
        index: int,
        dtype: tf.DType,
        shape: tf.TensorShape,
        route: Route,
        device: str = HOST,
        label: str | None = None,
    ) -> None:
        super().__init__(name=f"gradient_{index}")
        self.index = index
        self.label = label or f"gradient.{index}"
        self.variable_name, self.place, self.call = "", 0, 0
        self.spec, self.kind = tf.TensorSpec(shape, dtype), _kind(dtype, shape)
        self.dtype = dtype
        self.shape = tuple(shape.as_list()) if shape.is_fully_defined() else None
        self.route = route
        self.scale: float | None = None
        with tf.device(device):
            kept = tf.as_dtype(route.feedback.residual_dtype)
            self.residual, self.owned = _numbers("residual", kept), _numbers("owned", kept)
        with tf.device(HOST):
            self.exchanges = ResourceVariable(
                tf.zeros([], tf.int64), trainable=False, name="exchanges"
            )

    @property
    def kept(self) -> list[ResourceVariable]:
        """All residuals."""
        return [self.residual, self.owned]

    def begin_with(self, residual: np.ndarray, owned: np.ndarray) -> None:
        """Sets the residuals, float32; bfloat16 ones become the nearest numbers."""
        for kept, numbers in zip(self.kept, (residual, owned), strict=True):
            kept.assign(tf.cast(numbers, kept.dtype))

    def discard(self) -> None:
        """Empties the residuals."""
        self.begin_with(np.zeros(0, np.float32), np.zeros(0, np.float32))

    def begin_anew(self) -> None:
        """Empties the residuals, and counts exchanges from 0."""
        self.discard()
        self.exchanges.assign(0)

    @property
    def handles(self) -> list[tf.Tensor]:
        """The handles of all variables, in the order in which operations take them."""
        return [variable.handle for variable in (*self.kept, self.exchanges)]

    @property
    def compared(self) -> str:
        """The settings that ranks compare besides the route, as text."""
        return f"scale {self.scale}, source {self.place} ({common_name(self.variable_name)})"

    def check(self, gradient: tf.Tensor) -> None:
        """Raises ``ExchangeError`` if a gradient that is traced again does not fit this slot."""
        if not self.spec.is_compatible_with(gradient):
            raise ExchangeError(
                f"{self.label}: expected {self.kind} as before, got "
                + _kind(gradient.dtype, gradient.shape)
                + f" for the same variable, {self.variable_name}: exclude it by name"
            )


def common_name(name: str) -> str:
    """A variable's name without numbers, which count how many such layers a rank has made before."""
    return re.sub(r"(_\d+)+(?=[ /:]|$)", "", name)


def _numbers(name: str, dtype: tf.DType) -> ResourceVariable:
    """A variable for numbers, empty at first."""
    # Not tf.Variable: tf.function takes variables that are made while it traces for its own, and
    # refuses those of a second trace.
    zeros, shape = tf.zeros([0], dtype), tf.TensorShape([None])
    return ResourceVariable(zeros, trainable=False, shape=shape, name=name)


def _kind(dtype: tf.DType, shape: tf.TensorShape) -> str:
    """A dtype and a shape as text, for comparison and for messages."""
    return f"{dtype.name} {shape.as_list() if shape.rank is not None else 'unknown'}"
