"""What the owner of a shard may do with the aggregated gradient before it is sent to all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hvd_compress.codecs.checks import check_number, store


class OwnerStep(Protocol):
    """A step on the ranks' average of a part of a gradient, by the rank that owns the part.

    With ``exchange="two_shot"`` only, whose ranks own parts. In the first ``warmup_steps`` it gets averages
    of gradients that were not encoded (1-bit SGD's cold start).

    Any callable will do. Ranks compare its ``repr`` in the first step, or its name where ``repr`` tells
    only an address: settings belong into a ``repr``, as a dataclass has it.
    """

    def __call__(self, aggregate: torch.Tensor, state: dict[str, Any]) -> None:
        """Changes the average in place.

        Called by a helper thread, without gradient recording, for one part at a time. Not called for parts
        with an Inf or a NaN. If the step turns out to be dropped because of another tensor, ``state``
        becomes what it was.

        Args:
            aggregate: the average, shape=(n,), float32, loss scaling taken out.
            state: empty at first, kept from step to step and in ``state_dict()``. Tensors of shape (n,)
                follow their elements when the number of ranks changes; numbers have to be the same on
                every rank.
        """
        ...


@dataclass(frozen=True)
class AdaGrad:
    """AdaGrad between the two shots, as in 1-bit SGD (section 3.1; table 3, "aggregate gradient").

    ``s <- s + g^2``, ``g <- g / (sqrt(s) + epsilon)``, element by element (Duchi, Hazan and Singer). The
    optimizer behind it is plain SGD, with momentum or without.

    The paper also has a deviation of recent samples in the place of all of them (section 4), and gives no
    formula. With ``decay`` below 1, ``s`` is a mean over recent steps:
    ``m <- decay m + (1 - decay) g^2`` and ``s = m / (1 - decay^t)`` after ``t`` steps. Steps do not get
    shorter as training goes on then, so that the learning rate has to be smaller.

    With ``momentum``, gradients are smoothed first, ``v <- momentum v + g``, and AdaGrad is applied to
    ``v`` (table 3, "momentum-smoothed gradient"); the optimizer is SGD without momentum then.

    Attributes:
        epsilon: keeps elements finite that never had a gradient, > 0.
        initial: what ``s`` begins with, >= 0.
        decay: how much ``s`` keeps in each step; 1 adds all steps up, > 0.
        momentum: how much ``v`` keeps in each step, >= 0 and < 1.
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
        """Implements :class:`OwnerStep`; the state is ``"square_sum"``, ``"velocity"`` and ``"steps"``."""
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


def check(step: OwnerStep | None, exchange: str) -> None:
    """Raises unless a compressor can have that step.

    Raises:
        TypeError: not callable.
        ValueError: another exchange than ``two_shot``.
    """
    if step is None:
        return
    if not callable(step):
        raise TypeError(f"Compressor.owner_step: expected a callable, got {step!r}")
    if exchange != "two_shot":
        raise ValueError(
            f"Compressor.owner_step: expected exchange='two_shot', whose ranks own parts, got {exchange!r}"
        )


def describe(step: OwnerStep | None) -> str:
    """What ranks compare: the same text wherever the step is the same."""
    named = getattr(step, "__qualname__", None)
    if named is None and type(step).__repr__ is object.__repr__:
        named = type(step).__qualname__
    return named or repr(step)
