"""The choice of minibatch sizes and learning rates during training."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hvd_compress.codecs import checks

_log = logging.getLogger(__name__)


class Stateful(Protocol):
    """An object that a trial changes and that can be restored, such as a model, optimizer or compressor."""

    def state_dict(self) -> Any:
        """The state."""

    def load_state_dict(self, state: Any) -> Any:
        """Restores a state."""


Train = Callable[[int], tuple[int, int]]
"""A function that trains with minibatches of the given size. It returns the number of this rank's samples
that the model classified correctly, each before the update that it was part of, and the number of all
samples of this rank."""


@dataclass(frozen=True)
class Selection:
    """The result of trials.

    Attributes:
        size: the chosen minibatch size.
        accuracies: the accuracy on all ranks' training samples by size, in the order of the trials.
    """

    size: int
    accuracies: Mapping[int, float]


class BatchSizeSelector:
    """Picks the largest minibatch size that does not hurt convergence (1-bit SGD, section 4).

    At regular intervals, a few samples are processed with different minibatch sizes, each time from the
    same state. The selector chooses the largest size whose accuracy on these training samples is no worse
    than that of the smallest size, up to a tolerance; once a size is worse, larger ones are not tried.
    Training continues from the end of the trial of the chosen size, so that its work is not lost.

    The learning rate per sample stays the same: the paper's update is the learning rate times a sum over
    samples (equations 1 and 2), so the learning rate of an optimizer that gets means over a minibatch
    grows with the size. The paper states neither the tolerance nor the sizes::

        selector = BatchSizeSelector([64, 128, 256], optimizer, [model, optimizer, buffering])
        selector.select(train)        # on all ranks; again every so many samples
        train(selector.size)

    Args:
        sizes: the numbers of samples in a minibatch of all ranks together, in ascending order; training
            begins with the first.
        optimizer: the optimizer; its learning rates are scaled with the size.
        states: all objects that a trial changes, including ``optimizer``.
        tolerance: the largest difference by which a larger size's accuracy may be below the smallest
            size's, as a fraction of samples. The default is half a percentage point.
        process_group: the ranks; None means the default group, or this process alone if there is none.

    Attributes:
        size: the minibatch size in use.

    Raises:
        TypeError, ValueError: an argument is wrong, "expected X, got Y".
    """

    def __init__(
        self,
        sizes: Sequence[int],
        optimizer: torch.optim.Optimizer,
        states: Sequence[Stateful],
        *,
        tolerance: float = 0.005,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        sizes = list(sizes)
        for size in sizes:
            checks.check_number("BatchSizeSelector", "sizes", size, 1, 2**31, integer=True)
        if not sizes or sizes != sorted(set(sizes)):
            raise ValueError(f"BatchSizeSelector.sizes: expected rising sizes, got {sizes}")
        if not any(one is optimizer for one in states):
            raise ValueError(
                "BatchSizeSelector.states: expected the optimizer among what a trial changes, got "
                f"{[type(one).__name__ for one in states]}"
            )
        checks.check_number("BatchSizeSelector", "tolerance", tolerance, 0.0, 1.0)
        self._sizes, self._optimizer, self._states = sizes, optimizer, list(states)
        self._tolerance, self._group = tolerance, process_group
        self.size = sizes[0]

    def select(self, train: Train) -> Selection:
        """Makes the trials, and sets states and learning rates to those after the chosen trial.

        Every rank must call this. Each call of ``train`` must process the same samples.

        Raises:
            ValueError: ``train`` processed no sample.
        """
        before = [copy.deepcopy(one.state_dict()) for one in self._states]
        began, accuracies = self.size, {}
        chosen, reached = self.size, before
        for size in self._sizes:
            self._go_to(before, began, size)
            accuracies[size] = self._accuracy(*train(size))
            if accuracies[size] < accuracies[self._sizes[0]] - self._tolerance:
                break
            chosen = size
            reached = [copy.deepcopy(one.state_dict()) for one in self._states]
        self._go_to(reached, chosen, chosen)
        self.size = chosen
        _log.info("minibatches of %d: accuracies by size %s", chosen, accuracies)
        return Selection(chosen, accuracies)

    def state_dict(self) -> dict[str, Any]:
        """A state with the size in use; learning rates are in the optimizer's state."""
        return {"size": self.size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues with the size of a saved state.

        Raises:
            ValueError: the size is not among the sizes of this selector.
        """
        if state["size"] not in self._sizes:
            raise ValueError(
                f"BatchSizeSelector.load_state_dict: expected one of {self._sizes}, got {state['size']}"
            )
        self.size = state["size"]

    def _go_to(self, states: Sequence[Any], old: int, new: int) -> None:
        """Loads states from training with one minibatch size, for training with another."""
        for one, state in zip(self._states, states, strict=True):
            one.load_state_dict(copy.deepcopy(state))
        for group in self._optimizer.param_groups:
            group["lr"] = group["lr"] * (new / old)

    def _accuracy(self, right: int, samples: int) -> float:
        """The accuracy over all ranks, the same number on each."""
        if samples < 1:
            raise ValueError(
                f"BatchSizeSelector.select: expected train to process samples, got {samples}"
            )
        counts = torch.tensor([right, samples], dtype=torch.int64, device="cpu")
        if dist.is_initialized():
            if dist.get_backend(self._group) == "nccl":
                counts = counts.cuda()
            dist.all_reduce(counts, group=self._group)
        return int(counts[0]) / int(counts[1])


class LearningRateSearch:
    """Decays a learning rate when the accuracy on held-out samples stops rising, and records the decays.

    The paper determines a gradually decaying learning rate automatically from the accuracy on a
    cross-validation set with an earlier configuration, and then uses that profile (1-bit SGD, section 4).
    So search once, without compression, and then train with a :class:`LearningRateProfile`. The paper does
    not state the amounts or times of decays.

    Args:
        decay: the factor of the learning rate when the accuracy has not risen.
        least: the rise in accuracy that must be exceeded to keep the learning rate.

    Attributes:
        factor: the current factor of the first learning rate.
        points: numbers of samples, each with the factor from there on, for
            :class:`LearningRateProfile`.

    Raises:
        TypeError, ValueError: an argument is wrong, "expected X, got Y".
    """

    def __init__(self, *, decay: float = 0.7, least: float = 0.0) -> None:
        checks.check_number("LearningRateSearch", "decay", decay, 0.001, 0.999)
        checks.check_number("LearningRateSearch", "least", least, 0.0, 1.0)
        self._decay, self._least = decay, least
        self._best = float("-inf")
        self.factor = 1.0
        self.points: list[tuple[int, float]] = [(0, 1.0)]

    def update(self, samples: int, accuracy: float) -> float:
        """Records a measurement.

        Args:
            samples: the number of samples that all ranks together have processed so far.
            accuracy: the accuracy on held-out samples, the same number on every rank.

        Returns:
            The new :attr:`factor`.
        """
        if accuracy <= self._best + self._least:
            self.factor *= self._decay
            self.points.append((samples, self.factor))
        self._best = max(self._best, accuracy)
        return self.factor


class LearningRateProfile:
    """A gradually decaying learning rate by samples, as the number of steps depends on minibatch sizes.

    Between two points, the factor is interpolated geometrically; before the first and after the last, the
    factor is constant.

    Args:
        points: numbers of samples in ascending order, each with the factor of the first learning rate
            there, from a :class:`LearningRateSearch` or from JSON.

    Attributes:
        points: the points as floats.

    Raises:
        ValueError: no points, numbers of samples that do not rise, or factors that are not above 0.
    """

    def __init__(self, points: Sequence[Sequence[float]]) -> None:
        self.points = [(float(samples), float(factor)) for samples, factor in points]
        places = [samples for samples, _ in self.points]
        if not places or places != sorted(set(places)) or min(f for _, f in self.points) <= 0:
            raise ValueError(
                f"LearningRateProfile.points: expected rising numbers of samples with factors above 0, "
                f"got {list(points)}"
            )

    def factor(self, samples: int) -> float:
        """The factor of the first learning rate after the given number of samples."""
        before = [point for point in self.points if point[0] <= samples]
        after = [point for point in self.points if point[0] > samples]
        if not before or not after:
            return (before or after)[-1 if before else 0][1]
        (begin, high), (end, low) = before[-1], after[0]
        return float(high * (low / high) ** ((samples - begin) / (end - begin)))
