"""One training, which a checkpoint continues bit for bit."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from benchmarks import compressions
from benchmarks.data import batches, text
from benchmarks.data.samples import Data, Samples
from benchmarks.models.torch.transformer import Transformer
from benchmarks.trained.ranks import LocalRanks

_TOGETHER = 256
"""The windows that are scored at once."""


@dataclass(frozen=True)
class Recipe:
    """The training of every codec: the model, the optimizer and the data.

    It was chosen without compression, on seed 0, in trainings of 1,200 steps: the learning rate of 0.004
    was ahead of 0.008 after 720 steps and of 0.0025 after 240, and the embeddings of four earlier bytes
    were ahead of a model of width 128 without them after 240.

    Attributes:
        steps: the number of steps.
        lr: AdamW's learning rate after the warm-up; it falls linearly to zero.
        warmup: the steps in which the learning rate rises from zero.
        weight_decay: AdamW's weight decay.
        ranks: the ranks that share the windows of a step.
        batch: the windows of a step, of all ranks together.
        context: the bytes of a window.
        width, layers, heads, history: those of
            :class:`benchmarks.models.torch.transformer.Transformer`.
        threshold: tensors with fewer elements are not compressed.
        points: the points of the curve of losses, at equal distances; the last one is the end.
        scored: the windows of test text that the curve is of; the end is scored on all of them, too.
        data: a text file or a folder of them; None is Python's standard library.
    """

    steps: int = 2000
    lr: float = 0.004
    warmup: int = 100
    weight_decay: float = 0.1
    ranks: int = 4
    batch: int = 16
    context: int = 64
    width: int = 96
    layers: int = 2
    heads: int = 4
    history: int = 4
    threshold: int = 1024
    points: int = 12
    scored: int = 512
    data: str | None = None

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        return self.lr * min(1.0, (step + 1) / self.warmup) * (1 - step / self.steps)


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        method: the codec, as :func:`benchmarks.compressions.parse` reads it, by the default exchange.
        seed: the seed of the first weights, of the order of the windows, and of the codec's noise.
    """

    method: str
    seed: int


class Training:
    """A training that can be stopped after any step.

    Args:
        case: the codec and the seed.
        recipe: the recipe.

    Attributes:
        step: the number of steps that are over.
        curve: test loss in bits a byte after each part of the steps.
        model: the model.
    """

    def __init__(self, case: Case, recipe: Recipe) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(case.seed)
        self._case, self._recipe = case, recipe
        self._data = load(recipe.context, recipe.data)
        self.model = Transformer(
            text.CLASSES,
            recipe.context,
            recipe.width,
            recipe.layers,
            recipe.heads,
            tied=False,
            history=recipe.history,
        )
        self._parameters = list(self.model.parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=recipe.lr, weight_decay=recipe.weight_decay
        )
        route, options = compressions.parse(case.method, {}, last_layer="").split()
        options.pop("exclude", None)
        settings = {"threshold": recipe.threshold, "seed": case.seed, **options}
        self._ranks = LocalRanks(self.model, route, recipe.ranks, **settings)
        self.step = 0
        self.curve: list[float] = []
        self._seconds = 0.0
        self._per_epoch = len(self._data.train.labels) // recipe.batch
        self._epoch: tuple[int, list[np.ndarray]] = (-1, [])

    @property
    def over(self) -> bool:
        """Whether all steps are made."""
        return self.step == self._recipe.steps

    def advance(self) -> None:
        """Makes one step, and at the end of a part of them scores the model."""
        started, recipe = time.process_time(), self._recipe
        self._update()
        self.step += 1
        if self.step * recipe.points // recipe.steps > len(self.curve):
            some = np.linspace(0, len(self._test.labels), recipe.scored, endpoint=False)
            self.curve.append(self._score(np.unique(some.astype(np.int64))))
        self._seconds += time.process_time() - started

    def result(self) -> dict[str, Any]:
        """The result at the end: losses in bits a byte, bytes a step, and processor seconds."""
        counters = self._ranks.counters
        return {
            "test_bits": self._score(np.arange(len(self._test.labels))),
            "curve": [round(bits, 5) for bits in self.curve],
            "parameters": sum(parameter.numel() for parameter in self._parameters),
            "message_bytes_per_step": counters.message_bytes / counters.steps,
            "wire_bytes_per_step": counters.wire_bytes / counters.steps,
            "processor_seconds": round(self._seconds, 1),
        }

    def save(self, path: Path) -> None:
        """Writes a checkpoint of a training that is not over, atomically."""
        draft = path.with_suffix(".part")
        state = {
            "case": asdict(self._case),
            "recipe": asdict(self._recipe),
            "step": self.step,
            "curve": self.curve,
            "seconds": self._seconds,
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "ranks": self._ranks.state(),
        }
        torch.save(state, draft)
        draft.replace(path)

    def load(self, path: Path) -> None:
        """Continues from a checkpoint.

        Raises:
            ValueError: it is that of another case or recipe.
        """
        state = torch.load(path, weights_only=True)
        for what, own in (("case", asdict(self._case)), ("recipe", asdict(self._recipe))):
            if state[what] != own:
                raise ValueError(
                    f"{path}: expected a checkpoint of {what} {own}, got {state[what]}"
                )
        self.step, self.curve, self._seconds = state["step"], state["curve"], state["seconds"]
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._ranks.load_state(state["ranks"])

    def _update(self) -> None:
        recipe = self._recipe
        x, y = _tensors(self._data.train, self._rows())
        gradients = []
        for rank in range(recipe.ranks):
            loss = _cross_entropy(self.model, x[rank :: recipe.ranks], y[rank :: recipe.ranks])
            gradients.append(torch.autograd.grad(loss, self._parameters))
        averages = self._ranks.average(gradients)
        for parameter, average in zip(self._parameters, averages, strict=True):
            parameter.grad = average
        for group in self._optimizer.param_groups:
            group["lr"] = recipe.rate(self.step)
        self._optimizer.step()

    def _rows(self) -> np.ndarray:
        """The windows of this step, of all ranks."""
        epoch, place = divmod(self.step, self._per_epoch)
        if self._epoch[0] != epoch:
            count, batch = len(self._data.train.labels), self._recipe.batch
            self._epoch = epoch, batches.epoch(count, batch, seed=self._case.seed, epoch=epoch)
        return self._epoch[1][place]

    @property
    def _test(self) -> Samples:
        assert self._data.test is not None
        return self._data.test

    @torch.no_grad()
    def _score(self, rows: np.ndarray) -> float:
        """Bits a byte of windows of test text."""
        total = 0.0
        for some in np.split(rows, range(_TOGETHER, len(rows), _TOGETHER)):
            total += len(some) * float(_cross_entropy(self.model, *_tensors(self._test, some)))
        return total / len(rows) / math.log(2)


@cache
def load(context: int, data: str | None) -> Data:
    """The text, read once."""
    return text.load(context, None if data is None else Path(data))


def _tensors(samples: Samples, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    labels = samples.labels[rows].astype(np.int64)
    return torch.from_numpy(samples.load(rows)), torch.from_numpy(labels)


def _cross_entropy(model: Transformer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())
