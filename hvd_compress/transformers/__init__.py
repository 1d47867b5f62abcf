"""Compressors in Hugging Face Transformers' ``Trainer``, by a callback."""

from __future__ import annotations

from hvd_compress.needs import need

need(__name__)

import logging
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback

import hvd_compress.ddp as hvdc
from hvd_compress.codecs import Codec
from hvd_compress.codecs.calls import check_options
from hvd_compress.exchanges.routing import Route, route_of
from hvd_compress.process_group.device_collectives import collectives_of
from hvd_compress.process_group.values import tell

__all__ = ["CompressGradients"]

_FILE = "compressor.pt"
_log = logging.getLogger(__name__)


class CompressGradients(TrainerCallback):
    """Sends gradients encoded: ``trainer.add_callback(CompressGradients(trainer, Int8()))``.

    With half precision, the compressor gets the ``Trainer``'s ``grad_scaler``. Each checkpoint folder gets
    a file with the residuals of all ranks, each as large as the model in float32. Training resumes with
    that file if ``TrainingArguments`` name the folder, by ``resume_from_checkpoint`` or by ``output_dir``;
    otherwise without residuals, and a log line says so.

    Args:
        trainer: the ``Trainer``, which alone knows the wrapped model.
        codec: the encoding of gradients: a codec, a :class:`~hvd_compress.Route`, a codec's name, or
            ``"auto"`` for :class:`hvd_compress.ddp.Auto`.
        log: whether to give :meth:`~hvd_compress.ddp.Compressor.metrics` to ``Trainer.log()``, as the loss
            is, which serves TensorBoard and Weights & Biases.
        options: the options of :class:`hvd_compress.ddp.Compressor`, or of ``Auto``.

    Attributes:
        compressor: made when training starts; None before.

    Raises:
        TypeError, ValueError: an argument is wrong, "expected X, got Y"; when training starts, several
            ranks train without ``DistributedDataParallel``.
    """

    def __init__(
        self, trainer: Trainer, codec: Codec | Route | str, *, log: bool = False, **options: Any
    ) -> None:
        if not isinstance(trainer, Trainer):
            raise TypeError(
                f"CompressGradients.trainer: expected a Trainer, got {type(trainer).__name__}: write "
                f"trainer.add_callback(CompressGradients(trainer, Int8()))"
            )
        made = hvdc.Auto if codec == "auto" else hvdc.Compressor
        check_options("CompressGradients", made, options)
        if codec != "auto":
            codec = route_of(codec, "", "CompressGradients.codec")
        self._trainer, self._codec, self._log, self._options = trainer, codec, log, options
        self.compressor: hvdc.Compressor | None = None
        self._wrapped: torch.nn.Module | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Makes the compressor, registers it with DDP, and loads a checkpoint's residuals."""
        options = dict(self._options)
        if self._trainer.accelerator.scaler is not None:
            options["grad_scaler"] = self._trainer.accelerator.scaler
        wrapped = self._trainer.model_wrapped
        if wrapped is not self._wrapped:  # A second train() goes on with the same model.
            self.compressor = hvdc.register(wrapped, self._codec, **options)
            self._wrapped = wrapped
        if state.global_step and dist.is_initialized():
            self._resume(args, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Logs metrics in the steps whose loss the ``Trainer`` logs."""
        if self._log and control.should_log and self.compressor is not None:
            self._trainer.log(self.compressor.metrics())

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Writes the residuals of all ranks into the checkpoint's folder."""
        if self.compressor is None or not dist.is_initialized():
            return
        gathered = hvdc.GatheredState(self.compressor).state_dict()
        if state.is_world_process_zero:
            path = self._checkpoint(state.global_step) / _FILE
            torch.save({"gathered": gathered, "parameters": self._parameter_sum()}, path)

    def drop_step(self) -> None:
        """Takes the last exchange back, where its gradients are not used, as the compressor's method does.

        Call it on every rank, for example in another callback's ``on_pre_optimizer_step``.
        """
        if self.compressor is not None:
            self.compressor.drop_step()

    def reset(self) -> None:
        """Discards residuals for a model that returns to an earlier state, as the compressor's method does.

        Call it on every rank.
        """
        if self.compressor is not None:
            self.compressor.reset()

    def _resume(self, args: Any, step: int) -> None:
        folders = [self._checkpoint(step)]
        if isinstance(args.resume_from_checkpoint, str):
            folders.insert(0, Path(args.resume_from_checkpoint))
        found = next((one / _FILE for one in folders if (one / _FILE).exists()), None)
        saved = torch.load(found, map_location="cpu", weights_only=True) if found else {}
        # A folder of that name may be another run's: its residuals belong to other parameters.
        fits = math.isclose(saved.get("parameters", math.nan), self._parameter_sum(), rel_tol=1e-6)
        assert self.compressor is not None
        if all(tell(collectives_of(None), fits)):
            hvdc.GatheredState(self.compressor).load_state_dict(saved["gathered"])
            return
        self.compressor.reset()  # After another train(), it has those of later steps.
        if self._trainer.is_world_process_zero():
            looked = ", ".join(map(str, folders))
            _log.warning("no residuals of step %d in %s: starting without residuals", step, looked)

    def _checkpoint(self, step: int) -> Path:
        # A search for hyperparameters has a folder for each trial; only the Trainer knows its name.
        folder = self._trainer._get_output_dir(getattr(self._trainer, "_trial", None))
        return Path(folder) / f"checkpoint-{step}"

    def _parameter_sum(self) -> float:
        sums = [p.detach().double().abs().sum().cpu() for p in self._trainer.model.parameters()]
        return float(torch.stack(sums).sum())
