"""The count of a run's tests by frontend, from what pytest writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.support import counted

_TESTS = """
import pytest

@pytest.fixture
def broken():
    raise ArithmeticError

def test_that_passes(): pass
def test_that_fails(): raise ArithmeticError
def test_of_a_broken_fixture(broken): pass
@pytest.mark.skip
def test_that_is_skipped(): pass
"""


def test_outcomes_by_frontend(tmp_path: Path) -> None:
    ddp = ("tests/contract/test_ddp.py", "tests/ddp/test_b.py")
    for path in ("tests/fsdp/test_a.py", *ddp, "tests/golden/test_c.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(_TESTS)
    command = (
        sys.executable,
        "-m",
        "pytest",
        "--rootdir=.",
        "--import-mode=importlib",
        "-c/dev/null",
    )
    subprocess.run((*command, "--junit-xml=told.xml", "tests"), cwd=tmp_path, capture_output=True)
    found = counted(tmp_path / "told.xml")
    assert found["FSDP2"] == {"passed": 1, "failed": 2, "skipped": 1}
    assert found["DDP"] == {"passed": 2, "failed": 4, "skipped": 2}
    assert found["golden files"] == found["FSDP2"]
    assert set(found) == {"FSDP2", "DDP", "golden files"}
