"""Trains with compressed gradients: ``horovodrun -np N python -m benchmarks.train ...``."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import sys
from collections.abc import Callable, Iterator

import numpy as np
from tqdm import tqdm

from benchmarks import (
    arguments,
    codec_file,
    compressions,
    data,
    loop,
    machine,
    report,
    results,
    trainers,
)
from benchmarks.compressions import AUTO
from benchmarks.models import MODELS


def main(command_line: list[str] | None = None) -> int:
    """Trains with every compression and seed; returns 0 if the ranks' parameters agree, and 1 otherwise."""
    args = arguments.parse(command_line)
    if args.explain:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
    settings = arguments.settings(args)
    model = MODELS[args.model]
    with _in_one_line():
        chosen = [
            compressions.parse(text, dict(args.option), model.last_layer)
            for text in args.compression
        ]
        images = data.load(model, args.data, args.margin)
    trainer = trainers.load(args.framework, args.threads)
    if args.explain and trainer.rank == 0 and all(one.name != AUTO for one in chosen):
        print("--explain: nothing to explain, since no compression is auto", file=sys.stderr)
    with _in_one_line():
        outcome = _on_every_rank(trainer, lambda: _open(args, images.name, trainer))

    # Seed by seed, so that all compressions have the same seeds if training is stopped early.
    plan = [(seed, c) for seed in range(args.seed, args.seed + args.seeds) for c in chosen]
    missing = np.array([outcome.find(c.text, seed) is None for seed, c in plan], np.float64)
    todo = [run for run, left in zip(plan, trainer.gather(missing)[0], strict=True) if left]
    steps = settings.total_steps(loop.steps_per_epoch(images, settings, trainer.size))
    with tqdm(
        total=len(todo) * steps,
        unit="step",
        disable=trainer.rank != 0,
        mininterval=1 if sys.stderr.isatty() else 5,
    ) as bar:
        for seed, compression in todo:
            bar.set_description(f"{compression.text}, seed {seed}", refresh=False)
            with _in_one_line(f"{compression.text}: "):
                session = trainer.start(settings, images.classes, compression, seed)
            run = loop.run(
                trainer,
                session,
                images,
                settings,
                compression,
                seed,
                lambda: bar.update() and None,
                test_every_epoch=not args.test_at_end,
            )
            outcome.runs.append(run)
            if trainer.rank == 0:
                outcome.write(args.json)
    if trainer.rank == 0 and not args.quiet:
        print(report.training_table(outcome).text())
    return min(1, report.check(outcome))


@contextlib.contextmanager
def _in_one_line(what: str = "") -> Iterator[None]:
    """Turns errors about wrong settings into one line before this rank exits.

    Raises:
        SystemExit: replaces a ``TypeError`` or ``ValueError``.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        raise SystemExit(f"error: {what}{error}") from error


def _on_every_rank(trainer: loop.Trainer, work: Callable[[], results.Results]) -> results.Results:
    """Calls ``work``, and returns its result if it succeeds on all ranks.

    If a single rank ended, the others would end with an error of Horovod's that does not tell the reason.

    Raises:
        ValueError: ``work`` raised one on this rank or on another.
    """
    problem = None
    try:
        done = work()
    except ValueError as error:
        problem = error
    failed = trainer.gather(np.array([problem is not None], np.float64)).any(1)
    if problem is not None:
        raise problem
    if failed.any():
        raise ValueError(f"rank {failed.argmax()} cannot start; its message says why")
    return done


def _open(args: argparse.Namespace, data_name: str, trainer: loop.Trainer) -> results.Results:
    """The results in the output file, or new ones without runs.

    Raises:
        ValueError: the file's runs were made with other settings.
    """
    recipe = dataclasses.asdict(arguments.settings(args))
    configuration = {
        "framework": args.framework,
        "data": data_name,
        **{key: _as_json(value) for key, value in recipe.items()},
        "options": {key: _as_json(value) for key, value in args.option},
    }
    if args.codec_file is not None:
        file = args.codec_file
        configuration["codec_file"] = {"name": file.name, "sha256": codec_file.digest(file)}
    fresh = results.Results(
        configuration,
        trainer.size,
        machine.versions(),
        machine.description(),
        network=machine.network(),
    )
    if not (args.resume and trainer.rank == 0 and args.json.exists()):
        return fresh
    old = results.read(args.json)
    for what in ("configuration", "ranks", "versions", "network"):
        if getattr(old, what) != getattr(fresh, what):
            raise ValueError(
                f"{args.json}: expected {what} {getattr(fresh, what)}, got {getattr(old, what)}"
            )
    return old


def _as_json(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


if __name__ == "__main__":
    sys.exit(main())
