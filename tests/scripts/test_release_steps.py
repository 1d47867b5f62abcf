"""A step of a release shows on the terminal what it does, and its log grows while it runs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.scripts.loading import ROOT

STEP = f"""\
import sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from tests.scripts.loading import load
release = load("release")
release.LOGS = Path(sys.argv[1])
print(release.run("it", "doing it", sys.executable, "-c", sys.argv[2]), end="")
"""
"""A program that runs Python code as a step of a release, and prints the output that ``run`` returns."""

UNTIL_TOLD = """\
import pathlib, sys, time; print('begun')
while not pathlib.Path({told!r}).exists(): time.sleep(0.05)
print('over')
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "release-it.log"


def _start(folder: Path, code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", STEP, str(folder), code],
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _has_begun(log: Path) -> bool:
    return log.exists() and log.read_text().endswith("\nbegun\n")


def test_a_step_is_shown_when_it_begins_and_its_log_grows(tmp_path: Path, log: Path) -> None:
    told = tmp_path / "told"
    code = f"exec({UNTIL_TOLD.format(told=str(told))!r})"
    with _start(tmp_path, code) as step:
        try:
            assert step.stderr and step.stdout
            assert step.stderr.read(len("doing it ...")) == "doing it ..."
            deadline = time.monotonic() + 60
            while not _has_begun(log) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert _has_begun(log)
            assert step.poll() is None
        finally:
            told.touch()
        assert step.stdout.read() == "begun\nover\n"
    assert step.returncode == 0


def test_a_step_that_fails_names_its_log(tmp_path: Path, log: Path) -> None:
    with _start(tmp_path, "print('detail'); raise SystemExit(3)") as step:
        _, shown = step.communicate()
    assert step.returncode == 1
    assert "\ndetail\n" in shown
    assert f"release: {sys.executable} ended with status 3; the log is {log}" in shown
