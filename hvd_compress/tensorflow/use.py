"""Detects processes in which TensorFlow's compressors have exchanged nothing."""

from __future__ import annotations

from typing import ClassVar

from hvd_compress.ranks.use import Use


class TensorFlowUse(Use):
    """A :class:`~hvd_compress.ranks.use.Use` in TensorFlow.

    TensorFlow does not report training. So a compressor counts as missed only if no compressor of the
    process has exchanged anything: a script may make one only to print it, besides the one that it trains
    with.
    """

    _made: ClassVar[list[Use]] = []

    def __init__(self, name: str) -> None:
        super().__init__(
            name, "pass it to hvd.DistributedGradientTape as compression= on every rank"
        )
        self._made.append(self)

    @property
    def missed(self) -> bool:
        """Whether no compressor of the process has exchanged anything."""
        return not any(use.exchanged for use in self._made)
