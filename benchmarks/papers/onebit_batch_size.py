"""1-bit SGD (Seide et al., 2014), section 4: minibatch sizes that are selected while training, in kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.data import batches
from benchmarks.papers import models
from benchmarks.papers.batch_size import (
    BatchSizeSelector,
    LearningRateProfile,
    LearningRateSearch,
)
from benchmarks.papers.experiment import (
    Advance,
    Claim,
    Experiment,
    Row,
    choose,
    kinds,
    percent,
    values,
)
from benchmarks.papers.training import DATA, images, score, tensors
from benchmarks.tables import Table
from benchmarks.verdicts import judge

SIZES = (32, 64, 128, 256, 512)
SELECTED = "selected"
_RATE, _MOMENTUM = 0.05, 0.9
_PERIODS = 6
"""The number of periods of a training, each of which begins with a selection."""

_TRIAL_EPOCHS = 1
_HELD_OUT = 0.2


@dataclass(frozen=True)
class Settings:
    """One training.

    Attributes:
        size: the size of minibatches; a number, or :data:`SELECTED`.
        seed: the seed of the first weights and the order of the images.
        epochs: the number of epochs, without trials that were not chosen.
        data: the recipe's data.
    """

    size: int | str
    seed: int
    epochs: int = 36
    data: str = DATA


def cases(full: bool) -> list[Settings]:
    """Selected sizes beside the smallest and the largest; ``full`` has more seeds, and all sizes."""
    sizes = SIZES if full else (SIZES[0], SIZES[-1])
    return [
        Settings(size, seed) for seed in range(10 if full else 3) for size in (*sizes, SELECTED)
    ]


class Training:
    """Plain training of one worker, by samples and not by steps.

    Args:
        settings: the settings.
        profile: the profile of the learning rate.
    """

    def __init__(self, settings: Settings, profile: LearningRateProfile) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(settings.seed)
        self.data = images(models.SIGMOID, settings.data)
        self.model: nn.Module = models.build(models.SIGMOID, self.data.image, self.data.classes)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=_RATE, momentum=_MOMENTUM)
        self._seed = settings.seed
        order = np.random.default_rng(0).permutation(len(self.data.train.labels))
        held = int(_HELD_OUT * len(order))
        self._held_out, self.rows = order[:held], order[held:]
        self._profile, self._factor = profile, 1.0
        self.samples = self.updates = 0

    def epoch(self, number: int, size: int) -> tuple[int, int]:
        """One pass over the training images, as :class:`BatchSizeSelector` asks for it.

        The learning rate decays with the samples, and is at :data:`_RATE` for the smallest size at first.
        """
        right = count = 0
        factor = self._profile.factor(self.samples)
        for group in self.optimizer.param_groups:
            group["lr"] *= factor / self._factor
        for rows in self._drawn(number, size):
            x, y = tensors(self.data, "train", rows)
            self.optimizer.zero_grad()
            logits = self.model(x)
            F.cross_entropy(logits, y).backward()
            self.optimizer.step()
            right += int((logits.argmax(1) == y).sum())
            count += len(y)
            self.updates += 1
        for group in self.optimizer.param_groups:
            group["lr"] *= self._factor / factor
        return right, count

    @torch.no_grad()
    def held_out(self) -> float:
        """The accuracy on images that it does not train with."""
        x, y = tensors(self.data, "train", self._held_out)
        return float((self.model(x).argmax(1) == y).float().mean())

    def _drawn(self, number: int, size: int) -> Iterator[np.ndarray]:
        for rows in batches.epoch(len(self.rows), size, seed=self._seed, epoch=number):
            yield self.rows[rows]


def run(settings: Settings, advance: Advance) -> dict[str, Any]:
    """Searches a profile of the learning rate with the smallest size, and trains with it."""
    profile = LearningRateProfile(_searched(replace(settings, size=SIZES[0])))
    training = Training(settings, profile)
    fixed = settings.size != SELECTED
    selector = BatchSizeSelector(
        [int(settings.size)] if fixed else SIZES,
        training.optimizer,
        [training.model, training.optimizer],
    )
    if fixed:
        for group in training.optimizer.param_groups:
            group["lr"] *= int(settings.size) / SIZES[0]
    period = max(1, settings.epochs // _PERIODS)
    sizes, spent = [], 0
    for number in range(settings.epochs):
        if not fixed and number % period < _TRIAL_EPOCHS:
            before = training.updates
            taken: dict[int, int] = {}

            def trial(
                size: int, number: int = number, taken: dict[int, int] = taken
            ) -> tuple[int, int]:
                begun = training.updates
                counts = training.epoch(number, size)
                taken[size] = training.updates - begun
                return counts

            found = selector.select(trial)
            spent += training.updates - before - taken[found.size]
            training.updates = before + taken[found.size]
            sizes.append(found.size)
        else:
            training.epoch(number, selector.size)
        training.samples += len(training.rows)
        advance()
    accuracy, _ = score(training.model, training.data, "test")
    train_accuracy, train_loss = score(training.model, training.data, "train")
    return {
        "test_accuracy": accuracy,
        "train_accuracy": train_accuracy,
        "train_loss": train_loss,
        "updates": training.updates,
        "updates_of_other_trials": spent,
        "sizes": sizes,
        "profile": profile_points(profile),
    }


@cache
def _searched(settings: Settings) -> list[tuple[int, float]]:
    """The profile of an earlier configuration: the smallest size, without selection."""
    training = Training(settings, LearningRateProfile([(0, 1.0)]))
    search = LearningRateSearch(decay=0.7)
    for number in range(settings.epochs):
        training.epoch(number, SIZES[0])
        training.samples += len(training.rows)
        before = search.factor
        search.update(training.samples, training.held_out())
        for group in training.optimizer.param_groups:
            group["lr"] *= search.factor / before
    return search.points


def profile_points(profile: LearningRateProfile) -> list[tuple[float, float]]:
    """The points of a profile as JSON types, rounded to four digits."""
    return [(samples, float(f"{factor:.4g}")) for samples, factor in profile.points]


def table(rows: list[Row]) -> Table:
    """One line a size."""
    header = ("minibatches of", "test accuracy %", "updates", "of trials in vain", "sizes chosen")
    lines = []
    for size in kinds(rows, "size"):
        own = choose(rows, size=size)
        chosen = "; ".join(" ".join(map(str, one["result"]["sizes"])) for one in own)
        lines.append(
            (
                str(size),
                percent(own, "test_accuracy"),
                f"{values(own, 'updates').mean():,.0f}",
                f"{values(own, 'updates_of_other_trials').mean():,.0f}",
                chosen if size == SELECTED else "",
            )
        )
    return Table(header, lines)


def claims(rows: list[Row]) -> list[Claim]:
    """Larger minibatches in time, fewer updates, no loss of accuracy."""
    own, smallest = choose(rows, size=SELECTED), choose(rows, size=SIZES[0])
    sizes = np.array([one["result"]["sizes"] for one in own], float)
    first, last = sizes[:, 0], sizes[:, -1]
    accuracy, best = (100 * values(group, "test_accuracy") for group in (own, smallest))
    updates, most = (values(group, "updates") for group in (own, smallest))
    return [
        Claim(
            "more mature models allow for larger minibatches",
            "no numbers",
            f"{first.mean():.0f} at first, {last.mean():.0f} in the end, on average",
            judge(last - first),
        ),
        Claim(
            "selection makes training shorter without a loss of accuracy",
            "41h to 35h",
            f"{updates.mean():,.0f} updates for {most.mean():,.0f}; accuracy {accuracy.mean():.1f}% "
            f"for {best.mean():.1f}%",
            judge(most - updates, accuracy - best + 1),
        ),
    ]


EXPERIMENT = Experiment(
    name="onebit-batch-size",
    paper="1-bit SGD (Seide et al., 2014), section 4: selecting minibatch sizes, in kind",
    cases=cases,
    ticks=lambda settings: settings.epochs,
    run=run,
    table=table,
    claims=claims,
)
