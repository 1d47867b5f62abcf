"""The compressor that measures and decides by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvd_compress.codecs import NoCompression
from hvd_compress.codecs.calls import guard
from hvd_compress.codecs.checks import check_choice
from hvd_compress.engine.planned import position_of
from hvd_compress.exchanges.routing import CodecLike
from hvd_compress.fsdp.compressor import Compressor
from hvd_compress.planner.choices import DEFAULT_CODECS, allowed
from hvd_compress.process_group.auto import DEFAULT_EXCHANGES, GroupPlanning


@guard
class Auto(GroupPlanning, Compressor):
    """Measures the network and the codecs, and sends each gradient in the way that makes steps shortest.

    For how it decides, see :class:`~hvd_compress.engine.auto.Planning` and ``docs/planner.md``. All ranks
    of the mesh decide together: the slowest one counts, whatever its shards are. A parameter has one route
    on all ranks; a rank whose shard is too small for the route sends that shard uncompressed.

    Args:
        model: the same as in :class:`Compressor`.
        codecs, exchanges: see :class:`~hvd_compress.engine.auto.Planning`; all exchanges but
            ``"hierarchical"`` can be chosen from.
        options: ``mesh``, ``process_group``, ``threshold``, ``exclude``, ``warmup_steps``, ``seed``,
            ``grad_scaler`` and ``threads``, as for :class:`Compressor`.

    Raises:
        TypeError, ValueError, ExchangeError, NotImplementedError: the same as from :class:`Compressor`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        codecs: Sequence[CodecLike] = DEFAULT_CODECS,
        exchanges: Sequence[str] = DEFAULT_EXCHANGES,
        **options: Any,
    ) -> None:
        self._choices = allowed(codecs, exchanges)
        for route in self._choices:
            check_choice("Auto", "exchanges", route.exchange, DEFAULT_EXCHANGES)
        super().__init__(model, NoCompression(), **options)

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), **position_of(self._planned)}
