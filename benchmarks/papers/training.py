"""Training by simulated workers, with the kernels and the exchanges of real ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks import compressions
from benchmarks.data import batches, mnist5k
from benchmarks.data.samples import Data
from benchmarks.models.torch.average import WeightAverage
from benchmarks.papers import models
from benchmarks.papers.experiment import Advance
from benchmarks.papers.native import Native, Watch
from benchmarks.settings import Settings
from benchmarks.trainers.muon import MuonAndAdamW
from hvd_compress.codecs import Codec, ErrorFeedback
from hvd_compress.exchanges.reference import Simulation
from hvd_compress.exchanges.simulation import OwnerStep

Gradients = dict[str, torch.Tensor]
"""The workers' gradients by parameter, shape=(workers, ...)."""

NONE = "none"
DATA = mnist5k.NAME
"""The data that experiments on images train on by default."""


@dataclass(frozen=True)
class Recipe:
    """A training of a network.

    Attributes:
        model: a name that :func:`benchmarks.papers.models.build` knows.
        compression: ``NAME`` or ``NAME:key=value,...``: a scheme, the codec's settings, ``alpha``,
            ``beta`` and ``exchange``.
        seed: the seed of the first weights, the order of the samples and the codec's noise.
        steps: the number of steps.
        workers: the number of workers that share the mini-batch.
        batch: the number of images, or of windows of text, per step, of all workers together.
        optimizer: ``"sgd"``, ``"momentum"`` (0.9), ``"adam"``, ``"adamw"`` or ``"muon"``.
        lr: the learning rate at the start.
        decay: the power of a polynomial decay of the learning rate to zero; 0 keeps it.
        weight_decay: the optimizer's weight decay.
        averaging: the decay of the exponential moving average of the weights, which is tested, too; 0 is
            none.
        cold_start: the number of first steps that are not compressed.
        data: the data, as for :func:`benchmarks.data.read`.
    """

    model: str
    compression: str
    seed: int
    steps: int
    workers: int = 4
    batch: int = 64
    optimizer: str = "momentum"
    lr: float = 0.01
    decay: float = 0.0
    weight_decay: float = 0.0
    averaging: float = 0.0
    cold_start: int = 0
    data: str = DATA

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0 (TernGrad, section 4)."""
        return self.lr * (1 - step / self.steps) ** self.decay


@dataclass(frozen=True)
class Compression:
    """The compression of a specification; without a codec nothing is compressed."""

    codec: Codec | None
    feedback: ErrorFeedback
    exchange: str

    @classmethod
    def parse(cls, text: str) -> Compression:
        """Reads ``NAME:key=value,...``.

        Raises:
            KeyError: an unknown name.
            TypeError: a setting that the codec does not have.
        """
        parsed = compressions.parse(text, {}, last_layer="")
        route, options = parsed.split()
        options.pop("exclude", None)
        if options:
            raise TypeError(f"{text}: got unexpected {', '.join(options)}")
        codec = None if parsed.name == NONE else route.codec
        return cls(codec, route.feedback, route.exchange or route.codec.exchange or "allgather")


_TOGETHER = 1000
"""The number of images, or of windows of text, that are scored at once."""

Prepare = Callable[[Gradients, int], Gradients]
"""A function that changes the workers' gradients before they are encoded; it also gets the step."""


class Run:
    """One training.

    Args:
        recipe: the recipe.
        prepare: a function that changes gradients before they are encoded, or None.
        owner_step: the owner step of the two shots.
        feedback: the error feedback in place of the recipe's.
        receive: a function that changes averages before the optimizer uses them, or None.
        watch: the same as in :class:`benchmarks.papers.native.Native`.
        warmup: the number of first steps, in which the learning rate rises from zero.
        threshold: the number of elements from which tensors are compressed.
    """

    def __init__(
        self,
        recipe: Recipe,
        prepare: Prepare | None = None,
        owner_step: OwnerStep | None = None,
        *,
        feedback: ErrorFeedback | None = None,
        receive: Callable[[Gradients], Gradients] | None = None,
        watch: Watch | None = None,
        warmup: int = 0,
        threshold: int = 0,
    ) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(recipe.seed)
        self.recipe = recipe
        self._data = images(recipe.model, recipe.data)
        self.classes = self._data.classes
        self.model = models.build(recipe.model, self._data.image, self.classes)
        self.average = WeightAverage(self.model, recipe.averaging) if recipe.averaging else None
        self._prepare, self._receive, self._warmup = prepare, receive, warmup
        self._gradients = models.WorkerGradients(self.model)
        self._optimizer = _optimizer(recipe, self.model)
        self.compression = Compression.parse(recipe.compression)
        self.shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
        self.compressed = {
            name: shape for name, shape in self.shapes.items() if math.prod(shape) >= threshold
        }
        self._simulation: Simulation | None = None
        if self.compression.codec is not None:
            self._simulation = Simulation(
                self.compression.exchange,
                self.compression.codec,
                feedback or self.compression.feedback,
                self.compressed,
                recipe.workers,
                seed=recipe.seed,
                owner_step=owner_step,
                arithmetic=Native(watch),
            )

    def train(self, each: Callable[[int, float, Gradients], Any]) -> None:
        """Makes all steps, or stops where the loss is not finite.

        Args:
            each: a function that is called in each step before the update, with the number of the step, the
                loss and the workers' gradients.
        """
        for step, (x, y) in enumerate(self.batches()):
            self.model.train()
            gradients, loss = self._gradients(x, y)
            each(step, loss, gradients)
            if not math.isfinite(loss):
                break
            if self._prepare is not None:
                gradients = self._prepare(gradients, step)
            received = self._exchange(gradients, step)
            if self._receive is not None:
                received = self._receive(received)
            for name, parameter in self.model.named_parameters():
                parameter.grad = received[name]
            self.update(step)

    def update(self, step: int) -> None:
        """A step of the optimizer, with the parameters' gradients."""
        for group in self._optimizer.param_groups:
            group["lr"] = self.recipe.rate(step) * min(1.0, (step + 1) / max(1, self._warmup))
        self._optimizer.step()
        if self.average is not None:
            self.average.update()

    def score(self, part: str = "test", most: int | None = None) -> tuple[float, float]:
        """Accuracy and mean loss in nats on ``"test"`` or ``"train"`` samples, or the first of them."""
        return score(self.model, self._data, part, most)

    def scores(self) -> dict[str, Any]:
        """``test_accuracy``, ``train_accuracy``, ``train_loss`` of all training images, and ``diverged``.

        A run diverged where the loss is not finite or larger than at first; the numbers are None then.
        """
        accuracy, _ = self.score()
        train_accuracy, train_loss = self.score("train")
        diverged = not math.isfinite(train_loss) or train_loss > 2 * math.log(self.classes)
        return {
            "test_accuracy": None if diverged else accuracy,
            "train_accuracy": None if diverged else train_accuracy,
            "train_loss": None if diverged else train_loss,
            "diverged": diverged,
        }

    def averaged_score(self) -> tuple[float, float]:
        """:meth:`score` of the averaged weights on the test images."""
        assert self.average is not None
        return score(self.average.model(), self._data, "test")

    def payload_bytes(self) -> int:
        """The bytes of one worker's compressed tensors in a step."""
        codec = self.compression.codec
        return sum(
            4 * math.prod(shape)
            if codec is None or not codec.encodes(shape)
            else codec.payload_bytes(shape)
            for shape in self.compressed.values()
        )

    def _exchange(self, gradients: Gradients, step: int) -> Gradients:
        if self._simulation is None or step < self.recipe.cold_start:
            return {name: of_workers.mean(0) for name, of_workers in gradients.items()}
        arrays = {name: gradients[name].detach().contiguous().numpy() for name in self.compressed}
        ranks = range(self.recipe.workers)
        averaged = self._simulation.average(
            [{name: array[rank] for name, array in arrays.items()} for rank in ranks]
        )
        return {
            name: torch.from_numpy(averaged[name]) if name in averaged else of_workers.mean(0)
            for name, of_workers in gradients.items()
        }

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The samples and labels of each step, shape=(workers, n, ...)."""
        train, recipe = self._data.train, self.recipe
        epoch = step = 0
        while True:
            drawn = batches.epoch(len(train.labels), recipe.batch, seed=recipe.seed, epoch=epoch)
            for rows in drawn:
                if step == recipe.steps:
                    return
                x, y = tensors(self._data, "train", rows)
                yield (
                    x.reshape(recipe.workers, -1, *x.shape[1:]),
                    y.reshape(recipe.workers, -1),
                )
                step += 1
            epoch += 1


def outcome(recipe: Recipe, advance: Advance, points: int = 40, **options: Any) -> dict[str, Any]:
    """Trains, and returns the results.

    Returns:
        :meth:`Run.scores`, ``averaged_accuracy`` (None without an average), ``curve`` (mean losses of
        ``points`` parts), and ``payload_bytes`` of one worker and step.
    """
    run = Run(recipe, **options)
    losses: list[float] = []

    def each(step: int, loss: float, gradients: Gradients) -> None:
        losses.append(loss)
        advance()

    run.train(each)
    parts = np.array_split(np.array(losses), min(points, len(losses)))
    scores = run.scores()
    averaged = run.averaged_score()[0] if run.average and not scores["diverged"] else None
    return {
        **scores,
        "averaged_accuracy": averaged,
        "curve": [_finite(part.mean()) for part in parts],
        "payload_bytes": run.payload_bytes(),
    }


@cache
def images(model: str, data: str) -> Data:
    """:func:`benchmarks.papers.models.data`, read once."""
    return models.data(model, data)


def tensors(data: Data, part: str, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Images, channels-first, or windows of text, and labels, int64."""
    chosen = data.train if part == "train" else data.test
    assert chosen is not None
    x = chosen.load(rows)
    if x.ndim == 4:
        x = np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    return torch.from_numpy(x), torch.from_numpy(chosen.labels[rows].astype(np.int64))


def score(model: nn.Module, data: Data, part: str, most: int | None = None) -> tuple[float, float]:
    """Accuracy and mean loss in nats on all samples of a part, or on the first of them."""
    chosen = data.train if part == "train" else data.test
    assert chosen is not None
    model.eval()
    labels = chosen.labels[:most]
    right, loss, count = 0, 0.0, len(labels)
    for rows in np.split(np.arange(count), range(_TOGETHER, count, _TOGETHER)):
        x, y = tensors(data, part, rows)
        with torch.no_grad():
            logits = model(x)
            loss += float(models.cross_entropy(logits, y)) * (len(rows) / count)
        right += int((logits.argmax(-1) == y).sum())
    return right / labels.size, loss


def _optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer | MuonAndAdamW:
    lr, decay = recipe.lr, recipe.weight_decay
    if recipe.optimizer == "muon":
        return MuonAndAdamW(model, Settings(recipe.model, lr=lr, weight_decay=decay))
    if recipe.optimizer in ("adam", "adamw"):
        kind = torch.optim.Adam if recipe.optimizer == "adam" else torch.optim.AdamW
        return kind(model.parameters(), lr=lr, weight_decay=decay)
    momentum = {"sgd": 0.0, "momentum": 0.9}[recipe.optimizer]
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, weight_decay=decay)


def _finite(loss: float) -> float | None:
    return float(f"{loss:.4g}") if math.isfinite(loss) else None
