"""Training with torch and a stock Horovod."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import hvd_compress.torch as hvdc
from benchmarks import compressions
from benchmarks.compressions import LOCAL, Compression
from benchmarks.loop import TOP, Batch, Score
from benchmarks.models.torch import build
from benchmarks.models.torch.average import WeightAverage
from benchmarks.models.torch.paced import Paced
from benchmarks.settings import ADAM, ADAMW, MUON, ONEBIT_ADAM, RMSPROP, RMSPROP_DECAY, Settings
from benchmarks.trainers import process_group
from benchmarks.trainers.muon import MuonAndAdamW
from hvd_compress import distributed
from hvd_compress.optim import OneBitAdam
from hvd_compress.ranks.counters import Counters


class TorchSession:
    """Implements :class:`benchmarks.loop.Session`.

    Attributes:
        compressor: the optimizer's compressor; None where nothing is exchanged.
    """

    def __init__(self, model: nn.Module, settings: Settings, compression: Compression, seed: int):
        # The model that is tested: outside of any wrapper, and the same on every rank.
        self._plain = model
        self._model = model  # The model that is trained.
        self._device = settings.device
        self._autocast = settings.autocast is not None
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        self.compressor: Any = None
        self.counters = Counters()
        self._optimizer: Any
        self._average = WeightAverage(model, settings.averaging) if settings.averaging else None
        self._averaged: nn.Module | None = None
        self._connect(settings, compression, seed)

    def _connect(self, settings: Settings, compression: Compression, seed: int) -> None:
        """Makes the optimizer, and the compressor that averages gradients for it."""
        if settings.optimizer == ONEBIT_ADAM:
            self.compressor = _adams_compressor(compression, seed)
            self._optimizer = OneBitAdam(
                self._model.named_parameters(),
                self.compressor,
                lr=settings.lr,
                weight_decay=settings.weight_decay,
            )
            self.counters = self.compressor.counters
            return
        self._optimizer = optimizer(self._model, settings)
        if compression.name != LOCAL:
            self.compressor = compressions.make(
                hvdc, compression.name, self._model, **options_of(compression, seed)
            )
            self._optimizer = hvd.DistributedOptimizer(
                self._optimizer,
                named_parameters=self._model.named_parameters(),
                compression=self.compressor,
            )
            self.counters = self.compressor.counters

    def train(
        self, batches: Iterable[Batch], rates: Sequence[float], ended: Callable[[float], None]
    ) -> None:
        for (inputs, labels), lr in zip(batches, rates, strict=True):
            ended(self._step(inputs, labels, lr))
        with torch.no_grad():
            self._collect()

    def _collect(self) -> None:
        """Brings the model that is tested up to date, where it is another one; on every rank."""

    def finish(self) -> None:
        """Does nothing: ranks exchange in every step."""

    def _step(self, inputs: np.ndarray, labels: np.ndarray, lr: float) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._model.train()
        self._optimizer.zero_grad()
        loss = self._cross_entropy(self._model, inputs, labels)[0]
        loss.backward()
        self._optimizer.step()
        if self._average is not None:
            self._average.update()
            self._averaged = None
        return loss.item()

    @torch.no_grad()
    def evaluate(self, inputs: np.ndarray, labels: np.ndarray) -> Score:
        if self._average is not None and self._averaged is None:
            self._averaged = self._average.model()
        tested = self._averaged or self._plain
        tested.eval()
        loss, logits, wanted = self._cross_entropy(tested, inputs, labels)
        above = (logits > logits.gather(1, wanted[:, None])).sum(1)
        right = int((logits.argmax(1) == wanted).sum())
        return Score(right, int((above < TOP).sum()), float(loss) * labels.size / math.log(2))

    def residual_norm(self) -> float:
        return float(self.compressor.residual_norm()) if self.compressor else 0.0

    def digest(self) -> bytes:
        digest = hashlib.sha256()
        for parameter in self._plain.parameters():
            digest.update(parameter.detach().contiguous().cpu().numpy().tobytes())
        return digest.digest()

    def _cross_entropy(
        self, model: nn.Module, inputs: np.ndarray, labels: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The mean over the labels; the logits, shape=(labels, classes); and the labels."""
        x = torch.from_numpy(inputs).to(self._device)
        if x.dim() == 4:  # Images, whose channels torch has first.
            x = x.permute(0, 3, 1, 2).contiguous()
        wanted = torch.from_numpy(labels).to(self._device).long().flatten()
        with torch.autocast(self._device, torch.bfloat16, enabled=self._autocast):
            logits = model(x).flatten(0, -2)
            return F.cross_entropy(logits, wanted), logits, wanted


def options_of(compression: Compression, seed: int) -> dict[str, Any]:
    """A compressor's options; ``owner_step=adagrad`` is AdaGrad between the shots.

    Raises:
        ValueError: there is no such owner step.
    """
    options = {"seed": seed, **compression.options}
    step = options.get("owner_step")
    if step is not None:
        if step != "adagrad":
            raise ValueError(f"owner_step: expected adagrad, got {step!r}")
        options["owner_step"] = hvdc.AdaGrad()
    return options


def optimizer(model: nn.Module, settings: Settings) -> Any:
    """The recipe's optimizer for all parameters of a model."""
    if settings.optimizer == MUON:
        return MuonAndAdamW(model, settings)
    parameters = model.parameters()
    own: Any = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    if settings.optimizer == ADAMW:
        return torch.optim.AdamW(parameters, **own)
    if settings.optimizer == ADAM:
        return torch.optim.Adam(parameters, **own)
    if settings.optimizer == RMSPROP:
        return torch.optim.RMSprop(parameters, alpha=RMSPROP_DECAY, **own)
    return torch.optim.SGD(parameters, momentum=settings.momentum, **own)


def _adams_compressor(compression: Compression, seed: int) -> distributed.Compressor:
    """1-bit Adam's compressor, which averages by torch.distributed.

    Uncompressed, it never leaves its warm-up, and is AdamW.

    Raises:
        ValueError: nothing is to be exchanged.
    """
    if compression.name == LOCAL:
        raise ValueError(f"expected a compression with --optimizer {ONEBIT_ADAM}, got {LOCAL}")
    process_group.join()
    options = {"seed": seed, **compression.options}
    if compression.name == "none":
        options["warmup_steps"] = sys.maxsize
    return compressions.make(distributed, compression.name, **options)


Start = Callable[[nn.Module, Settings, Compression, int], TorchSession]
"""Makes a session of a model, the recipe, the compression and the seed."""


class TorchTrainer:
    """Implements :class:`benchmarks.loop.Trainer`.

    Args:
        session: the class of a session, which decides how ranks average.
    """

    def __init__(self, session: Start = TorchSession) -> None:
        self._session = session
        self.rank: int = hvd.rank()
        self.size: int = hvd.size()

    def start(
        self, settings: Settings, classes: int, compression: Compression, seed: int
    ) -> TorchSession:
        torch.manual_seed(seed)
        if settings.device == "cuda":
            torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
        return self._session(self._build(settings, classes), settings, compression, seed)

    def _build(self, settings: Settings, classes: int) -> nn.Module:
        model = build(settings.model, classes, settings.norm, settings.dropout)
        return model.to(settings.device)

    def gather(self, values: np.ndarray) -> np.ndarray:
        local = torch.from_numpy(np.ascontiguousarray(values, np.float64))
        return hvd.allgather(local, name="benchmark").numpy().reshape(self.size, -1)


class PacedTrainer(TorchTrainer):
    """A trainer that waits where others compute (:mod:`benchmarks.models.torch.paced`).

    Args:
        seconds: the duration of the forward and the backward pass.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def _build(self, settings: Settings, classes: int) -> nn.Module:
        return Paced(super()._build(settings, classes), classes, self._seconds)


def start(threads: int, pace: float | None = None) -> TorchTrainer:
    """Initialises Horovod and torch in this process; with a pace, for a :class:`PacedTrainer`."""
    torch.set_num_threads(threads)
    hvd.init()
    return TorchTrainer() if pace is None else PacedTrainer(pace)
