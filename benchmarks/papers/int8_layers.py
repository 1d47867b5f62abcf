"""Dettmers (2016), table 1: errors of the four 8-bit types on a network's layers, in kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.data import batches
from benchmarks.papers import models, training
from benchmarks.papers.experiment import Advance, Claim, Experiment, Row, spread, values
from benchmarks.papers.int8_errors import KINDS
from benchmarks.papers.native import Native
from benchmarks.tables import Table
from benchmarks.verdicts import judge
from hvd_compress.codecs import Int8, NoiseKey

GRADIENTS, ACTIVATIONS = "data parallel", "model parallel"
PUBLISHED = {
    GRADIENTS: ((3, 4, 5), (5, 6, 6), (4.5, 4.5, 6), (4, 4, 5)),
    ACTIVATIONS: ((0.5, 2, 2), (1, 2, 3), (1.5, 2, 8), (1, 2, 6)),
}
"""Mean relative errors in per cent of three layers, by type in the order of KINDS."""
SMALLEST = 1e-6
"""The smallest magnitude of the types without normalisation: ``10**-7`` times the offset of 10 (section
3.4)."""
_EVERY = 10
"""The number of steps from one measurement to the next."""


@dataclass(frozen=True)
class Settings:
    """One training: the paper's network, dropout, RMSProp and learning rate (section 3.4).

    Attributes:
        seed: the seed of the weights, the order of the images and the dropout.
        steps: the number of steps.
        batch: the number of images per step; the paper does not say.
        data: the recipe's data.
    """

    seed: int
    steps: int = 60
    batch: int = 128
    data: str = training.DATA


def cases(full: bool) -> list[Settings]:
    """``full`` is longer."""
    return [Settings(seed, 1000 if full else 60) for seed in range(4)]


def run(settings: Settings, advance: Advance) -> dict[str, Any]:
    """Relative errors in per cent, by kind of tensor, type and layer, means over the steps."""
    torch.set_num_threads(1)
    torch.manual_seed(settings.seed)
    data = training.images(models.DROPOUT, settings.data)
    model = models.build(models.DROPOUT, data.image, data.classes)
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    outputs: list[torch.Tensor] = []
    for layer in layers:
        layer.register_forward_hook(lambda module, inputs, output: outputs.append(output.detach()))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.003)
    count = len(data.train.labels)
    found: dict[str, dict[str, list[list[float]]]] = {
        what: {kind: [] for kind in KINDS} for what in PUBLISHED
    }
    for step in range(settings.steps):
        epoch, place = divmod(step, count // settings.batch)
        rows = batches.epoch(count, settings.batch, seed=settings.seed, epoch=epoch)[place]
        x, y = training.tensors(data, "train", rows)
        outputs.clear()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        if step % _EVERY == 0:
            gradients = [layer.weight.grad for layer in layers]
            # The activations that are sent on: hidden layers are rectified.
            activations = [one.relu() for one in outputs[:-1]] + outputs[-1:]
            for what, tensors in ((GRADIENTS, gradients), (ACTIVATIONS, activations)):
                for kind in KINDS:
                    errors = [relative_error(Int8(kind, "tensor"), one) for one in tensors]
                    found[what][kind].append(errors)
        optimizer.step()
        advance()
    return {
        what: {kind: np.mean(looked, axis=0).tolist() for kind, looked in of_kinds.items()}
        for what, of_kinds in found.items()
    }


def relative_error(codec: Int8, tensor: torch.Tensor | None) -> float:
    """The mean of ``|error / x|`` in per cent over the elements of at least SMALLEST.

    The static tree has no zero: of what is much smaller, it sends many times as much.
    """
    assert tensor is not None
    x = np.ascontiguousarray(tensor.numpy().reshape(-1))
    sent = Native().through(codec, x.shape, x, NoiseKey())
    kept = np.abs(x) >= SMALLEST
    wide = x[kept].astype(np.float64)
    return float(100 * np.mean(np.abs((sent[kept] - wide) / wide)))


def table(rows: list[Row]) -> Table:
    """In the paper's order."""
    header = ("what", "type", "layer 1", "layer 2", "layer 3", "published")
    lines = []
    for what, published in PUBLISHED.items():
        for kind, paper in zip(KINDS, published, strict=True):
            errors = [spread(values(rows, what, kind, layer), "{:.1f}") for layer in range(3)]
            lines.append((what, kind, *errors, " / ".join(f"{one:g}" for one in paper)))
    return Table(header, lines, left=2)


def claims(rows: list[Row]) -> list[Claim]:
    """The dynamic tree is best on all layers."""
    found = []
    for what in PUBLISHED:
        best, margins = [], []
        for layer in range(3):
            errors = {kind: values(rows, what, kind, layer) for kind in KINDS}
            best.append(min(errors, key=lambda kind: errors[kind].mean()))
            margins += [errors[kind] - errors["dynamic"] for kind in KINDS if kind != "dynamic"]
        found.append(
            Claim(
                f"{what}: the dynamic tree has the smallest relative errors in each layer",
                "dynamic, or as good as another",
                ", ".join(best),
                judge(*margins),
            )
        )
    return found


EXPERIMENT = Experiment(
    name="int8-layers",
    paper="Dettmers 2016, table 1: layers, in kind",
    cases=cases,
    ticks=lambda settings: settings.steps,
    run=run,
    table=table,
    claims=claims,
)
