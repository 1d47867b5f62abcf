"""Tables, pictures and statistics of results that are given here."""

import math

import pytest

from benchmarks import accuracy, compressions, plots, recipes, report, results
from benchmarks.intervals import paired


def _run(compression="none", seed=0, accuracy=0.975, **changes):
    fields = {
        "compression": compression,
        "seed": seed,
        "steps": 4,
        "curve": [results.Point(2, 2.0, 0.5, 1e5), results.Point(4, 1.0, 0.75, 2e5)],
        "epochs": [results.Epoch(1, 1.5, accuracy)],
        "test_accuracy": accuracy,
        "uncompressed_bytes_per_step": 246824.0,
        "message_bytes_per_step": 12341.2,
        "wire_bytes_per_step": 12341.2,
        "compression_ratio": 20.0,
        "step_seconds": results.Seconds(0.004, 0.003, 0.006),
        "encode_seconds_per_step": 0.0001,
        "decode_seconds_per_step": 0.0002,
        "residual_norm": 0.5,
        "parameters_identical": True,
        "test_bits": 2.5,
    }
    return results.Run(**{**fields, **changes})


def _results(*runs):
    configuration = {"framework": "torch", "model": "lenet", "data": "digits", "batch_size": 32}
    return results.Results(configuration, 2, {"python": "3.11"}, {"cpu": "a"}, list(runs))


def test_json_comes_back(tmp_path):
    outcome = _results(_run(), _run("onebit", accuracy=None, compression_ratio=None))
    outcome.write(tmp_path / "new" / "out.json")

    assert results.read(tmp_path / "new" / "out.json") == outcome


def test_ranks_that_disagree_are_reported(capsys, tmp_path):
    _results(_run("ecq", seed=3, parameters_identical=False)).write(tmp_path / "out.json")

    assert report.main([str(tmp_path / "out.json")]) == 1

    out, err = capsys.readouterr()
    assert "ecq, seed 3: parameters differ" in err and "NO" in out


def test_loss_curves_are_a_picture(tmp_path):
    plots.loss_curves(_results(_run(), _run("onebit"), _run("onebit", seed=1)), tmp_path / "a.png")

    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_paired_interval_against_the_textbook():
    # Differences 1, 2, 3: mean 2, deviation 1, t quantile with two degrees of freedom 4.3027.
    interval = paired([2, 4, 6], [1, 2, 3])

    assert interval.mean == 2
    assert math.isclose(interval.high - interval.mean, 4.302653 / math.sqrt(3), rel_tol=1e-6)
    assert interval.low < 0


def test_accuracies_are_compared_seed_by_seed():
    outcome = _results(
        *(_run("none", seed, accuracy=0.9 + seed / 100) for seed in range(3)),
        *(_run("int8", seed, accuracy=0.905 + seed / 100) for seed in range(2)),
    )

    none, int8 = accuracy.compare(outcome, recipes.DIGITS)

    assert (none["difference"], none["seeds"], int8["seeds"]) == (0, 3, 2)
    assert sum(int8["by_seed"].values()) / len(int8["by_seed"]) == int8["test_accuracy"]
    assert math.isclose(int8["difference"], 0.5) and math.isclose(int8["low"], 0.5)
    assert "+0.50" in accuracy.table([int8], recipes.DIGITS).markdown()


def test_bits_a_byte_of_text_are_compared_seed_by_seed():
    outcome = _results(
        *(_run("none", seed, test_bits=2.5 + seed) for seed in range(2)),
        *(_run("int8", seed, test_bits=2.625 + seed) for seed in range(2)),
    )

    _, int8 = accuracy.compare(outcome, recipes.TEXT)

    assert int8["test_bits"] == 3.125 and int8["difference"] == 0.125
    assert "| 3.125 | +0.125 |" in accuracy.table([int8], recipes.TEXT).markdown()


def test_another_baseline_can_be_compared_with():
    outcome = _results(
        *(_run("stock", seed, test_bits=2.5 + seed) for seed in range(2)),
        *(_run("none:sync_every=100", seed, test_bits=2.75 + seed) for seed in range(2)),
    )

    rows = accuracy.compare(outcome, recipes.TEXT, "stock")

    assert [row["difference"] for row in rows] == [0, 0.25]
    assert "difference to stock" in accuracy.table(rows, recipes.TEXT, "stock").text()


@pytest.mark.parametrize(
    ("text", "excluded"), [("ternary", ("fc3.*",)), ("ternary:exclude=", ()), ("onebit", None)]
)
def test_ternary_leaves_out_the_last_layer(text, excluded):
    assert compressions.parse(text, {}, "fc3.*").options.get("exclude") == excluded
