"""Benchmarks on ranks begin with their framework imported, which takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks import launch
from tests import jobs


@pytest.fixture(autouse=True, scope="module")
def _forked_ranks() -> Iterator[None]:
    """Those of :func:`benchmarks.launch.horovodrun`; a lab's are in networks of their own."""
    stock = launch.python

    def python(module: str, *arguments: str) -> list[str]:
        if module == "benchmarks.lab":
            return stock(module, *arguments)
        if module == "benchmarks.horovodrun":
            arguments = ("--gloo-timeout-seconds", jobs.GLOO_TIMEOUT, *arguments)
        tensorflow = {"tensorflow", "keras"} & set(arguments)
        return jobs.forked("tensorflow" if tensorflow else "horovodrun", module, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "python", python)
        yield
