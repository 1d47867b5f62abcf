"""The compressor that measures and decides by itself."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from hvd_compress.codecs import NoCompression
from hvd_compress.codecs.calls import guard_methods
from hvd_compress.engine.auto import Planning
from hvd_compress.engine.parameters import NamedParameters
from hvd_compress.exchanges.routing import PLANNED_NAMES, CodecLike
from hvd_compress.planner.choices import DEFAULT_CODECS, allowed
from hvd_compress.torch.compressor import Compressor


@guard_methods("compress", "decompress", write="compression={}")
class Auto(Planning, Compressor):
    """Measures the network and the codecs, and sends each gradient in the way that makes steps shortest.

    For how it decides, see :class:`~hvd_compress.engine.auto.Planning` and ``docs/planner.md``.

    Args:
        model: the same as in :class:`Compressor`.
        codecs, exchanges: see :class:`~hvd_compress.engine.auto.Planning`.
        options: ``threshold``, ``exclude``, ``warmup_steps``, ``seed``, ``process_set``, ``grad_scaler``,
            ``threads`` and ``name``, as for :class:`Compressor`.

    Raises:
        TypeError, ValueError: an argument is wrong, "expected X, got Y".
        ExchangeError: ``hvd.init()`` was not called.
    """

    def __init__(
        self,
        model: NamedParameters,
        *,
        codecs: Sequence[CodecLike] = DEFAULT_CODECS,
        exchanges: Sequence[str] = PLANNED_NAMES,
        **options: Any,
    ) -> None:
        self._choices = allowed(codecs, exchanges)
        super().__init__(model, NoCompression(), **options)
        self._take_routes()

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Horovod's entry: starts the exchange of one gradient."""
        sent = super().compress(tensor)
        self._under_way += 1
        return sent

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Horovod's exit; after the last gradient of a step the planner measures and decides.

        The planner ignores a step in which some rank has called ``hvd.join()``: that rank could not count
        it.
        """
        gradient = super().decompress(tensor, ctx)
        self._under_way -= 1
        if not self._under_way:
            assert self._planned is not None
            if self._ranks.step.complete:
                self._planned.end_step(logging.getLogger(type(self).__module__))
            else:
                self._planned.skip_step()
        return gradient

    def _take_routes(self) -> None:
        self._under_way = 0
        self._plan()
