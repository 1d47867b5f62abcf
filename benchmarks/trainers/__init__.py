"""One trainer a framework; each imports its framework and no other."""

from __future__ import annotations

from importlib import import_module

from benchmarks import quiet
from benchmarks.loop import Trainer

FRAMEWORKS = ("torch", "ddp", "tensorflow", "keras")


def load(framework: str, threads: int) -> Trainer:
    """Initialises Horovod for a framework."""
    if framework in ("tensorflow", "keras"):
        # Notes on how it was built, of which TF_CPP_MIN_LOG_LEVEL silences some only.
        with quiet.standard_error():
            import_module("tensorflow")
    module = import_module(f"benchmarks.trainers.{framework}")
    trainer: Trainer = module.start(threads)
    return trainer
