"""The context in which one rank encodes, the same for all of its parameters."""

from __future__ import annotations

from dataclasses import dataclass, field

from hvd_compress.engine.executors import Executors
from hvd_compress.engine.residuals import LastExchange


@dataclass
class EncodeContext:
    """The kernels, the seed of the noise, and the loss scale.

    Attributes:
        kernels: the kernels that encode and decode.
        seed: the seed of the noise.
        rank: this rank within its process set or group.
        last: receives the changes of each exchange.
        loss_scale: the loss scale of this step's gradients.
    """

    kernels: Executors
    seed: int
    rank: int
    last: LastExchange = field(default_factory=LastExchange)
    loss_scale: float = 1.0
