"""Compressors in Lightning's ``Trainer``, by a callback.

Lightning's ``DDPStrategy(ddp_comm_state=..., ddp_comm_hook=...)`` takes a compressor as well. But it
registers hooks on CUDA devices only, and gives no message when it leaves them out on the CPU; and its
checkpoints do not contain state that differs between ranks, such as the compressor's.
"""

from __future__ import annotations

from hvd_compress.needs import need

need(__name__)

from typing import Any

import lightning.pytorch as lightning
from torch.nn.parallel import DistributedDataParallel

import hvd_compress.ddp as hvdc
from hvd_compress.codecs import Codec
from hvd_compress.codecs.calls import check_options
from hvd_compress.ddp.gathered import state_unless_interrupted
from hvd_compress.exchanges.routing import Route, route_of
from hvd_compress.ranks.launch import say_alone

__all__ = ["CompressGradients"]

_PATIENCE = 60.0
"""The time in seconds for which a checkpoint after an error waits for the residuals of other ranks."""


class CompressGradients(lightning.Callback):
    """Sends gradients encoded: ``Trainer(strategy="ddp", callbacks=[CompressGradients(Int8())])``.

    With half precision (``precision="16-mixed"``), the compressor gets Lightning's ``grad_scaler``.
    Checkpoints hold the residuals of all ranks, each as large as the model in float32, and another number
    of ranks may go on with them. A checkpoint after an error, as of ``OnExceptionCheckpoint``, is saved
    without residuals if an exchange was interrupted or a rank does not answer, and a log line says so.

    Args:
        codec: the encoding of gradients: a codec, a :class:`~hvd_compress.Route`, a codec's name, or
            ``"auto"`` for :class:`hvd_compress.ddp.Auto`.
        log: whether to give :meth:`~hvd_compress.ddp.Compressor.metrics` to the trainer's loggers, every
            ``log_every_n_steps`` steps.
        options: the options of :class:`hvd_compress.ddp.Compressor`, or of ``Auto``.

    Attributes:
        compressor: made when training starts, for each model anew; None before.

    Raises:
        TypeError, ValueError: an argument is wrong, "expected X, got Y"; when training starts, several
            devices train without ``DistributedDataParallel``.
    """

    def __init__(self, codec: Codec | Route | str, *, log: bool = False, **options: Any) -> None:
        made = hvdc.Auto if codec == "auto" else hvdc.Compressor
        check_options("CompressGradients", made, options)
        if codec != "auto":
            codec = route_of(codec, "", "CompressGradients.codec")
        self._codec, self._log, self._options = codec, log, options
        self.compressor: hvdc.Compressor | None = None
        self._model: DistributedDataParallel | None = None
        self._loaded: dict[str, Any] = {}
        self._failed = False

    def on_train_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        """Makes the compressor, and registers it with DDP."""
        self._failed = False
        model = trainer.strategy.model
        if not isinstance(model, DistributedDataParallel):
            if trainer.world_size == 1:
                say_alone()
                return
            raise TypeError(
                f"CompressGradients: expected Trainer(strategy='ddp'), whose model is a "
                f"DistributedDataParallel, got {type(trainer.strategy).__name__}"
            )
        options = dict(self._options)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            options["grad_scaler"] = scaler
        if self.compressor is None or self._is_of_another(model):
            self.compressor = hvdc.register(model, self._codec, **options)
        else:
            # Another Trainer has another scaler, or none.
            self.compressor._grad_scaler = options.get("grad_scaler")
            if model is not self._model:
                hvdc.register(model, self.compressor)
        self._model = model
        if self._loaded:
            hvdc.GatheredState(self.compressor).load_state_dict(self._loaded)
            self._loaded = {}

    def _is_of_another(self, model: DistributedDataParallel) -> bool:
        """Whether the compressor has none of the model's parameters: that of another fold, for example."""
        assert self.compressor is not None
        return {s.parameter for s in self.compressor._slots}.isdisjoint(model.parameters())

    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Gives metrics to the trainer's loggers."""
        due = trainer.global_step % trainer.log_every_n_steps == 0
        if self._log and due and self.compressor is not None:
            pl_module.log_dict(self.compressor.metrics(), rank_zero_only=True)

    def on_exception(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        exception: BaseException,
    ) -> None:
        """Called before callbacks that save checkpoints: Lightning puts these last."""
        self._failed = True

    def drop_step(self) -> None:
        """Takes the last exchange back, where its gradients are not used, as the compressor's method does.

        Call it on every rank, for example in the module's ``on_before_optimizer_step``. It does nothing on
        one device, which sends nothing.
        """
        if self.compressor is not None:
            self.compressor.drop_step()

    def reset(self) -> None:
        """Discards residuals for a model that returns to an earlier state, as the compressor's method does.

        Call it on every rank. It does nothing on one device.
        """
        if self.compressor is not None:
            self.compressor.reset()

    def state_dict(self) -> dict[str, Any]:
        """The states of all ranks, as :class:`~hvd_compress.ddp.GatheredState` has them.

        After an interrupted exchange, it holds no residuals.
        """
        if self.compressor is None:
            return {}
        return state_unless_interrupted(self.compressor, _PATIENCE if self._failed else None)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the states of all ranks; they are in force when training starts."""
        self._loaded = state_dict
