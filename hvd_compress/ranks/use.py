"""Warns of compressors that exchange nothing while ranks train, and of optimizers that they do not suit."""

from __future__ import annotations

import atexit
import sys
import warnings
from abc import ABC, abstractmethod

_ADAPTIVE = {"Adam", "AdamW", "Adamax", "NAdam", "Nadam", "RAdam", "Muon"}
"""The names of optimizer classes, of PyTorch and Keras, that do not add gradients up as SGD does."""


class Use(ABC):
    """Records whether a compressor has exchanged gradients.

    Each compressor holds one. The record does not refer to the compressor, which it may outlive.

    Args:
        name: the compressor's name in the warning.
        remedy: the change to a script that makes the compressor exchange gradients.

    Attributes:
        exchanged: whether an exchange has begun.
    """

    def __init__(self, name: str, remedy: str) -> None:
        self.name = name
        self.remedy = remedy
        self.exchanged = False

    @property
    @abstractmethod
    def missed(self) -> bool:
        """Whether training continued without the compressor; read when the process ends."""

    def warn(self, got: str) -> None:
        """Warns that the ranks train without the compressor."""
        warnings.warn(
            f"expected an exchange by the compressor ({self.name}), got {got}: if the ranks have trained, "
            f"they did so without it; {self.remedy}",
            UserWarning,
            stacklevel=2,
        )

    def suspect(self) -> None:
        """Checks, when the process ends, whether training continued without the compressor."""
        _suspects.append(self)

    def dismiss(self) -> None:
        """Cancels that check."""
        _suspects[:] = [use for use in _suspects if use is not self]


def warn_of_onebit(optimizer: object) -> bool:
    """Warns, and returns True, if 1-bit SGD loses accuracy with an optimizer."""
    names = [one.__name__ for one in type(optimizer).__mro__]
    name = next((name for name in names if name in _ADAPTIVE), "")
    if name:
        warnings.warn(
            f"expected OneBit with SGD or momentum, got {name}: on text, its loss was 0.6 bits a byte "
            f"above that of uncompressed training (docs/optimizers.md); use Int8(), or, at one bit an "
            f"element, hvd_compress.optim.OneBitAdam",
            UserWarning,
            stacklevel=2,
        )
    return bool(name)


_suspects: list[Use] = []


@atexit.register
def _warn() -> None:
    if getattr(sys, "last_value", None) is not None:
        return  # An error has ended the script, and says more.
    for use in _suspects:
        if use.missed:
            use.warn("none in the whole run")
