"""Warns, when a process ends, of compressors that have exchanged nothing while the ranks trained."""

from __future__ import annotations

import atexit
import sys
import warnings
from abc import ABC, abstractmethod


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

    def suspect(self) -> None:
        """Checks, when the process ends, whether training continued without the compressor."""
        _suspects.append(self)

    def dismiss(self) -> None:
        """Cancels that check."""
        _suspects[:] = [use for use in _suspects if use is not self]


_suspects: list[Use] = []


@atexit.register
def _warn() -> None:
    if getattr(sys, "last_value", None) is not None:
        return  # An error has ended the script, and says more.
    for use in _suspects:
        if use.missed:
            warnings.warn(
                f"expected an exchange by the compressor ({use.name}), got none in the whole run: if "
                f"the ranks have trained, they did so without it; {use.remedy}",
                UserWarning,
                stacklevel=1,
            )
