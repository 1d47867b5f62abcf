"""What a compressor keeps for one gradient, and which one a gradient is.

Horovod hands a compressor a tensor without a name. Graphs are traced in the same order on every rank,
so that the position among the calls within one outermost graph tells whose it is.
"""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from hvd_compress.exchange.errors import ExchangeError
from hvd_compress.exchange.routing import Route
from hvd_compress.planner.plans import Tensor
from hvd_compress.tensorflow.placement import HOST


class Slot(tf.Module):
    """The state of one gradient, in variables, which checkpoints save.

    Attributes:
        index: its position: its id in the noise.
        label: what its collectives are called by.
        kind: dtype and shape as first traced; unknown dimensions as None.
        dtype: as first traced.
        shape: as first traced; None where a dimension was unknown.
        route: how it travels.
        residual: what has been computed but not yet sent, shape=(n,), float32; empty before the first step.
        owned: the same for the average of the part that this rank owns, shape=(n_owned,), float32; empty
            where the exchange has no owners.
        exchanges: how many times it has been exchanged, shape=(), int64.
    """

    def __init__(
        self,
        index: int,
        dtype: tf.DType,
        shape: tf.TensorShape,
        route: Route,
        variables: tuple[ResourceVariable, ResourceVariable, ResourceVariable] | None = None,
        device: str = HOST,
    ) -> None:
        super().__init__(name=f"gradient_{index}")
        self.index = index
        self.label = f"gradient.{index}"
        self.kind = _kind(dtype, shape)
        self.dtype = dtype
        self._compatible = shape
        self.shape = tuple(shape.as_list()) if shape.is_fully_defined() else None
        self.route = route
        if variables is None:
            with tf.device(device):
                kept = numbers("residual"), numbers("owned")
            with tf.device(HOST):
                exchanges = ResourceVariable(
                    tf.zeros([], tf.int64), trainable=False, name="exchanges"
                )
            variables = (*kept, exchanges)
        self.residual, self.owned, self.exchanges = variables

    @property
    def kept(self) -> list[ResourceVariable]:
        """All residuals."""
        return [self.residual, self.owned]

    def check(self, gradient: tf.Tensor) -> None:
        """Raises ``ExchangeError`` where a gradient traced again cannot be this one."""
        same = gradient.dtype == self.dtype and gradient.shape.is_compatible_with(self._compatible)
        if not same:
            raise ExchangeError(
                f"{self.label}: expected {self.kind} as before, got "
                + _kind(gradient.dtype, gradient.shape)
                + ": make a compressor for each model and optimizer, and pass a tape's sources in the same "
                "order every time"
            )


class PlannedSlot(Slot):
    """A gradient that may travel in several ways, one after the other.

    Its ways have one residual, so that a change of way loses nothing, and one for each kind of owners.

    Attributes:
        tensor: its choices.
        owned_on_host: as ``owned``, of a part that ranks on one host share out.
    """

    def __init__(self, index: int, dtype: tf.DType, shape: tf.TensorShape, tensor: Tensor) -> None:
        super().__init__(index, dtype, shape, tensor.choices[0])
        self.tensor = tensor
        with tf.device(HOST):
            self.owned_on_host = numbers("owned_on_host")

    @property
    def kept(self) -> list[ResourceVariable]:
        """See :attr:`Slot.kept`."""
        return [*super().kept, self.owned_on_host]

    def by(self, route: Route) -> Slot:
        """The gradient as the exchange of a route sees it."""
        owned = self.owned_on_host if route.exchange == "hierarchical" else self.owned
        variables = (self.residual, owned, self.exchanges)
        return Slot(self.index, self.dtype, self._compatible, route, variables)


def numbers(name: str) -> ResourceVariable:
    """A variable of float32 numbers, none at first."""
    # Not tf.Variable: tf.function takes variables that are made while it traces for its own, and
    # refuses those of a second trace.
    return ResourceVariable(tf.zeros([0]), trainable=False, shape=tf.TensorShape([None]), name=name)


def _kind(dtype: tf.DType, shape: tf.TensorShape) -> str:
    """For comparison and for messages."""
    return f"{dtype.name} {shape.as_list() if shape.rank is not None else 'unknown'}"
