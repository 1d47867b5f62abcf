"""Instruction sets: what this machine lacks is skipped, a library that is missing is a failure."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernels.arrays import INSTRUCTION_SETS, available, using


@pytest.fixture(params=INSTRUCTION_SETS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set in turn, in use for the test."""
    if not available(request.param):
        pytest.skip(f"this machine has no {request.param}")
    with using(request.param):
        yield request.param
