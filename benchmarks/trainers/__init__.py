"""One trainer for each framework; each imports its framework and no other."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from benchmarks import quiet
from benchmarks.compressions import AUTO, LOCAL, STOCK
from benchmarks.loop import Trainer
from benchmarks.settings import ADAM, ADAMW, MUON, ONEBIT_ADAM, RMSPROP, SGD

_OPTIMIZERS = (SGD, ADAM, ADAMW, RMSPROP)


@dataclass(frozen=True)
class Abilities:
    """A trainer's part of the choices that the command line offers.

    Attributes:
        compressions: the compressions besides the codecs.
        optimizers: the optimizers, among :data:`benchmarks.settings.OPTIMIZERS`.
        is_torch: whether it is written in PyTorch, whose autocast and devices it then has.
    """

    compressions: tuple[str, ...]
    optimizers: tuple[str, ...] = _OPTIMIZERS
    is_torch: bool = True


ABILITIES = {
    "torch": Abilities((AUTO, LOCAL), (*_OPTIMIZERS, ONEBIT_ADAM)),
    "ddp": Abilities((AUTO, LOCAL, STOCK), (*_OPTIMIZERS, MUON)),
    "fsdp": Abilities((AUTO, LOCAL, STOCK)),
    "diloco": Abilities((LOCAL, STOCK)),
    "tensorflow": Abilities((AUTO, LOCAL, STOCK), is_torch=False),
    "keras": Abilities((AUTO, LOCAL), is_torch=False),
}
FRAMEWORKS = tuple(ABILITIES)


def load(framework: str, threads: int) -> Trainer:
    """Initialises Horovod for a framework."""
    if not ABILITIES[framework].is_torch:
        # Notes on how it was built, of which TF_CPP_MIN_LOG_LEVEL silences some only.
        with quiet.standard_error():
            import_module("tensorflow")
    module = import_module(f"benchmarks.trainers.{framework}")
    trainer: Trainer = module.start(threads)
    return trainer
