"""The compressor that measures and decides by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvd_compress.codecs import NoCompression
from hvd_compress.codecs.calls import guard
from hvd_compress.ddp.compressor import Compressor
from hvd_compress.engine.parameters import NamedParameters
from hvd_compress.exchanges.routing import CodecLike
from hvd_compress.planner.choices import DEFAULT_CODECS, allowed
from hvd_compress.process_group.auto import DEFAULT_EXCHANGES, GroupPlanning


@guard
class Auto(GroupPlanning, Compressor):
    """Measures the network and the codecs, and sends each gradient in the way that makes steps shortest.

    For how it decides, see :class:`~hvd_compress.engine.auto.Planning` and ``docs/planner.md``.

    Args:
        model: the same as in :class:`Compressor`.
        codecs, exchanges: see :class:`~hvd_compress.engine.auto.Planning`.
        options: ``threshold``, ``exclude``, ``warmup_steps``, ``seed``, ``process_group``, ``grad_scaler``
            and ``threads``, as for :class:`Compressor`.

    Raises:
        TypeError, ValueError: an argument is wrong, "expected X, got Y".
        ExchangeError: ``torch.distributed.init_process_group()`` was not called before the first use.
    """

    def __init__(
        self,
        model: NamedParameters,
        *,
        codecs: Sequence[CodecLike] = DEFAULT_CODECS,
        exchanges: Sequence[str] = DEFAULT_EXCHANGES,
        **options: Any,
    ) -> None:
        self._choices = allowed(codecs, exchanges)
        super().__init__(model, NoCompression(), **options)
