"""One trainer a framework; each imports its framework and no other."""

from __future__ import annotations

from importlib import import_module

from benchmarks.loop import Trainer

FRAMEWORKS = ("torch", "tensorflow", "keras")


def load(framework: str, threads: int) -> Trainer:
    """Initialises Horovod for a framework."""
    module = import_module(f"benchmarks.trainers.{framework}")
    trainer: Trainer = module.start(threads)
    return trainer
