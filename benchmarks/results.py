"""The JSON that a training benchmark writes, and reads to go on where it stopped."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import json_files

SCHEMA = "hvd_compress/train/1"


@dataclass(frozen=True)
class Point:
    """The mean loss over the steps up to ``step``, and over all ranks.

    Attributes:
        step: the last step.
        loss: the mean loss since the point before.
        seconds: the time since the start of the training, without tests, mean over the ranks; None in older
            files.
        wire_bytes: the bytes that a rank has sent until then, mean over the ranks; None in older files.
    """

    step: int
    loss: float
    seconds: float | None = None
    wire_bytes: float | None = None


@dataclass(frozen=True)
class Epoch:
    """The results of an epoch; ``test_accuracy`` is None where it was not measured."""

    epoch: int
    loss: float
    test_accuracy: float | None


@dataclass(frozen=True)
class Seconds:
    """The duration of a step, on rank 0."""

    median: float
    p10: float
    p90: float


@dataclass(frozen=True)
class Run:
    """One training from scratch with one compression and one seed.

    Bytes and codec seconds are means over the ranks and the steps. Where there is one rank nothing
    is exchanged: they are 0, and the ratio is None.

    Attributes:
        compression: the specification, a name with its settings.
        seed: the seed of the initial parameters, the order of the samples and the codec's noise.
        steps: the number of steps.
        curve: the loss over the steps.
        epochs: one entry for each epoch.
        test_accuracy: the accuracy after the last step, between 0 and 1; None without test samples.
        uncompressed_bytes_per_step: the bytes of the gradients.
        message_bytes_per_step: the bytes that a rank hands to Horovod.
        wire_bytes_per_step: the bytes that a rank sends, with ring algorithms.
        compression_ratio: the uncompressed bytes, divided by the message bytes.
        step_seconds: the time of batch, forward pass, backward pass, exchange and update.
        encode_seconds_per_step: time spent in encoding.
        decode_seconds_per_step: time spent in decoding.
        residual_norm: the l2 norm of a rank's residuals after the last step, mean over the ranks.
        parameters_identical: whether all ranks ended with the same bits; None where each trained alone.
        test_bits: mean cross-entropy of a test label after the last step, in bits: bits a byte of text;
            None without test samples, or where it was not measured.
        test_top5: test labels among the five most likely, by all, after the last step; None without test
            samples, with up to ten classes, or in older files.
        train_seconds: all steps, and what ranks exchange after the last one, on the slowest rank; without
            tests. None in older files.
    """

    compression: str
    seed: int
    steps: int
    curve: list[Point]
    epochs: list[Epoch]
    test_accuracy: float | None
    uncompressed_bytes_per_step: float
    message_bytes_per_step: float
    wire_bytes_per_step: float
    compression_ratio: float | None
    step_seconds: Seconds
    encode_seconds_per_step: float
    decode_seconds_per_step: float
    residual_norm: float
    parameters_identical: bool | None
    test_bits: float | None = None
    train_seconds: float | None = None
    test_top5: float | None = None

    @property
    def codec_seconds_per_step(self) -> float:
        """Encoding and decoding together."""
        return self.encode_seconds_per_step + self.decode_seconds_per_step


@dataclass
class Results:
    """All runs of one configuration.

    Attributes:
        configuration: the recipe and the data.
        ranks: the number of ranks.
        versions: the versions of Python and packages.
        machine: the processor and the system.
        runs: the results of the trainings.
        network: the lab's hosts and links (:func:`benchmarks.machine.network`); empty in older files.
    """

    configuration: dict[str, Any]
    ranks: int
    versions: dict[str, str]
    machine: dict[str, str | int]
    runs: list[Run] = field(default_factory=list)
    network: dict[str, str | bool | None] = field(default_factory=dict)

    def find(self, compression: str, seed: int) -> Run | None:
        """The run of that compression and seed, if it was made."""
        return next((r for r in self.runs if (r.compression, r.seed) == (compression, seed)), None)

    def write(self, path: Path) -> None:
        """Replaces the file."""
        content = {"schema": SCHEMA, **dataclasses.asdict(self)}
        json_files.replace(path, json.dumps(content, indent=1))


def read(path: Path) -> Results:
    """The inverse of :meth:`Results.write`.

    Raises:
        ValueError: the file is not one.
    """
    return json_files.read(
        path, SCHEMA, lambda raw: Results(**{**raw, "runs": [_run(run) for run in raw["runs"]]})
    )


def _run(raw: dict[str, Any]) -> Run:
    return Run(
        **{
            **raw,
            "curve": [Point(**point) for point in raw["curve"]],
            "epochs": [Epoch(**epoch) for epoch in raw["epochs"]],
            "step_seconds": Seconds(**raw["step_seconds"]),
        }
    )
