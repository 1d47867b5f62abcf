"""The options that PyTorch's compressors take by name."""

from __future__ import annotations

from typing import Any

from hvd_compress.engine.owner_steps import OwnerStep
from hvd_compress.exchanges.options import SharedOptions


class Options(SharedOptions, total=False):
    """PyTorch's options, in addition to :class:`~hvd_compress.exchanges.options.SharedOptions`.

    Attributes:
        owner_step: the :class:`OwnerStep` by which the owner of a part changes the ranks' average before
            sending it to all ranks; only with ``exchange="two_shot"``.
        grad_scaler: the ``torch.amp.GradScaler`` that scales the losses, so that residuals can be rescaled
            when the scale changes.
    """

    owner_step: OwnerStep | None
    grad_scaler: Any | None
