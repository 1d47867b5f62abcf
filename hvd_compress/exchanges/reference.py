"""The NumPy reference of the exchanges: slow, short, and the definition for the frontends.

The reference has no messages, buckets or threads, and needs no framework. Each exchange's own module has
the ``reference`` of one tensor; the simulation here makes steps with it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvd_compress.codecs import Codec, ErrorFeedback
from hvd_compress.codecs.base import Shape
from hvd_compress.exchanges.registry import EXCHANGES, UNCOMPRESSED
from hvd_compress.exchanges.shards import transpose, transpose_back
from hvd_compress.exchanges.simulation import Ranks

Arrays = Mapping[str, np.ndarray]


class Simulation(Ranks):
    """The compressors of all ranks in one process.

    Args:
        exchange: the exchange's name in :data:`hvd_compress.exchanges.registry.EXCHANGES`.
        codec, feedback, shapes, size, options: see :class:`~hvd_compress.exchanges.simulation.Ranks`.
    """

    def __init__(
        self,
        exchange: str,
        codec: Codec,
        feedback: ErrorFeedback,
        shapes: Mapping[str, Shape],
        size: int,
        **options: Any,
    ) -> None:
        super().__init__(EXCHANGES[exchange], codec, feedback, shapes, size, **options)
        self._before = self.residuals, self.owned, self.states

    def average(
        self, gradients: Sequence[Arrays], scale: float | None = None
    ) -> dict[str, np.ndarray]:
        """Makes one step.

        Args:
            gradients: the gradients of each rank by tensor, with the tensor's shape and any float dtype. A
                tensor that some ranks lack counts as zeros there; one that all ranks lack is not
                exchanged, and its residuals do not change.
            scale: the factor of the ranks' sum; None means 1 / ``size``.

        Returns:
            The result on every rank by tensor, with the tensor's shape, float32. If any sent number is not
            finite, the step is dropped: residuals and states are restored.
        """
        factor = 1 / self._size if scale is None else scale
        self._cold = self._warmup_steps > 0
        self._warmup_steps -= self._cold
        plain = self._cold and self._owner_step is None
        self._before = copy.deepcopy((self.residuals, self.owned, self.states))
        self._finite = True
        received = {}
        with np.errstate(all="ignore"):
            for name, shape in self.shapes.items():
                if not any(name in one for one in gradients):
                    continue
                zeros = np.zeros(shape)
                order = self.shared(name).transposed if self._owners else None
                flat = [one.get(name, zeros).astype(np.float32).reshape(-1) for one in gradients]
                sent = [transpose(one, order) for one in flat]
                encoded = not plain and self.codec.encodes(shape)
                exchange = self._exchange if encoded else UNCOMPRESSED
                result = exchange.reference(self, name, sent, factor)
                received[name] = transpose_back(result, order).reshape(shape)
        self.step += not self._cold
        if not self._finite:
            self.drop_step()
        return received

    def drop_step(self) -> None:
        """Restores the residuals and states from before the last step; the noise is not repeated."""
        self.residuals, self.owned, self.states = self._before
