"""Warns, when a process ends, of compressors that have exchanged nothing while the ranks trained."""

from __future__ import annotations

import atexit
import sys
import warnings
from abc import ABC, abstractmethod


class Use(ABC):
    """Whether a compressor has exchanged gradients.

    A compressor holds its own. This refers to no compressor, since it may outlive it.

    Args:
        name: what the compressor is called in the warning.
        remedy: what a script has to do for the compressor to exchange gradients.

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
        """Whether training went on without it; asked when the process ends."""

    def suspect(self) -> None:
        """Has the end of the process ask whether training went on without it."""
        _suspects.append(self)

    def dismiss(self) -> None:
        """Has the end of the process not ask."""
        _suspects[:] = [use for use in _suspects if use is not self]


_suspects: list[Use] = []


@atexit.register
def _warn() -> None:
    if getattr(sys, "last_value", None) is not None:
        return  # An error has ended the script, and says more.
    for use in _suspects:
        if use.missed:
            warnings.warn(
                f"expected an exchange by the compressor ({use.name}), got none in the whole run: the "
                f"ranks have trained without it; {use.remedy}",
                UserWarning,
                stacklevel=1,
            )
