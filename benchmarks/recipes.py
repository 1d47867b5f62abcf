"""The recipes of the runs whose accuracies are compared.

Every codec gets the same one. ``ternary`` leaves out the last layer, as :mod:`benchmarks.compressions`
says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks import settings

RANKS = 2


@dataclass(frozen=True)
class Recipe:
    """A training, and the measure by which trainings are compared.

    Attributes:
        batch: the number of samples per step, of all ranks together.
        options: the options of ``benchmarks.train``.
        measure: the attribute of :class:`benchmarks.results.Run` that is compared.
        unit: the unit of the differences.
        scale: the factor from the attribute to the unit.
        digits: the number of digits behind the point in tables.
    """

    batch: int
    options: Mapping[str, str]
    measure: str
    unit: str
    scale: float
    digits: int

    def arguments(
        self, framework: str, json: Path, compressions: list[str], ranks: int = RANKS
    ) -> list[str]:
        """The command line of ``benchmarks.train``; more ranks share the same samples of a step.

        Raises:
            ValueError: the batch cannot be divided among the ranks.
        """
        if self.batch % ranks:
            raise ValueError(
                f"expected a number of ranks that divides {self.batch} samples, got {ranks}"
            )
        recipe = [text for pair in self.options.items() for text in pair]
        recipe += ["--batch-size", str(self.batch // ranks), "--threads", "1"]
        where = ["--framework", framework, "--json", str(json.resolve())]
        return [*where, *recipe, "--compression", *compressions]


DIGITS = Recipe(
    batch=64,
    options={
        "--model": "lenet",
        "--epochs": "40",
        "--lr": "0.01",
        "--lr-warmup": "40",
        "--shift": "2",
        "--momentum": "0.9",
        "--schedule": "cosine",
        "--option": "threshold=1024",
    },
    measure="test_accuracy",
    unit="percentage points of test accuracy",
    scale=100,
    digits=2,
)
"""LeNet on the digits.

The recipe was chosen on the seeds 0 to 7, with an eye on 1-bit SGD, which needs more steps than the others
until what its residuals hold back has arrived; accuracies are compared on other seeds. It was chosen with
torch; other frameworks take it as it is.
"""


def _text(**options: str) -> Recipe:
    """A small transformer on the sources of Python's standard library, with an optimizer's options."""
    shared = {
        "--model": "gpt",
        "--steps": "400",
        "--lr-warmup": "40",
        "--schedule": "cosine",
        "--option": "threshold=1024",
    }
    own = {f"--{name.replace('_', '-')}": value for name, value in options.items()}
    return Recipe(
        batch=32,
        options={**shared, **own},
        measure="test_bits",
        unit="bits a byte of test text",
        scale=1,
        digits=3,
    )


TEXT = _text(optimizer="adamw", lr="0.003", weight_decay="0.1")
MOMENTUM = _text(optimizer="sgd", lr="0.05", momentum="0.9")
"""The same with momentum.

The learning rate was chosen without compression, on seed 0, among 0.02, 0.05, 0.1, 0.3 and 1.
"""

ONEBIT_ADAM = _text(optimizer=settings.ONEBIT_ADAM, lr="0.003", weight_decay="0.1")
"""The same as :data:`TEXT` with 1-bit Adam, whose first ``warmup_steps`` are AdamW's."""

MUON = _text(optimizer=settings.MUON, lr="0.01", weight_decay="0.1")
"""The same with Muon for the matrices of hidden layers, and AdamW for the rest; with ``--framework ddp``.

The learning rate was chosen without compression, on seed 0, among 0.001, 0.003, 0.01 and 0.03.
"""

RECIPES = {
    "digits": DIGITS,
    "text": TEXT,
    "text-momentum": MOMENTUM,
    "text-onebit-adam": ONEBIT_ADAM,
    "text-muon": MUON,
}
"""The recipes by the names that command lines use."""
