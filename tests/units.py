"""Distributes the tests to several processes, for ``pytest -n``.

A unit is a set of tests that run in the same process: those of a file, or of a folder whose files share
ranks, a build or a network; with ``HVDC_TEST_UNITS=files``, for machines with many processors, always those
of a file. While ranks wait, another process can use the processors. Long units come first, so that no
process is left with a long one at the end.
"""

from __future__ import annotations

import os
from pathlib import PurePath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling

TESTS = "tests"

PROCESSES = 2
"""The number of processes for ``-n auto``."""

WHOLE = frozenset(
    (
        "ddp",
        "distributed",
        "fsdp",
        "hostdev",
        "keras",
        "lab",
        "diloco",
        "optim",
        "papers",
        "tensorflow",
        "torch",
    )
)
"""The folders that are units."""

FIRST = (
    "contract/test_tensorflow.py",
    "native/test_sanitizers.py",
    "cuda/test_build.py",
    "suites/test_ddp.py",
    "tensorflow",
    "benchmarks/test_train.py",
    "faults/test_faults.py",
    "keras",
    "suites/test_fsdp2.py",
    "docs/test_examples.py",
    "cuda/test_batch.py",
    "torch",
    "diloco",
    "benchmarks/test_papers.py",
    "benchmarks/test_churn.py",
    "lab",
    "contract/test_torch.py",
    "ddp",
)
"""The longest units, in descending order of their durations."""


def unit(path: str) -> str:
    """The unit of a file, which is given by its path within tests, with slashes."""
    folder = path.partition("/")[0]
    whole = folder in WHOLE and os.environ.get("HVDC_TEST_UNITS") != "files"
    return folder if whole else path


def place(path: str) -> int:
    """The position of a file's unit among all units, for sorting."""
    name = unit(path)
    return FIRST.index(name) if name in FIRST else len(FIRST)


def scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """The scheduler that gives pytest-xdist's processes one unit after the other, in collection order."""
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit(PurePath(nodeid.partition("::")[0]).relative_to(TESTS).as_posix())

    config.option.loadscopereorder = False
    return Units(config, log)
