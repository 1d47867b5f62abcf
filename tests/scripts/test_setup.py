"""The make targets install what they use, and once; each step is one line on the terminal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts.loading import ROOT

PHASE = ROOT / "scripts" / "phase.py"

PYTHON = """\
#!/bin/sh
# Stands for Python: notes the phases by the names of their logs, and "makes" the environment.
case "$*" in *"-m venv"*) mkdir -p .venv/bin; cp "$0" .venv/bin/python;; esac
case "$1" in scripts/phase.py) basename "$2" .log >>phases;; esac
case "$*" in *"$FAILS"*) exit 1;; esac
"""


class Checkout:
    """The Makefile beside what it reads, with a Python that only notes what it is asked to do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = ("constraints.txt", "setup.cfg", "setup.py", "pyproject.toml", "CMakeLists.txt")
        for name in ("Makefile", *names):
            (folder / name).symlink_to(ROOT / name)
        for name in ("csrc", "tensorflow"):
            (folder / "hvd_compress").mkdir(exist_ok=True)
            (folder / "hvd_compress" / name).symlink_to(ROOT / "hvd_compress" / name)
        self.recipe = folder / "hvd_compress" / "horovod_wheel.py"
        self.recipe.write_text("1")
        self.python = folder / "python"
        self.python.write_text(PYTHON)
        self.python.chmod(0o755)

    def make(self, *arguments: str, fails: str = "no such thing", status: int = 0) -> list[str]:
        """The phases that were run."""
        noted = self.folder / "phases"
        noted.unlink(missing_ok=True)
        done = subprocess.run(
            ["make", f"PYTHON={self.python}", *arguments],
            cwd=self.folder,
            env={"PATH": os.environ["PATH"], "FAILS": fails},
            capture_output=True,
            text=True,
            check=False,
        )
        assert bool(done.returncode) == bool(status), done.stderr
        return noted.read_text().split() if noted.exists() else []


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_training_in_torch_needs_no_tensorflow(checkout: Checkout) -> None:
    assert checkout.make("train") == ["venv", "torch", "horovod", "package", "mlxtend", "native"]
    assert checkout.make("train") == []


def test_a_horovod_for_both_frameworks_replaces_the_one_for_torch(checkout: Checkout) -> None:
    checkout.make("train")
    added = ["tensorflow", "tf_keras", "horovod", "operations"]
    assert checkout.make("train", "FRAMEWORK=keras") == added
    assert checkout.make("train") == [], "a Horovod for both serves torch"
    assert checkout.make("test") == ["tests"]
    assert checkout.make("train", "FRAMEWORK=tensorflow") == []


def test_all_at_once_builds_one_horovod(checkout: Checkout) -> None:
    assert checkout.make("train", "test").count("horovod") == 1
    assert checkout.make("train", "test") == []


def test_another_recipe_builds_horovod_anew(checkout: Checkout) -> None:
    checkout.make("test")
    checkout.recipe.write_text("2")
    assert checkout.make("train") == ["horovod"]
    assert checkout.make("test") == ["horovod"], "the last one was for torch alone"
    checkout.recipe.write_text("1")
    assert checkout.make("test") == ["horovod"], "a stamp of the past does not count"


def test_lint_needs_neither_horovod_nor_tensorflow(checkout: Checkout) -> None:
    # It fails in the end, for want of a linter.
    assert checkout.make("lint", status=2) == ["venv", "torch", "package", "mlxtend", "lint"]


def test_a_step_that_failed_runs_again(checkout: Checkout) -> None:
    checkout.make("train", fails="horovod.log", status=1)
    assert checkout.make("train") == ["horovod", "package", "mlxtend", "native"]


def test_an_unknown_framework_is_an_error_before_anything_is_installed(checkout: Checkout) -> None:
    assert checkout.make("train", "FRAMEWORK=jax", status=2) == []


def _phase(folder: Path, code: str) -> tuple[int, str, str]:
    log = folder / "logs" / "x.log"
    done = subprocess.run(
        [sys.executable, str(PHASE), str(log), "Doing it", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.stdout
    return done.returncode, done.stderr, log.read_text()


def test_a_phase_is_one_line_and_a_log(tmp_path: Path) -> None:
    status, shown, log = _phase(tmp_path, "print('detail')")
    assert status == 0
    assert re.fullmatch(r"Doing it \.\.\. \d+ s\n", shown)
    assert "detail" in log.split("\n")


def test_a_phase_that_fails_shows_its_log(tmp_path: Path) -> None:
    status, shown, _ = _phase(tmp_path, "print('detail'); import sys; sys.exit(3)")
    assert status == 3
    assert re.match(r"Doing it \.\.\. failed after \d+ s; the end of", shown)
    assert "detail" in shown.split("\n")
