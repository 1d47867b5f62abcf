"""``python -m benchmarks.predict``: named networks, strong scaling, the best number of workers, plots."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.predict import arguments, profiles
from benchmarks.predict.__main__ import main
from benchmarks.predict.networks import NETWORKS
from benchmarks.predict.sweep import job, optimal_workers


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


def test_a_plot(tmp_path: Path) -> None:
    path = tmp_path / "new" / "plot.svg"
    assert main(["--workers", "1..1024", "--plot", str(path)]) == 0
    assert "<?xml" in path.read_text()[:200]
