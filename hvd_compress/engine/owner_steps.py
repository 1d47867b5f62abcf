"""Steps by which owners may change the aggregated gradient before it is sent to all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hvd_compress.codecs.checks import check_number, store


class OwnerStep(Protocol):
    """A step on the ranks' average of a part of a gradient, by the rank that owns the part.

    Only ``exchange="two_shot"``, in which ranks own parts, allows such a step. In the first
    ``warmup_steps``, the step gets averages of gradients that were not encoded (1-bit SGD's cold start).

    Any callable can be used. Ranks compare its ``repr`` in the first step, or its name if ``repr`` shows
    only an address. The settings should therefore be in the ``repr``, as they are with a dataclass.
    """

    def __call__(self, aggregate: torch.Tensor, state: dict[str, Any]) -> None:
        """Changes the average in place.

        A helper thread may make the call, without gradient recording, for one part at a time. Parts with an
        Inf or a NaN are left out. If the step is dropped because of another tensor, ``state`` gets its
        former contents back.

        Args:
            aggregate: the average, shape=(n,), float32, without loss scaling.
            state: the state of the part, empty at first, which is kept from step to step and in
                ``state_dict()``. Tensors of shape (n,) follow their elements when the number of ranks
                changes; numbers must be the same on every rank.
        """
        ...


@dataclass(frozen=True)
class AdaGrad:
    """AdaGrad between the two shots, as in 1-bit SGD (section 3.1; table 3, "aggregate gradient").

    ``s <- s + g^2``, ``g <- g / (sqrt(s) + epsilon)``, element by element (Duchi, Hazan and Singer). The
    optimizer that follows is plain SGD, with or without momentum.

    The paper also describes the deviation of recent samples instead of all samples (section 4), but gives
    no formula. With ``decay`` below 1, ``s`` is a mean over recent steps:
    ``m <- decay m + (1 - decay) g^2`` and ``s = m / (1 - decay^t)`` after ``t`` steps. Steps then do not
    get shorter during training, so the learning rate has to be smaller.

    With ``momentum``, gradients are smoothed first, ``v <- momentum v + g``, and AdaGrad is applied to
    ``v`` (table 3, "momentum-smoothed gradient"); the optimizer is then SGD without momentum.

    Attributes:
        epsilon: the summand that keeps elements finite that never had a gradient, > 0.
        initial: the initial value of ``s``, >= 0.
        decay: the factor of the sum of squares in each step, > 0 and <= 1; 1 adds up all steps.
        momentum: the factor of ``v`` in each step, >= 0 and < 1.
    """

    epsilon: float = 1e-10
    initial: float = 0.0
    decay: float = 1.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        check_number("AdaGrad", "epsilon", self.epsilon, 1e-38, 1e38)
        check_number("AdaGrad", "initial", self.initial, 0.0, 1e38)
        check_number("AdaGrad", "decay", self.decay, 1e-6, 1.0)
        check_number("AdaGrad", "momentum", self.momentum, 0.0, 1 - 1e-6)
        for name in ("epsilon", "initial", "decay", "momentum"):
            store(self, name, float(getattr(self, name)))

    def __call__(self, aggregate: torch.Tensor, state: dict[str, Any]) -> None:
        """Implements :class:`OwnerStep`; the state has ``"square_sum"``, ``"velocity"`` and ``"steps"``."""
        if "square_sum" not in state:
            state["square_sum"] = torch.full_like(aggregate, self.initial)
        if self.momentum:
            velocity = state.setdefault("velocity", torch.zeros_like(aggregate))
            aggregate.copy_(velocity.mul_(self.momentum).add_(aggregate))
        square_sum = state["square_sum"]
        if self.decay == 1:
            square_sum.addcmul_(aggregate, aggregate)
        else:
            state["steps"] = state.get("steps", 0) + 1
            square_sum.mul_(self.decay).addcmul_(aggregate, aggregate, value=1 - self.decay)
            square_sum = square_sum / (1 - self.decay ** state["steps"])
        aggregate.div_(square_sum.sqrt().add_(self.epsilon))


def check(step: OwnerStep | None, exchange: str, where: str) -> None:
    """Raises an error, which begins with ``where``, unless the step can be made in an exchange.

    Raises:
        TypeError: the step is not callable.
        ValueError: the exchange is not ``two_shot``.
    """
    if step is None:
        return
    if not callable(step):
        raise TypeError(f"{where}.owner_step: expected a callable, got {step!r}")
    if exchange != "two_shot":
        raise ValueError(
            f"{where}.owner_step: expected exchange='two_shot', whose ranks own parts, got {exchange!r}"
        )


def describe(step: OwnerStep | None) -> str:
    """The text that ranks compare: it is the same on all ranks with the same step."""
    named = getattr(step, "__qualname__", None)
    if named is None and type(step).__repr__ is object.__repr__:
        named = type(step).__qualname__
    return named or repr(step)
