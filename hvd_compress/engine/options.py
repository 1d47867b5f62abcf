"""The options that PyTorch's compressors take by name."""

from __future__ import annotations

from typing import Any

from hvd_compress.engine.owner_steps import OwnerStep
from hvd_compress.exchanges.options import SharedOptions


class Options(SharedOptions, total=False):
    """Options of PyTorch's compressors, beside :class:`~hvd_compress.exchanges.options.SharedOptions`.

    Attributes:
        owner_step: what the owner of a part does with the ranks' average before it sends it to all ranks,
            an :class:`OwnerStep`; with ``exchange="two_shot"`` only.
        grad_scaler: the ``torch.amp.GradScaler`` whose scaled losses make the gradients, so that residuals
            follow when the scale changes.
    """

    owner_step: OwnerStep | None
    grad_scaler: Any | None
