"""Dettmers (2016), sections 3.4 and 3.5: test errors with 8-bit model and data parallelism, in kind.

On real ranks: activations, error signals and gradients travel as payloads. The paper's ranks were simulated
on one GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.papers import parallel_training, ranks
from benchmarks.papers.experiment import (
    Advance,
    Claim,
    Experiment,
    Row,
    choose,
    kinds,
    spread,
    values,
)
from benchmarks.papers.int8_errors import KINDS
from benchmarks.papers.parallel_training import DATA, DEEP, EXACT, HYBRID, OWN, PURE
from benchmarks.papers.training import DATA as MNIST_5K
from benchmarks.papers.training import images
from benchmarks.tables import Table
from benchmarks.verdicts import judge, mostly

PUBLISHED_F = {PURE: "F(4, 4) = 0.54, p = 0.71", DATA: "F(4, 4) = 0.71, p = 0.59"}
"""The analysis of variance of section 3.4."""
_POINT = 1.0
"""The difference in per cent below which errors count as the same, as on the whole page."""
_DIVERGED = 50.0
"""The test error in per cent from which a network has not learnt."""


@dataclass(frozen=True)
class Settings:
    """All trainings of a number of ranks and a seed.

    Attributes:
        ranks: the number of ranks.
        seed: the seed of the weights, the order of the images and the dropout.
        steps: the number of steps of each training.
        batch: the number of images per step, of all ranks together; the paper does not say.
        width: the number of units of each hidden layer, except in the convolutional network.
        data: the recipe's data.
        modes: the kinds of parallelism.
        kinds: 32 bits, and the 8-bit types.
    """

    ranks: int
    seed: int
    steps: int = 60
    batch: int = 128
    width: int = 1024
    data: str = MNIST_5K
    modes: tuple[str, ...] = (PURE, OWN, DEEP, DATA, HYBRID)
    kinds: tuple[str, ...] = (EXACT, *KINDS)


def cases(full: bool) -> list[Settings]:
    """``full`` has the length of 20 epochs of MNIST."""
    seeds = range(8 if full else 3)
    return [Settings(n, seed, 20 * 468 if full else 60) for seed in seeds for n in (2, 4)]


def run(settings: Settings, advance: Advance) -> dict[str, Any]:
    """Test accuracies, by parallelism and type."""
    images("lenet", settings.data)  # A folder without data is an error here, once.
    result: dict[str, Any] = ranks.run(
        settings.ranks, parallel_training.train_all, settings, advance
    )
    return result


def table(rows: list[Row]) -> Table:
    """One line a kind of parallelism and number of ranks."""
    types = rows[0]["kinds"]
    header = (
        "parallelism",
        "ranks",
        *(f"{kind}: test error %" for kind in types),
        "bytes, 32 to 8",
    )
    lines = []
    for mode in rows[0]["modes"]:
        for count in kinds(rows, "ranks"):
            own = choose(rows, ranks=count)
            errors = [spread(_errors(own, mode, kind), "{:.1f}") for kind in types]
            sizes = [own[0]["result"][mode][kind]["message_bytes"] for kind in (EXACT, types[-1])]
            lines.append((mode, str(count), *errors, f"{sizes[0] / sizes[1]:.2f}"))
    return Table(header, lines)


def claims(rows: list[Row]) -> list[Claim]:
    """No type differs from 32 bits, and the mantissa and the static tree are the unstable ones."""
    from scipy import stats

    found = []
    for mode in (PURE, DATA):
        for count in kinds(rows, "ranks"):
            own = choose(rows, ranks=count)
            groups = [_errors(own, mode, kind) for kind in (EXACT, *KINDS)]
            degrees = (len(groups) - 1, sum(map(len, groups)) - len(groups))
            with np.errstate(all="ignore"):
                f, p = stats.f_oneway(*groups) if degrees[1] else (np.nan, np.nan)
            differences = [group - groups[0] for group in groups[1:]]
            found.append(
                Claim(
                    f"{mode}, {count} ranks: test errors of the five types do not differ (section 3.4)",
                    PUBLISHED_F[mode],
                    f"F{degrees} = {f:.2f}, p = {p:.2g}",
                    judge(*(_POINT + sign * d for d in differences for sign in (1, -1))),
                )
            )
    ratios, margins = [], []
    for count in kinds(rows, "ranks"):
        own = choose(rows, ranks=count)
        exact = _errors(own, HYBRID, EXACT)
        for kind in KINDS:
            errors = _errors(own, HYBRID, kind)
            ratios.append(errors.mean() / exact.mean())
            margins += [1.02 * exact - errors, errors - 0.98 * exact]
    found.append(
        Claim(
            "convolutional: test errors differ by at most 2% relative to each other (section 3.4)",
            "0.98 to 1.02",
            f"{min(ratios):.2f} to {max(ratios):.2f} of that with 32 bits",
            judge(*margins),
        )
    )
    for kind, stable in (
        ("dynamic", True),
        ("linear", True),
        ("mantissa", False),
        ("static", False),
    ):
        deep = np.stack([_errors(choose(rows, ranks=n), DEEP, kind) for n in kinds(rows, "ranks")])
        # A seed counts once: its trainings share weights and images, whatever the number of ranks.
        seeds = (deep >= _DIVERGED).any(axis=0)
        diverged = int(seeds.sum())
        found.append(
            Claim(
                f"4 hidden layers: {kind} is {'stable' if stable else 'unstable'} (section 3.5)",
                "stable" if stable else "diverges often",
                f"diverges with {diverged} of {seeds.size} seeds, test error {spread(deep, '{:.1f}')}",
                mostly(seeds.size - diverged if stable else diverged, seeds.size),
            )
        )
    losses = {kind: _of_seeds(rows, DEEP, kind) for kind in (EXACT, *KINDS[:2])}
    found.append(
        Claim(
            "4 hidden layers: 8 bits train faster than 32 with RMSProp (section 3.5, figure 4)",
            "t(7) = 19.3, p < 0.001",
            ", ".join(f"{kind}: loss {loss.mean():.3f}" for kind, loss in losses.items()),
            judge(*(losses[EXACT] - losses[kind] for kind in KINDS[:2])),
        )
    )
    return found


def _of_seeds(rows: list[Row], mode: str, kind: str) -> np.ndarray:
    """Each seed's loss, mean over the numbers of ranks, which share weights and images."""
    losses = [values(choose(rows, ranks=n), mode, kind, "last_loss") for n in kinds(rows, "ranks")]
    return np.mean(losses, axis=0)


def _errors(rows: list[Row], mode: str, kind: str) -> np.ndarray:
    return 100 * (1 - values(rows, mode, kind, "test_accuracy"))


EXPERIMENT = Experiment(
    name="int8-parallel",
    paper="Dettmers 2016, sections 3.4 and 3.5: model and data parallelism, in kind",
    cases=cases,
    ticks=lambda settings: len(settings.modes) * len(settings.kinds),
    run=run,
    table=table,
    claims=claims,
)
