"""The names of compressors, which begin the names of their collectives, and are the same on all ranks."""

from __future__ import annotations

_made: dict[str, int] = {}
"""How many compressors this process has made, by the name that each was given."""


def distinct(name: str) -> str:
    """A name for another compressor, whose collectives may be under way with those of earlier ones.

    Ranks make their compressors in the same order, and so number those of one name alike.

    Args:
        name: as given, or the default.
    """
    number = _made.get(name, 0)
    _made[name] = number + 1
    return f"{name}.{number}" if number else name


def made() -> dict[str, int]:
    """How many compressors of each name this process has made, for :func:`count_from`."""
    return dict(_made)


def count_from(counts: dict[str, int]) -> None:
    """Names the next compressors as if this process had made so many, as one that begins later has.

    Args:
        counts: as of :func:`made`; empty in a process that has made none.
    """
    _made.clear()
    _made.update(counts)
