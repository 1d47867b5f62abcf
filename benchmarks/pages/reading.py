"""Reads records, and formats numbers for the pages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import quantiles
from typing import Any

RECORDS = Path(__file__).parent.parent / "records"


@cache
def record(name: str) -> dict[str, Any]:
    """The content of ``benchmarks/records/NAME.json``."""
    found: dict[str, Any] = json.loads((RECORDS / f"{name}.json").read_text())
    return found


def signed(number: float, digits: int) -> str:
    """A number with its sign, and a minus as wide as the plus; zero has a plus."""
    return f"{number:+z.{digits}f}".replace("-", "\u2212")


def label(compression: str) -> str:
    """A compression's label on the pages: the name, with the options as code."""
    name, _, options = compression.partition(":")
    return f"{name}, `{options.replace(',', ', ')}`" if options else name


def middle_half(numbers: list[float]) -> str:
    """The median and the range of the middle half, as text with two decimals."""
    low, median, high = quantiles(numbers, n=4, method="inclusive")
    return f"{median:.2f} ({low:.2f}-{high:.2f})"


def ratio(found: Sequence[float]) -> str:
    """A ratio and the ends of its interval."""
    return "{:.2f} ({:.2f} to {:.2f})".format(*found)
