"""The names of compressors, which are the same on all ranks and begin the names of their collectives."""

from __future__ import annotations

_made: dict[str, int] = {}
"""The number of compressors that this process has made, by the name passed for each of them."""


def distinct(name: str) -> str:
    """A name for another compressor, whose collectives may run at the same time as those of earlier ones.

    Ranks make their compressors in the same order, so those with the same name get the same numbers.

    Args:
        name: the name that was passed, or the default.
    """
    number = _made.get(name, 0)
    _made[name] = number + 1
    return f"{name}.{number}" if number else name


def made() -> dict[str, int]:
    """The number of compressors of each name that this process has made, for :func:`count_from`."""
    return dict(_made)


def count_from(counts: dict[str, int]) -> None:
    """Names the next compressors as if this process had made the given numbers of compressors.

    A process that begins later has made fewer than the others, and all have to use the same names.

    Args:
        counts: the value of :func:`made`; empty for a process that has made none.
    """
    _made.clear()
    _made.update(counts)
