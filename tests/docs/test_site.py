"""The site builds without a warning, where Sphinx is installed (`make docs` installs it)."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import plots, results

ROOT = Path(__file__).parent.parent.parent


def test_the_site_builds(tmp_path: Path) -> None:
    for module in ("sphinx", "myst_parser", "furo", "latex2mathml"):
        pytest.importorskip(module)
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "docs", str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "format.html").exists()
    assert len(list((tmp_path / "_images").glob("perfmodel-*.svg"))) == 3


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/**/*.md")), ids=lambda page: page.name)
def test_no_formula_goes_over_a_line(page: Path) -> None:
    """A line of it that begins with a minus is the item of a list, and the formula is none; no warning."""
    blocks = re.split(r"^ *```.*$", page.read_text(), flags=re.MULTILINE)
    for line in "".join(blocks[::2]).splitlines():
        assert re.sub(r"`[^`]*`|\$\$", "", line).count("$") % 2 == 0, line


@pytest.fixture
def script_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a script of the documentation."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module


def test_the_plot_of_page_one_is_of_the_records(
    script_of: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    script = script_of("plot_bandwidth")
    times = script.seconds()
    script.draw(times, tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text() == (
        ROOT / "docs" / "images" / "bandwidth.svg"
    ).read_text()
    page = (ROOT / "docs" / "performance.md").read_text()
    for line in script.table(times).markdown().splitlines():
        assert line in page


def test_the_losses_of_the_page_are_of_the_records(tmp_path: Path) -> None:
    records = [ROOT / "benchmarks" / "records" / f"lab-text-{r}.json" for r in ("100mbit", "1gbit")]
    plots.main([*map(str, records), "--out", str(tmp_path / "a.svg")])
    drawn = ROOT / "docs" / "images" / "text_loss.svg"
    assert (tmp_path / "a.svg").read_text() == drawn.read_text()
    page = (ROOT / "docs" / "performance.md").read_text()
    slow, fast = (results.read(record).runs for record in records)
    for one, other in zip(slow, fast, strict=True):
        megabytes = one.wire_bytes_per_step * one.steps / 1e6
        cells = (megabytes, one.train_seconds, other.train_seconds)
        line = " | ".join(f"{cell:.0f}" for cell in cells if cell is not None)
        assert f"| {line} | {one.test_bits:.3f} |" in page


def test_where_a_codec_stops_paying(script_of: Callable[[str], ModuleType]) -> None:
    script = script_of("plot_bandwidth")
    none = [8.0, 4.0, 2.0, 1.0, 1.0, 1.0]
    own = {
        "onebit": [1.0, 1.0, 1.0, 2.0, 2.0, 2.0],  # A half at 200 Mbit/s, twice at 500: in between.
        "int8": [1.0, 1.0, 1.0, 0.5, 0.5, 2.0],
        "bf16": [9.0] * 6,
        "auto": [0.5] * 6,
    }
    found = {name: script.crossing(name, {"none": none, **own}) for name in own}
    assert found["onebit"] == pytest.approx((200 * 500) ** 0.5)
    assert (found["int8"], found["bf16"], found["auto"]) == (1000, None, float("inf"))


def test_the_plot_of_alexnet_is_of_the_records(script_of: Callable[[str], ModuleType]) -> None:
    plot_step_times = script_of("plot_step_times")
    drawn = (ROOT / "docs" / "images" / "step_times.svg").read_text()
    for record in plot_step_times.RECORDS.values():
        for name, value in plot_step_times.seconds(record).items():
            assert f">{value:.2f} s<" in drawn, (record, name)
