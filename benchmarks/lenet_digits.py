"""The recipe of the runs whose accuracies are compared: LeNet on the digits.

Every codec gets the same one. It was chosen on the seeds 0 to 7, with an eye on 1-bit SGD, which needs
more steps than the others until what its residuals hold back has arrived; accuracies are compared on
other seeds.
It was chosen with torch; other frameworks take it as it is.
``ternary`` leaves out the last layer, as :mod:`benchmarks.compressions` says.
"""

from __future__ import annotations

from pathlib import Path

RANKS = 2
_BATCH = 64
"""Images a step, of all ranks together."""
_RECIPE = {
    "--model": "lenet",
    "--epochs": "40",
    "--lr": "0.01",
    "--lr-warmup": "40",
    "--shift": "2",
    "--momentum": "0.9",
    "--schedule": "cosine",
    "--option": "threshold=1024",
    "--threads": "1",
}


def arguments(framework: str, json: Path, compressions: list[str], ranks: int = RANKS) -> list[str]:
    """The command line of ``benchmarks.train``; more ranks share the same images of a step.

    Raises:
        ValueError: as many ranks cannot.
    """
    if _BATCH % ranks:
        raise ValueError(f"expected a number of ranks that divides {_BATCH} images, got {ranks}")
    recipe = [text for pair in _RECIPE.items() for text in pair]
    recipe += ["--batch-size", str(_BATCH // ranks)]
    where = ["--framework", framework, "--json", str(json.resolve())]
    return [*where, *recipe, "--compression", *compressions]
