"""The tables and pictures of measured figures are those of the committed records."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.pages import __main__ as pages
from benchmarks.pages import bandwidth
from benchmarks.pages.reading import label, middle_half, signed
from benchmarks.pages.registry import TABLES

UNUSED = {"statements-terngrad-sharing"}
"""Its paper makes no statement."""


def test_every_table_and_picture_is_of_the_records() -> None:
    assert [path.name for path, _ in pages.outdated()] == []


def test_every_table_has_one_place() -> None:
    found = Counter(name for page in pages.pages() for name in pages.names(page.read_text()))
    assert found == Counter(TABLES.keys() - UNUSED)


def test_a_figure_that_was_changed_by_hand_is_found() -> None:
    page = (pages.ROOT / "docs" / "optimizers.md").read_text()
    assert pages.rendered(page) == page
    for old, new in (("| 2.903 |", "| 2.803 |"), ("| none | 1,883,136 | 3 | 2.903 |  |  |\n", "")):
        assert pages.rendered(page.replace(old, new)) == page != page.replace(old, new)


def test_a_place_for_a_table_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="got a place for table accuracies"):
        pages.rendered("<!-- table: accuracies -->\n<!-- end -->\n")


def test_the_command_names_what_differs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = pages.ROOT / "docs" / "fsdp.md"
    monkeypatch.setattr(pages, "outdated", lambda: iter([(page, "")]))
    assert pages.main(["--check"]) == 1
    assert capsys.readouterr().out == "docs/fsdp.md: differs\n"
    monkeypatch.setattr(pages, "outdated", lambda: iter(()))
    assert pages.main(["--check"]) == 0


def test_numbers_as_the_pages_write_them() -> None:
    assert (signed(-0.126, 2), signed(0.5, 1)) == ("\u22120.13", "+0.5")
    assert label("onebit:group=column,alpha=0") == "onebit, `group=column, alpha=0`"
    assert label("int8") == "int8"
    assert middle_half([1.0, 5.0, 2.0, 4.0, 3.0]) == "3.00 (2.00-4.00)"


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
