"""Checks of settings; the errors state the expected value and the actual one."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

import numpy as np

TILE = 64
"""The number of elements in a tile of noise (sixteen counters, with four words each) or of bit planes (for
each, a little-endian 64-bit word); contiguous groups are multiples of it."""

MAX_GROUP = 65536
"""The size of the largest contiguous group in elements; for anything larger, there is ``"tensor"``."""


def check_group(owner: str, field: str, value: Any, words: tuple[str, ...] = ("tensor",)) -> None:
    """Raises unless ``value`` is a contiguous group size or one of ``words``.

    Raises:
        TypeError: a value that is neither an int nor a string.
        ValueError: a size that is not a multiple of 64 up to 65,536, or an unknown word.
    """
    expected = f"a multiple of {TILE} up to {MAX_GROUP}"
    if words:
        expected += f" or one of {', '.join(map(repr, words))}"
    if isinstance(value, str):
        good = value in words
    elif isinstance(value, int) and not isinstance(value, bool):
        good = 0 < value <= MAX_GROUP and value % TILE == 0
    else:
        raise TypeError(f"{owner}.{field}: expected {expected}, got {value!r}")
    if not good:
        raise ValueError(f"{owner}.{field}: expected {expected}, got {value!r}")


def check_choice(owner: str, field: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raises ``ValueError``, with the nearest choice in the message, unless ``value`` is in ``choices``."""
    if value not in choices:
        expected = ", ".join(map(repr, choices))
        near = get_close_matches(value.lower(), choices, n=1) if isinstance(value, str) else []
        meant = f": did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{owner}.{field}: expected one of {expected}, got {value!r}{meant}")


def check_flag(owner: str, field: str, value: Any) -> None:
    """Raises ``TypeError`` unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{owner}.{field}: expected True or False, got {value!r}")


def check_number(
    owner: str, field: str, value: Any, low: float, high: float, *, integer: bool = False
) -> None:
    """Raises unless ``value`` is a number with ``low <= value <= high``.

    Raises:
        TypeError: a value that is not a number (with ``integer``, not an integer).
        ValueError: a number out of range, or NaN.
    """
    types = (int, np.integer) if integer else (int, float, np.integer, np.floating)
    what = "an integer" if integer else "a number"
    if isinstance(value, bool) or not isinstance(value, types):
        raise TypeError(f"{owner}.{field}: expected {what} in [{low}, {high}], got {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{owner}.{field}: expected {what} in [{low}, {high}], got {value!r}")


def check_threads(owner: str, threads: Any) -> None:
    """Raises, as :func:`check_number` does, unless kernels can use that number of threads."""
    check_number(owner, "threads", threads, 1, 1024, integer=True)


def store(instance: Any, field: str, value: float) -> None:
    """Sets a field of a frozen dataclass to a plain Python number.

    Configurations with 2, 2.0 and ``numpy.float32(2)`` are equal, because the numbers are; so their
    JSON, and with it their hash, must be equal too.
    """
    object.__setattr__(instance, field, value)
