"""The trainings in a folder: a file for each that is over, a checkpoint for each that is not."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import json_files, machine
from benchmarks.trained.training import Case, Recipe, Training

_SAVED_EVERY = 100
"""The steps between checkpoints."""


def make(
    folder: Path,
    recipe: Recipe,
    cases: Sequence[Case],
    told: Callable[[Case, Training], Any] = lambda case, training: None,
) -> None:
    """Makes the trainings that the folder lacks and no other process is making, in order.

    A training that was stopped continues from its checkpoint. Processes that share a folder share the work.

    Args:
        folder: the folder.
        recipe: the recipe.
        cases: the trainings.
        told: a function that is called after each checkpoint and each training.

    Raises:
        ValueError: the folder has trainings of another recipe.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for case in cases:
        path = folder / f"{_name(case)}.json"
        with _alone(path.with_suffix(".lock")) as alone:
            if alone and not (path.exists() and _read(path, recipe)):
                _train(case, recipe, path, told)


def finished(folder: Path, recipe: Recipe, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """The trainings that are over: the case, its result, and the machine and versions that made it.

    Raises:
        ValueError: the folder has trainings of another recipe.
    """
    paths = [folder / f"{_name(case)}.json" for case in cases]
    return [_read(path, recipe) for path in paths if path.exists()]


def _train(case: Case, recipe: Recipe, path: Path, told: Callable[[Case, Training], Any]) -> None:
    training, checkpoint = Training(case, recipe), path.with_suffix(".pt")
    if checkpoint.exists():
        training.load(checkpoint)
    while not training.over:
        training.advance()
        if training.step % _SAVED_EVERY == 0 and not training.over:
            training.save(checkpoint)
            told(case, training)
    about = {"machine": machine.description(), "versions": machine.versions()}
    made = {"recipe": asdict(recipe), **about, **asdict(case), "result": training.result()}
    json_files.write(path, made)
    checkpoint.unlink(missing_ok=True)
    told(case, training)


def _read(path: Path, recipe: Recipe) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    if found["recipe"] != asdict(recipe):
        raise ValueError(
            f"{path}: expected a training of recipe {asdict(recipe)}, got {found['recipe']}: "
            f"choose another folder"
        )
    return found


def _name(case: Case) -> str:
    return f"{case.method.replace(':', '+')}-{case.seed}"


@contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Whether this process alone holds the lock in the block; the lock ends with the process."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True
