"""Training and measuring, whatever the framework."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from benchmarks.compressions import LOCAL, Compression
from benchmarks.data import Data, augment, batches
from benchmarks.models import MODELS
from benchmarks.results import Epoch, Point, Run, Seconds
from benchmarks.settings import BORDERS, Settings

_UNTIMED_STEPS = 3
"""The number of first steps whose time is not counted: names are negotiated, memory is allocated."""

Batch = tuple[np.ndarray, np.ndarray]
"""The samples that :class:`benchmarks.data.samples.Samples` loads, and their labels."""


TOP = 5
"""The number of labels that count in the second accuracy of models with more than twice as many."""


class Score(NamedTuple):
    """The sums of a model's results for some labels.

    Attributes:
        right: the number of labels that the model finds most likely.
        near: the number of labels among the :data:`TOP` that the model finds most likely.
        bits: the sum of the labels' cross-entropies, in bits.
    """

    right: int
    near: int
    bits: float


class Counters(Protocol):
    """The counts of a compressor since it was made."""

    uncompressed_bytes: int
    message_bytes: int
    wire_bytes: float
    encode_seconds: float
    decode_seconds: float


class Session(Protocol):
    """One model with its optimizer and its compressor, on one rank."""

    @property
    def counters(self) -> Counters:
        """The compressor's counts so far."""
        ...

    def train(
        self, batches: Iterable[Batch], rates: Sequence[float], ended: Callable[[float], None]
    ) -> None:
        """Trains on an epoch's batches, one after the other.

        Args:
            batches: the batches to train on; may be read ahead, from another thread.
            rates: the learning rate of each batch.
            ended: a function to call after each batch, in this thread, with its loss.
        """
        ...

    def finish(self) -> None:
        """Called once, after the last step: exchanges what ranks have not sent until then."""
        ...

    def evaluate(self, inputs: np.ndarray, labels: np.ndarray) -> Score:
        """Returns the sums of the model's results for the labels."""
        ...

    def residual_norm(self) -> float:
        """The l2 norm of this rank's residuals."""
        ...

    def digest(self) -> bytes:
        """A cryptographic digest of all parameters."""
        ...


class Trainer(Protocol):
    """A framework with Horovod, on one rank."""

    rank: int
    size: int

    def start(
        self, settings: Settings, classes: int, compression: Compression, seed: int
    ) -> Session:
        """A fresh model, the same on every rank."""
        ...

    def gather(self, values: np.ndarray) -> np.ndarray:
        """Float64 vectors of all ranks, shape=(size, n)."""
        ...


def run(
    trainer: Trainer,
    session: Session,
    data: Data,
    settings: Settings,
    compression: Compression,
    seed: int,
    on_step: Callable[[], None],
    *,
    test_every_epoch: bool = True,
) -> Run:
    """Trains once from scratch.

    Args:
        trainer: the framework.
        session: a fresh model, which the trainer has started with the same settings.
        data: the data to train on.
        settings: the recipe.
        compression: the compression of the exchange.
        seed: the seed of all random numbers.
        on_step: a function that is called after every step.
        test_every_epoch: whether to test the model after every epoch; otherwise after the last step only.

    Returns:
        The results, the same on every rank but for the step times.
    """
    total = settings.total_steps(steps_per_epoch(data, settings, trainer.size))
    steps = _Steps(on_step, lambda: session.counters.wire_bytes)
    ends: list[int] = []
    tests: list[Test | None] = []
    done = 0
    while done < total:
        parts = _epoch(trainer, data, settings, seed, len(ends))[: total - done]
        rates = [settings.learning_rate(done + i, total) for i in range(len(parts))]
        steps.start()
        session.train(_load(data, parts, settings, (seed, done, trainer.rank)), rates, steps.ended)
        done += len(parts)
        ends.append(done)
        if done == total:
            steps.finish(session.finish)
        test = done == total or test_every_epoch
        tests.append(_test(trainer, data, session, settings) if test else None)

    losses = trainer.gather(np.array(steps.losses)).mean(0)
    seconds = np.array(steps.seconds)
    elapsed = trainer.gather(np.cumsum(seconds))
    sent = trainer.gather(np.array(steps.wire_bytes, np.float64)).mean(0)
    counters = session.counters
    counted = [
        counters.uncompressed_bytes,
        counters.message_bytes,
        counters.wire_bytes,
        counters.encode_seconds,
        counters.decode_seconds,
    ]
    uncompressed, message, wire, encode, decode = (
        float(x) for x in trainer.gather(np.array(counted, np.float64) / total).mean(0)
    )
    alone = compression.name == LOCAL
    return Run(
        compression=compression.text,
        seed=seed,
        steps=total,
        curve=_curve(losses, elapsed.mean(0), sent, settings.curve_points),
        epochs=_epochs(losses, ends, tests),
        test_accuracy=None if tests[-1] is None else tests[-1].accuracy,
        test_top5=None if tests[-1] is None or data.classes <= 2 * TOP else tests[-1].near,
        test_bits=None if tests[-1] is None else tests[-1].bits,
        uncompressed_bytes_per_step=uncompressed,
        message_bytes_per_step=message,
        wire_bytes_per_step=wire,
        compression_ratio=uncompressed / message if message else None,
        step_seconds=_quantiles(seconds[_UNTIMED_STEPS:] if total > _UNTIMED_STEPS else seconds),
        encode_seconds_per_step=encode,
        decode_seconds_per_step=decode,
        residual_norm=float(trainer.gather(np.array([session.residual_norm()])).mean()),
        parameters_identical=None if alone else _identical(trainer, session.digest()),
        train_seconds=float(
            (elapsed[:, -1] + trainer.gather(np.array([steps.finish_seconds]))[:, 0]).max()
        ),
    )


def steps_per_epoch(data: Data, settings: Settings, ranks: int) -> int:
    """The number of steps in which every sample is seen once."""
    return len(
        batches.epoch(len(data.train.labels), settings.batch_size, seed=0, epoch=0, size=ranks)
    )


class _Steps:
    """The losses of the steps, their seconds with their batches, and the bytes sent until then."""

    def __init__(self, on_step: Callable[[], None], wire_bytes: Callable[[], float]) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.wire_bytes: list[float] = []
        self.finish_seconds = 0.0
        self._on_step = on_step
        self._wire_bytes = wire_bytes
        self._started = 0.0

    def start(self) -> None:
        """Starts the clock."""
        self._started = time.perf_counter()

    def ended(self, loss: float) -> None:
        """Ends a step, and begins the next one."""
        self.seconds.append(time.perf_counter() - self._started)
        self.losses.append(loss)
        self.wire_bytes.append(self._wire_bytes())
        self._on_step()
        self.start()

    def finish(self, work: Callable[[], None]) -> None:
        """Does the ranks' work after the last step; its time and bytes count."""
        self.start()
        work()
        self.finish_seconds = time.perf_counter() - self._started
        self.wire_bytes[-1] = self._wire_bytes()


def _load(
    data: Data, parts: list[np.ndarray], settings: Settings, key: tuple[int, int, int]
) -> Iterator[Batch]:
    seed, first, rank = key
    for step, indices in enumerate(parts, first):
        inputs = augment.crop(
            data.train.load(indices),
            _size(settings),
            settings.shift,
            BORDERS[settings.border],
            [seed, step, rank],
        )
        inputs = augment.mirror(inputs, settings.mirror, [seed, step, rank, 1])
        yield inputs, data.train.labels[indices]


def _epoch(
    trainer: Trainer, data: Data, settings: Settings, seed: int, epoch: int
) -> list[np.ndarray]:
    return batches.epoch(
        len(data.train.labels),
        settings.batch_size,
        seed=seed,
        epoch=epoch,
        rank=trainer.rank,
        size=trainer.size,
    )


def _size(settings: Settings) -> tuple[int, ...]:
    """The height and width of the model's input, if it takes images."""
    return MODELS[settings.model].input[:2]


class Test(NamedTuple):
    """The means of a model's results for the test samples.

    Attributes:
        accuracy: the share of labels that the model finds most likely.
        near: the share of labels among the :data:`TOP` that the model finds most likely.
        bits: the mean cross-entropy of a label, in bits.
    """

    accuracy: float
    near: float
    bits: float


def _test(trainer: Trainer, data: Data, session: Session, settings: Settings) -> Test | None:
    if data.test is None:
        return None
    labels = data.test.labels
    own, together = np.zeros(3), 8 * settings.batch_size
    for part in batches.share(len(labels), together, rank=trainer.rank, size=trainer.size):
        inputs = augment.middle(data.test.load(part), _size(settings))
        own += session.evaluate(inputs, labels[part])
    return Test(*(trainer.gather(own).sum(0) / labels.size).tolist())


def _curve(losses: np.ndarray, elapsed: np.ndarray, sent: np.ndarray, points: int) -> list[Point]:
    parts = np.array_split(losses, min(points, len(losses)))
    ends = np.cumsum([len(part) for part in parts])
    return [
        Point(int(end), float(part.mean()), float(elapsed[end - 1]), float(sent[end - 1]))
        for end, part in zip(ends, parts, strict=True)
    ]


def _epochs(losses: np.ndarray, ends: list[int], tests: list[Test | None]) -> list[Epoch]:
    means = [float(part.mean()) for part in np.split(losses, ends[:-1])]
    return [
        Epoch(number, loss, test and test.accuracy)
        for number, (loss, test) in enumerate(zip(means, tests, strict=True), start=1)
    ]


def _quantiles(seconds: np.ndarray) -> Seconds:
    median, p10, p90 = (float(q) for q in np.quantile(seconds, [0.5, 0.1, 0.9]))
    return Seconds(median, p10, p90)


def _identical(trainer: Trainer, digest: bytes) -> bool:
    digests = trainer.gather(np.frombuffer(digest, np.uint8).astype(np.float64))
    return bool((digests == digests[0]).all())
