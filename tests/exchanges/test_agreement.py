"""Configurations that differ are named, with each rank's value."""

from __future__ import annotations

from typing import Any

import pytest

from hvd_compress.ranks import agreement
from hvd_compress.ranks.errors import ExchangeError


def _check(*configurations: dict[str, Any]) -> None:
    agreement.check(b"".join(agreement.serialize(c) for c in configurations))


def test_equal_configurations_pass_whatever_their_order() -> None:
    _check({"seed": 1, "of": {"a": "x", "b": "y"}}, {"of": {"b": "y", "a": "x"}, "seed": 1})
    _check({})


def test_differences_name_the_setting_and_the_ranks() -> None:
    first = {"seed": 1, "gradient of": {"a": "[2, 3] by OneBit()"}}
    other = {"seed": 2, "gradient of": {"a": "[3, 2] by OneBit()", "b": "[1]"}}
    with pytest.raises(ExchangeError) as raised:
        _check(first, other, first)
    lines = str(raised.value).splitlines()[1:]
    assert lines == [
        "  gradient of a: [2, 3] by OneBit() on rank 0, 2, [3, 2] by OneBit() on rank 1",
        "  gradient of b: absent on rank 0, 2, [1] on rank 1",
        "  seed: 1 on rank 0, 2, 2 on rank 1",
    ]


def test_null_is_not_absent_and_numbers_are_not_their_names() -> None:
    with pytest.raises(ExchangeError, match="clip: None on rank 0, absent on rank 1"):
        _check({"clip": None}, {})
    with pytest.raises(ExchangeError, match="seed: 1 on rank 0, 1 on rank 1"):
        _check({"seed": 1}, {"seed": "1"})


def test_names_may_hold_any_character() -> None:
    strange = {"of": {"a\nb\r\u2028 é": "x"}}
    _check(strange, strange)
    with pytest.raises(ExchangeError, match="differ"):
        _check(strange, {"of": {"a": "x"}})


def test_long_lists_are_cut() -> None:
    ranks = [{f"setting {i}": rank // 50 for i in range(9)} for rank in range(100)]
    with pytest.raises(ExchangeError) as raised:
        _check(*ranks)
    message = str(raised.value)
    assert "and 4 more settings" in message
    assert "0 on rank 0, 1, 2, 3, 4 and 45 more" in message


def test_a_line_that_was_altered() -> None:
    with pytest.raises(
        ExchangeError, match=r"as JSON from rank 1, got 2 bytes that begin with b'\{\\xff'"
    ):
        agreement.check(agreement.serialize({"seed": 1}) + b"{\xff\n")
