"""What a checkpoint says beside the variables: whose it is, and what another number of ranks inherits."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_compress.exchange import resize
from hvd_compress.tensorflow.slots import Slot

_VERSION = 1
_OWNER = "owner"
_SLOTS = "slots"


class Owner(tf.train.experimental.PythonState):
    """Whose residuals a checkpoint holds; refuses those of another rank before anything is restored.

    Args:
        rank: this rank in the compressor's process set.
        size: ranks in it.
        seed: of the noise.
        restored: called when the checkpoint is this rank's.
    """

    def __init__(self, rank: int, size: int, seed: int, restored: Callable[[], None]) -> None:
        self._expected = {"version": _VERSION, "rank": rank, "size": size, "seed": seed}
        self._restored = restored

    def serialize(self) -> str:
        """What is written to a checkpoint."""
        return json.dumps(self._expected)

    def deserialize(self, string_value: str | bytes) -> None:
        """Compares what a checkpoint says.

        Raises:
            ValueError: another rank, number of ranks or seed.
        """
        got = json.loads(string_value)
        for name, want in self._expected.items():
            if got.get(name) != want:
                raise ValueError(
                    f"restore: expected a compressor's checkpoint of {name} {want}, got {got.get(name)}; "
                    f"each rank saves and restores one of its own; another number of ranks needs those "
                    f"of all: load_resized()"
                )
        self._restored()


@dataclass
class Inheritance:
    """What gradients that have not been traced yet will start with.

    Attributes:
        slots: residual and number of exchanges by a gradient's position.
    """

    slots: dict[int, tuple[np.ndarray, int]] = field(default_factory=dict)

    def give(self, slot: Slot) -> None:
        """Hands over a slot's part, if there is one, once."""
        if slot.index in self.slots:
            residual, exchanges = self.slots.pop(slot.index)
            slot.residual.assign(residual)
            slot.exchanges.assign(exchanges)


def inheritance(
    checkpoints: Sequence[str], name: str, rank: int, size: int, seed: int
) -> Inheritance:
    """One rank's part of what all ranks of a job of another size had not sent.

    By the rule of :mod:`hvd_compress.exchange.resize`.

    Args:
        checkpoints: their paths, one of each rank, in any order.
        name: the compressor's in the checkpoint: ``"a"`` for ``tf.train.Checkpoint(a=compressor)``.
        rank: this rank.
        size: ranks now.
        seed: of the noise.

    Raises:
        ValueError: not one checkpoint of each rank, another seed, or checkpoints of different steps.
    """
    states = sorted((_read(path, name) for path in checkpoints), key=lambda state: state["rank"])
    ranks = [state["rank"] for state in states]
    sizes = {state["size"] for state in states}
    if not states or ranks != list(range(len(states))) or sizes != {len(states)}:
        raise ValueError(
            f"load_resized: expected one checkpoint of each rank, got those of ranks {ranks} of {sizes}"
        )
    if any(state["seed"] != seed for state in states):
        raise ValueError(
            f"load_resized: expected seed {seed}, got {sorted({s['seed'] for s in states})}"
        )
    counts = [{i: n for i, (_, n) in state["slots"].items()} for state in states]
    if any(count != counts[0] for count in counts):
        raise ValueError(f"load_resized: expected checkpoints of one step, got exchanges {counts}")
    heirs, factor = resize.heirs(len(states), size, rank)
    slots = {}
    for index, exchanges in counts[0].items():
        residuals = [state["slots"][index][0] for state in states]
        count = max(map(len, residuals))
        residual = np.zeros(count, np.float32)
        for heir in heirs:
            if len(residuals[heir]):
                residual += np.float32(factor) * residuals[heir]
        slots[index] = (residual, exchanges)
    return Inheritance(slots)


def _read(path: str, name: str) -> dict[str, Any]:
    reader = tf.train.load_checkpoint(path)
    prefix = f"{name}/" if name else ""
    key = f"{prefix}{_OWNER}/.ATTRIBUTES/py_state"
    if not reader.has_tensor(key):
        raise ValueError(
            f"load_resized: expected a compressor called {name!r} in {path}, got none: pass the name that "
            f"tf.train.Checkpoint was given"
        )
    slots: dict[int, tuple[np.ndarray, int]] = {}
    while reader.has_tensor(_variable(f"{prefix}{_SLOTS}/{len(slots)}/residual")):
        at = f"{prefix}{_SLOTS}/{len(slots)}"
        residual = reader.get_tensor(_variable(f"{at}/residual"))
        slots[len(slots)] = (residual, int(reader.get_tensor(_variable(f"{at}/exchanges"))))
    return {**json.loads(reader.get_tensor(key)), "slots": slots}


def _variable(path: str) -> str:
    return f"{path}/.ATTRIBUTES/VARIABLE_VALUE"
