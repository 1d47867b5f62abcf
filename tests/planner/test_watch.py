"""When a change counts."""

from __future__ import annotations

from hvd_compress.planner.watch import Watch


def _looks(watch: Watch, *looks: tuple[float, ...]) -> list[bool]:
    return [watch.changed(*look) for look in looks]


def test_a_lasting_change_of_bandwidth_counts():
    watch = Watch(100.0, 1.0)
    assert _looks(watch, *[(1.0, 10.0)] * 3) == [False, False, True]
    assert watch.reason == "bandwidth fell"


def test_a_lasting_change_of_the_time_of_a_step_counts():
    watch = Watch(100.0)
    assert _looks(watch, (1.0, 100.0), *[(2.0, 100.0)] * 3) == [False, False, False, True]
    alone = Watch(100.0, 1.0)
    assert _looks(alone, *[(0.5,)] * 3) == [False, False, True]
    assert alone.reason == "a step's time fell" and not alone.suspects_links
    assert watch.reason == "a step's time rose"


def test_small_changes_and_short_ones_do_not():
    watch = Watch(100.0, 1.0)
    assert not any(_looks(watch, *[(1.2, 130.0), (0.8, 80.0)] * 5))
    assert not watch.suspicious
    assert not any(_looks(watch, *[(1.0, 10.0), (1.0, 10.0), (1.0, 100.0)] * 5))


def test_opposite_changes_do_not_add_up():
    watch = Watch(100.0, 1.0)
    assert not any(_looks(watch, *[(1.0, 10.0), (1.0, 1000.0)] * 5))
    assert watch.suspicious and watch.suspects_links
