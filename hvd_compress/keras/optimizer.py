"""Makes a Keras 3 optimizer exchange its gradients, also one that is loaded with its model.

The optimizer stays the same object and gets a class derived from its own, so that variables, callbacks and
``isinstance`` see no difference. Keras calls ``_clip_gradients`` once in an update: after the
accumulation of gradients and the division by the loss scale, and before clipping. The exchange is there.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from hvd_compress.keras.exchange import KerasExchange
from hvd_compress.ranks.errors import ExchangeError
from hvd_compress.tensorflow import Compressor

_saved_as = keras.saving.register_keras_serializable("hvd_compress", "DistributedOptimizer")
_loading = ContextVar("loading", default=False)


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    compression: Any | None = None,
    *,
    op: Any = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    sparse_as_dense: bool = False,
    process_set: Any | None = None,
    name: str | None = None,
) -> keras.optimizers.Optimizer:
    """Makes a Keras 3 optimizer average its gradients over Horovod's ranks, once in each update.

    Changes the optimizer in place, whether it has been built or not, and returns it; a model that has been
    trained with it has to be compiled again. With
    ``gradient_accumulation_steps`` the accumulated gradients are exchanged; with a ``LossScaleOptimizer``,
    which has to be passed here itself, all ranks skip the steps in which one of them overflows.

    Args:
        optimizer: any optimizer of ``keras.optimizers`` except ``MultiOptimizer``, whose parts have to be
            passed instead, each with its own compressor.
        compression: a codec such as ``hvd_compress.Int8()``; a compressor of
            :mod:`hvd_compress.tensorflow` for other options, which no other optimizer may share; or
            ``hvd.Compression.fp16``. None sends gradients uncompressed.
        op: ``hvd.Average`` or ``hvd.Sum``.
        gradient_predivide_factor: the gradients of an average are divided by this factor before they are
            added, and multiplied by it afterwards.
        sparse_as_dense: whether sparse gradients, such as those of embeddings, are made dense and
            compressed; otherwise their rows are gathered uncompressed.
        process_set: the ranks among which gradients are averaged, the same as the compressor's; None is all
            ranks.
        name: the prefix of the collectives' names; None numbers optimizers in the order in which they are
            made, which must then be the same on every rank.

    Raises:
        TypeError, ValueError: an argument is wrong, "expected X, got Y".
        ExchangeError: ``hvd.init()`` was not called.
    """
    _check(optimizer)
    exchange = KerasExchange(
        compression,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
        name=name,
    )
    _distribute(optimizer, exchange)
    return optimizer


def distribute_again(optimizer: keras.optimizers.Optimizer, compression: Any, name: str) -> None:
    """Gives a distributed optimizer another compressor; its other settings do not change.

    Functions that were traced with the optimizer have to be traced again.

    Args:
        optimizer: an optimizer made by :func:`DistributedOptimizer`.
        compression: the same as in :func:`DistributedOptimizer`.
        name: the same as in :func:`DistributedOptimizer`.
    """
    _distribute(optimizer, optimizer._exchange.with_compression(compression, name))


def is_distributed(optimizer: Any) -> bool:
    """Whether :func:`DistributedOptimizer` was called for an optimizer."""
    return isinstance(optimizer, _Saved)


def load_model(
    filepath: str | Path,
    compression: Any | None = None,
    *,
    custom_objects: dict[str, Any] | None = None,
    safe_mode: bool = True,
    **options: Any,
) -> keras.Model:
    """Loads a compiled model and makes its optimizer a :func:`DistributedOptimizer`.

    This works whether or not the optimizer was distributed when the model was saved; its variables are
    those of the file. Residuals belong to a rank and are not in the file: see ``tf.train.Checkpoint``.

    Args:
        filepath, custom_objects, safe_mode: the same as in ``keras.models.load_model``.
        compression, options: the same as in :func:`DistributedOptimizer`.

    Raises:
        ValueError: the model was not compiled when it was saved.
    """
    with _loading_stock():
        model = keras.models.load_model(
            filepath, custom_objects=custom_objects, safe_mode=safe_mode
        )
        if getattr(model, "optimizer", None) is None:
            raise ValueError(
                f"expected a compiled model, got {filepath} without an optimizer: load it by "
                f"keras.models.load_model, and compile it with a DistributedOptimizer"
            )
        made = DistributedOptimizer(model.optimizer, compression, **options).compression
    if isinstance(made, Compressor):
        made.use.dismiss()  # The model may be loaded to be evaluated, and trains with this one if at all.
    return model


@contextmanager
def _loading_stock() -> Iterator[None]:
    """Within this context, saved distributed optimizers are loaded as the stock ones they were before."""
    token = _loading.set(True)
    try:
        yield
    finally:
        _loading.reset(token)


@_saved_as
class _Saved(keras.optimizers.Optimizer):
    """The saved form of a distributed optimizer: the stock one, under a name that is not stock's.

    So what Keras makes of it, a copy or a loaded model, cannot train apart without an error, and a file
    holds nothing that belongs to a rank.
    """

    _exchange: KerasExchange
    _stock: type[keras.optimizers.Optimizer]
    _scaled: bool  # Whether a LossScaleOptimizer around it exchanges its flags.
    _updates_before: float  # When it was distributed; inf if nothing can have been traced by then.

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        if not self._scaled:
            self._exchange.begin()
        super().apply(grads, trainable_variables)

    def finalize_variable_values(self, var_list: Any) -> None:
        if not self._exchange.updates and int(self.iterations) > self._updates_before:
            raise ExchangeError(
                f"expected {self._stock.__name__} to exchange gradients, got {int(self.iterations)} "
                f"updates without an exchange: the model's training had been traced before "
                f"DistributedOptimizer was called; call model.compile() with the optimizer that it returns"
            )
        super().finalize_variable_values(var_list)

    def get_config(self) -> dict[str, Any]:
        copy = self._stock.from_config(self._stock_config())
        # Kept, since Keras tells the objects of a file apart by their addresses.
        self._exchange.saved[self._stock] = copy
        return {"optimizer": keras.saving.serialize_keras_object(copy)}

    def _stock_config(self) -> dict[str, Any]:
        return super().get_config()

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        optimizer = keras.saving.deserialize_keras_object(config["optimizer"], custom_objects)
        if not _loading.get():
            _distribute(optimizer, _Copied())
        return optimizer


class _Copied(KerasExchange):
    """The exchange of an optimizer that Keras copied or loaded, which would exchange nothing."""

    def __init__(self) -> None:
        self.compression, self.saved, self.updates = None, {}, 0

    def begin(self) -> None:
        raise ExchangeError(
            "expected a DistributedOptimizer, got a copy of one, which exchanges nothing: compile a model "
            "that was copied with a DistributedOptimizer of its own, and load one that was saved by "
            "hvd_compress.keras.load_model(path, compression=...) in place of Keras's own"
        )


class _Distributed(_Saved):
    """An optimizer that updates variables."""

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        grads = list(grads)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        variables = trainable_variables or self._trainable_variables
        pairs = zip(grads, variables, strict=False)  # Keras's own check says what differs.
        self._exchange.variables = [variable for grad, variable in pairs if grad is not None]
        self._exchange.all_variables = self._trainable_variables if self.built else variables
        before = self._exchange.updates
        super().apply(grads, trainable_variables)
        updates = self._exchange.updates - before
        # Traced, both branches of an accumulation count; eagerly, it may be no update's turn.
        none = not len(grads) or (self.gradient_accumulation_steps and tf.executing_eagerly())
        if updates != 1 and not (none and updates == 0):
            raise ExchangeError(
                f"expected {self._stock.__name__} to call _clip_gradients once in an update, as Keras's "
                f"optimizers do, got {updates} calls: gradients would not be exchanged, or twice"
            )

    def _clip_gradients(self, grads: Sequence[Any]) -> Sequence[Any]:
        averages = self._exchange.average(grads)
        self._exchange.expect_to_suit(self)
        return super()._clip_gradients(averages)

    def _overwrite_variables_directly_with_gradients(self, grads: Any, vars: Any) -> Any:
        for variable in vars:
            if self._overwrite_variable_with_gradient(variable):
                raise ExchangeError(
                    f"expected variables that gradients update, got {variable.path}, which Keras "
                    f"overwrites with each rank's own value: train without float8 quantization"
                )
        return super()._overwrite_variables_directly_with_gradients(grads, vars)

    def __setattr__(self, name: str, value: Any) -> None:
        if (
            name == "loss_scale_factor"
        ):  # All that a LossScaleOptimizer does when it is put around it.
            _refuse_stock_loss_scale()
        super().__setattr__(name, value)

    def build(self, variables: Any) -> None:
        _refuse_stock_loss_scale()  # It may be around a MultiOptimizer around this one.
        super().build(variables)


class _DistributedLossScale(_Saved):
    """A ``LossScaleOptimizer`` whose inner optimizer exchanges gradients."""

    def check_finite(self, grads: Sequence[Any]) -> Any:
        return self._exchange.everywhere(super().check_finite(grads))

    def _stock_config(self) -> dict[str, Any]:
        config = super()._stock_config()
        inner = config["inner_optimizer"]["config"]["optimizer"]
        return {**config, "inner_optimizer": inner}


def _check(optimizer: Any) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        hint = ""
        if type(optimizer).__module__.startswith(("tf_keras.", "keras.")):
            hint = (
                ": legacy Keras works with horovod.tensorflow.keras.DistributedOptimizer("
                "optimizer, compression=...)"
            )
        raise TypeError(
            f"DistributedOptimizer: expected an optimizer of Keras {keras.__version__}, got "
            f"{type(optimizer).__module__}.{type(optimizer).__name__}{hint}"
        )
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if is_distributed(optimizer) or is_distributed(inner):
        raise TypeError(
            "DistributedOptimizer: expected an optimizer that is not distributed yet, got one that is"
        )
    if isinstance(inner, keras.optimizers.MultiOptimizer):
        raise TypeError(
            "DistributedOptimizer: expected a single optimizer, got a MultiOptimizer: make one of "
            "DistributedOptimizers, each with a compressor of its own"
        )


def _refuse_stock_loss_scale() -> None:
    frame: Any = sys._getframe(2)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, keras.optimizers.LossScaleOptimizer) and not is_distributed(caller):
            raise ExchangeError(
                "expected DistributedOptimizer around a LossScaleOptimizer, got a LossScaleOptimizer "
                "around it, where the ranks would not skip the same steps: pass "
                "DistributedOptimizer(LossScaleOptimizer(optimizer)) to compile(), which under the policy "
                "mixed_float16 puts one around any other optimizer unless auto_scale_loss=False"
            )
        frame = frame.f_back


def _distribute(optimizer: Any, exchange: KerasExchange, *, scaled: bool = False) -> None:
    """Makes an optimizer exchange; ``scaled``: it is within a ``LossScaleOptimizer`` that does."""
    optimizer._exchange = exchange
    optimizer._scaled = scaled
    # Without an update before, nothing was traced that could go on; iterations that are loaded later are
    # none. Those of an optimizer from a file are none either.
    traced = 0 if _loading.get() else int(optimizer.iterations)
    optimizer._updates_before = traced or math.inf
    # Found by tf.train.Checkpoint, as the optimizer's own variables are.
    optimizer.compression = exchange.compression
    if not is_distributed(optimizer):
        stock: Any = type(optimizer)
        optimizer.__class__ = _class_for(stock)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        _distribute(optimizer.inner_optimizer, exchange, scaled=True)


@cache
def _class_for(stock: Any) -> Any:
    scales = issubclass(stock, keras.optimizers.LossScaleOptimizer)
    base = _DistributedLossScale if scales else _Distributed
    made = type(f"Distributed{stock.__name__}", (base, stock), {"_stock": stock})
    return _saved_as(made)
