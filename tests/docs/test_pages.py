"""The tables and pictures of measured figures are those of the committed records."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.pages import __main__ as pages
from benchmarks.pages import bandwidth
from benchmarks.pages.registry import TABLES

UNUSED = {"statements-terngrad-sharing"}
"""Its paper makes no statement."""


def test_every_table_and_picture_is_of_the_records() -> None:
    assert [path.name for path, _ in pages.outdated()] == []


def test_every_table_has_one_place() -> None:
    found = Counter(name for page in pages.pages() for name in pages.names(page.read_text()))
    assert found == Counter(TABLES.keys() - UNUSED)


def test_where_a_codec_stops_paying() -> None:
    none = [8.0, 4.0, 2.0, 1.0, 1.0, 1.0]
    own = {
        "onebit": [1.0, 1.0, 1.0, 2.0, 2.0, 2.0],  # A half at 200 Mbit/s, twice at 500: in between.
        "int8": [1.0, 1.0, 1.0, 0.5, 0.5, 2.0],
        "bf16": [9.0] * 6,
        "auto": [0.5] * 6,
    }
    found = {name: bandwidth.crossing(name, {"none": none, **own}) for name in own}
    assert found["onebit"] == pytest.approx((200 * 500) ** 0.5)
    assert (found["int8"], found["bf16"], found["auto"]) == (1000, None, float("inf"))
