"""When a curve reaches a loss, and what a clock shows then."""

from __future__ import annotations

import pytest

from benchmarks.pages.time_to_loss import seconds_at, steps_to
from benchmarks.results import Point

_CURVE = [Point(10, 4.0, 2.0), Point(20, 3.0, 3.0), Point(30, 3.5, 5.0), Point(40, 2.0, 6.0)]


def test_steps_are_interpolated() -> None:
    assert [steps_to(_CURVE, loss) for loss in (4.0, 3.25, 3.0, 2.5)] == [
        10,
        pytest.approx(17.5),
        20,
        pytest.approx(30 + 10 * 2 / 3),
    ]
    assert steps_to(_CURVE, 5.0) == 10
    with pytest.raises(ValueError, match=r"a loss of 1\.000 or less, got 2\.000 at the end"):
        steps_to(_CURVE, 1.0)


def test_seconds_are_interpolated() -> None:
    assert [seconds_at(_CURVE, step) for step in (0, 5, 15, 40)] == [0.0, 1.0, 2.5, 6.0]
