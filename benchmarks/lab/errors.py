"""The lab's error."""

from __future__ import annotations


class LabError(RuntimeError):
    """The lab cannot be set up; the message says what was expected, what came and what to do."""
