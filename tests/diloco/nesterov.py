"""DiLoCo with the paper's outer optimizer, whose momentum is a state that tests can look for."""

from __future__ import annotations

from typing import Any

import hvd_compress.diloco


class DiLoCo(hvd_compress.diloco.DiLoCo):
    """Takes momentum unless a test names an outer optimizer."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"outer_optimizer": hvd_compress.diloco.NESTEROV, **options})
