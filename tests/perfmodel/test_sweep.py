"""How many workers keep processors and network busy."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hvd_compress.perfmodel.sweep import balanced_workers
from tests.perfmodel.strategies import TRIES


@TRIES
@given(st.floats(1e-3, 1e3), st.floats(0, 1), st.floats(0, 1), st.integers(1, 200))
def test_balanced_workers_is_the_last_with_more_to_compute(
    shared: float, fixed: float, per_node: float, limit: int
) -> None:
    def computation(workers: int) -> float:
        return shared / workers

    def communication(workers: int) -> float:
        return fixed + per_node * (workers - 1)

    good = [k for k in range(1, limit + 1) if computation(k) >= communication(k)]
    assert balanced_workers(computation, communication, limit) == max(good, default=1)
