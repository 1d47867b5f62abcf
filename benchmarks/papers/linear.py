"""Linear models trained by simulated workers, and the entropy of their codes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.papers.entropy import Histogram
from benchmarks.papers.native import Native
from hvd_compress.codecs import Codec, ErrorFeedback, NoiseKey
from hvd_compress.codecs.feedback import OFF
from hvd_compress.exchanges.reference import Simulation

_NAME = "w"

Gradient = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""A function that returns the gradient of a worker's loss, from the model, shape=(d,), and the rows of the
mini-batch."""


@dataclass(frozen=True)
class Method:
    """The codec and the error feedback of gradients; without a codec, they are not compressed."""

    codec: Codec | None
    feedback: ErrorFeedback = OFF


def train(
    method: Method,
    gradient: Gradient,
    batches: Iterator[list[np.ndarray]],
    dimension: int,
    rate: float,
    each: Callable[[int, np.ndarray], Any],
    seed: int = 0,
) -> Histogram | None:
    """Trains by stochastic gradient descent from zero, equation 4.

    Args:
        method: the method of all workers.
        gradient: the gradient of one worker.
        batches: for each iteration, the rows of each worker's mini-batch.
        dimension: the dimension of the model.
        rate: the learning rate.
        each: a function that is called before each iteration, and at the end, with the number of iterations
            so far and the model; a model that is not finite ends the training.
        seed: the seed of the codec's noise.

    Returns:
        The codes that the first worker sent; None where nothing is compressed.
    """
    w = np.zeros(dimension, np.float32)
    histogram, simulation = Histogram(), None

    def first_worker(
        codec: Codec, shape: tuple[int, ...], noise: NoiseKey, payload: np.ndarray
    ) -> None:
        if noise.rank == 0:
            histogram.add(codec, shape, noise, payload)

    done = 0
    for rows in batches:
        each(done, w)
        gradients = [gradient(w, own) for own in rows]
        if method.codec is None:
            step = np.mean(gradients, axis=0, dtype=np.float32)
        else:
            simulation = simulation or Simulation(
                "allgather",
                method.codec,
                method.feedback,
                {_NAME: (dimension,)},
                len(rows),
                seed=seed,
                arithmetic=Native(first_worker),
            )
            step = simulation.average([{_NAME: one} for one in gradients])[_NAME]
        with np.errstate(over="ignore", invalid="ignore"):
            w = w - np.float32(rate) * step
        done += 1
        if not np.isfinite(w).all():
            break
    each(done, w)
    return None if method.codec is None else histogram


def batches(
    count: int, workers: int, size: int, iterations: int, seed: int
) -> Iterator[list[np.ndarray]]:
    """Rows drawn at random by each worker from its own part of the data, as in the paper's algorithm 1."""
    own = np.array_split(np.arange(count), workers)
    rng = np.random.default_rng([seed, 1])
    for _ in range(iterations):
        yield [part[rng.integers(0, part.size, size)] for part in own]
