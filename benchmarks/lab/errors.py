"""What can go wrong before a rank runs."""

from __future__ import annotations


class LabError(RuntimeError):
    """The lab cannot be set up: what was expected, what came, what to do."""
