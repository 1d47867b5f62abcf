"""``python -m benchmarks.predict``: named networks, strong scaling, the best number of workers, plots."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.predict import arguments, profiles
from benchmarks.predict.__main__ import main
from benchmarks.predict.networks import NETWORKS
from benchmarks.predict.sweep import balanced_workers, job, optimal_workers
from tests.planner.strategies import TRIES


def _predict(tmp_path: Path, *options: str) -> dict:
    path = tmp_path / "deep" / "out.json"
    assert main([*options, "--json", str(path)]) == 0
    return json.loads(path.read_text())


def test_a_named_network_on_a_named_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = _predict(tmp_path, "--workers", "1,8", "--codec", "none")
    assert capsys.readouterr().out.startswith("alexnet, 128 images a worker and step, 128 machines")
    assert outcome["elements"] == 61_100_840 and outcome["scaling"] == "weak"
    assert "TernGrad" in outcome["machine"]["sources"]["machines"]
    alone = profiles.load("terngrad_ethernet").rated(NETWORKS["alexnet"](), 128).seconds
    assert [row["computation_seconds"] for row in outcome["rows"]] == [alone, alone]
    longer = _predict(tmp_path, "--workers", "1", "--codec", "none", "--compute", "1.5s")
    assert longer["rows"][0]["seconds"] == pytest.approx(1.5)


def test_strong_scaling_shares_the_images(tmp_path: Path) -> None:
    strong = ("--scaling", "strong", "--batch", "512", "--workers", "1,8,64")
    rows = _predict(tmp_path, *strong, "--machine", "terngrad_infiniband", "--codec", "none")
    assert [row["images_per_worker"] for row in rows["rows"]] == [512, 64, 8]
    computed = [row["computation_seconds"] for row in rows["rows"]]
    # Parameters are read in every step, however few images there are.
    assert computed[0] / 8 < computed[1] < computed[0] / 7


def test_optimal_workers_balance_computation_and_wire(tmp_path: Path) -> None:
    strong = ("--machine", "terngrad_infiniband", "--model", "vgg_a", "--scaling", "strong")
    outcome = _predict(tmp_path, *strong, "--batch", "4096", "--codec", "none", "--optimal", "4096")
    (found,) = outcome["optimal_workers"].values()
    machines = profiles.load("terngrad_infiniband")
    work = job(NETWORKS["vgg_a"](), machines, batch=4096, scaling="strong")
    (route,) = arguments.routes(["none"], ["two_shot"])
    assert found == optimal_workers(work, route, 4096)
    below, above = (work.step(route, count) for count in (found, found + 4))
    assert below.computation >= below.exchange.wire
    assert above.computation < above.exchange.wire


@pytest.mark.parametrize("ending", ("svg", "png"))
def test_plots(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "new" / f"plot.{ending}"
    assert main(["--workers", "1..1024", "--plot", str(path)]) == 0
    start = path.read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if ending == "png" else b"<?xml" in start


def test_without_matplotlib_nothing_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # An import fails then.
    assert main(["--plot", str(tmp_path / "plot.svg")]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "pip install matplotlib" in printed.err


@pytest.mark.parametrize(
    ("wrong", "words"),
    (
        (["--workers", "6"], "expected a multiple of 4"),
        (
            ["--machine", "lab", "--model", "vgg_a"],
            "--compute: expected the time of a step without exchange, such as 120ms, got none; "
            "--batch: expected images of a step, such as 32, got none, for vgg_a on lab",
        ),
        (
            ["--machine", "lab", "--model", "vgg_a", "--batch", "8"],
            "--compute: expected the time of a step",
        ),
        (["--model", "lenet"], "--model: expected one of alexnet"),
        (["--compute", "1s", "--scaling", "strong"], "expected weak scaling"),
    ),
)
def test_errors_say_what_to_do(
    wrong: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(wrong) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and words in error


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
