"""TernGrad (Wen et al., 2017), section 3.3 and figure 4: the effect of clipping, and zeros."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from benchmarks.papers.experiment import Advance, Claim, Experiment, Row, percent, spread, values
from benchmarks.papers.native import Native
from benchmarks.papers.training import NONE, Gradients, Recipe, Run
from benchmarks.tables import Table
from benchmarks.verdicts import judge
from hvd_compress.codecs import NoiseKey, Ternary

CLIP = 2.5
_EVERY = 10
"""The number of steps from one measured gradient to the next."""


def cases(full: bool) -> list[Recipe]:
    """LeNet, two workers."""
    steps = 2000 if full else 100
    return [
        Recipe("lenet", NONE, seed, steps, workers=2, lr=0.02, decay=0.5)
        for seed in range(10 if full else 3)
    ]


def change(x: np.ndarray, sent: np.ndarray) -> tuple[float, float]:
    """The per cent by which ``sent`` is shorter than ``x``, and the angle between them in degrees."""
    wide, cut = x.astype(np.float64), sent.astype(np.float64)
    lengths = np.linalg.norm(wide), np.linalg.norm(cut)
    cosine = min(1.0, float(wide @ cut / (lengths[0] * lengths[1])))
    return float(100 * (1 - lengths[1] / lengths[0])), math.degrees(math.acos(cosine))


def gaussian() -> tuple[float, float]:
    """The same for normally distributed numbers, by their integrals."""
    c, root = CLIP, math.sqrt(2 * math.pi)
    density = math.exp(-c * c / 2) / root
    beyond = math.erfc(c / math.sqrt(2))
    # E[f(x)^2] and E[x f(x)], with f clipping at c: by parts.
    square = 1 - beyond - 2 * c * density + c * c * beyond
    product = 1 - beyond
    return 100 * (1 - math.sqrt(square)), math.degrees(math.acos(product / math.sqrt(square)))


def run(recipe: Recipe, advance: Advance) -> dict[str, Any]:
    """Means over the steps, of each tensor with at least 100 elements."""
    training, native = Run(recipe), Native()
    found: dict[str, list[tuple[float, ...]]] = {}

    def each(step: int, loss: float, gradients: Gradients) -> None:
        if step % _EVERY == 0:
            for number, (name, of_workers) in enumerate(gradients.items()):
                x = np.ascontiguousarray(of_workers[0].detach().numpy().reshape(-1))
                if x.size >= 100 and x.any():
                    found.setdefault(name, []).append(
                        _look(native, x, NoiseKey(tensor=number, step=step))
                    )
        advance()

    training.train(each)
    names = ("length_percent", "degrees", "zeros", "zeros_without_clipping")
    return {
        tensor: dict(zip(names, np.mean(looked, axis=0).tolist(), strict=True))
        for tensor, looked in found.items()
    }


def _look(native: Native, x: np.ndarray, noise: NoiseKey) -> tuple[float, ...]:
    clipping, plain = Ternary("tensor", CLIP), Ternary("tensor", None)
    limit = clipping.norms(x)[0]
    shares = [
        float(np.mean(native.through(codec, x.shape, x, noise) == 0)) for codec in (clipping, plain)
    ]
    return (*change(x, np.clip(x, -limit, limit)), *shares)


def table(rows: list[Row]) -> Table:
    """One line a tensor."""
    header = ("tensor", "shorter by %", "turned by degrees", "zeros %", "zeros without clipping %")
    lines = [
        (
            tensor,
            spread(values(rows, tensor, "length_percent"), "{:.1f}"),
            spread(values(rows, tensor, "degrees"), "{:.1f}"),
            percent(rows, tensor, "zeros"),
            percent(rows, tensor, "zeros_without_clipping"),
        )
        for tensor in rows[0]["result"]
    ]
    length, angle = gaussian()
    return Table(
        header,
        [
            *lines,
            ("normal distribution", f"{length:.2f}", f"{angle:.2f}", "-", "-"),
            ("published", "1.0 to 1.5", "2 to 3", "71.32", "-"),
        ],
    )


def claims(rows: list[Row]) -> list[Claim]:
    """Section 3.3's ranges, and figure 4 (c)."""
    tensors = list(rows[0]["result"])
    lengths = [values(rows, tensor, "length_percent") for tensor in tensors]
    angles = [values(rows, tensor, "degrees") for tensor in tensors]
    largest = "fc1.weight"
    zeros = 100 * values(rows, largest, "zeros")
    length, angle = gaussian()
    return [
        Claim(
            "clipping changes the length by 1.0% to 1.5%",
            "1.0% to 1.5%",
            f"{_range(lengths, '%')}; normal {length:.2f}%",
            judge(*(x - 1.0 for x in lengths), *(1.5 - x for x in lengths)),
        ),
        Claim(
            "clipping changes the direction by 2 to 3 degrees",
            "2 to 3",
            f"{_range(angles)}; normal {angle:.1f}",
            judge(*(x - 2 for x in angles), *(3 - x for x in angles)),
        ),
        Claim(
            "a fully connected layer's gradients become zeros for 71.32% (figure 4 c)",
            "71.3%",
            f"{zeros.mean():.1f}% of {largest}",
            judge(zeros - 61.32, 81.32 - zeros),
        ),
    ]


def _range(of_tensors: list[np.ndarray], unit: str = "") -> str:
    means = [one.mean() for one in of_tensors]
    return f"{min(means):.1f}{unit} to {max(means):.1f}{unit}"


EXPERIMENT = Experiment(
    name="terngrad-clipping",
    paper="TernGrad (Wen et al., 2017), section 3.3 and figure 4 (c): clipping and zeros",
    cases=cases,
    ticks=lambda recipe: recipe.steps,
    run=run,
    table=table,
    claims=claims,
)
