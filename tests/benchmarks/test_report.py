"""Tables, pictures and statistics of results that are given here."""

import math

import pytest

from benchmarks import accuracy, compressions, plots, recipes, report, results
from benchmarks.intervals import paired
from benchmarks.tables import Table, si_bytes


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


def test_json_of_something_else(tmp_path):
    (tmp_path / "out.json").write_text('{"schema": "other"}')

    with pytest.raises(ValueError, match="expected JSON of schema hvd_compress/train/1"):
        results.read(tmp_path / "out.json")


def test_table_shows_means_over_seeds():
    outcome = _results(_run("onebit", accuracy=0.96), _run("onebit", seed=1, accuracy=0.98))

    lines = report.training_table(outcome).text().splitlines()

    assert lines[2].split() == [
        "onebit", "97.00%", "2.500", "12.3", "kB", "20.0", "12.3", "kB", "4.00", "0.300", "0.5", "yes",
    ]  # fmt: skip


def test_top_five_have_a_column_where_they_were_measured():
    outcome = _results(_run("onebit", test_top5=0.75), _run("none"))

    table = report.training_table(outcome)

    place = table.header.index("top 5")
    assert [row[place] for row in table.rows] == ["75.00%", "-"]
    assert "top 5" not in report.training_table(_results(_run())).header


def test_absent_numbers_are_dashes():
    row = report.training_table(_results(_run(accuracy=None, compression_ratio=None))).rows[0]

    assert row[1] == row[4] == "-"


def test_ranks_that_disagree_are_reported(capsys, tmp_path):
    _results(_run("ecq", seed=3, parameters_identical=False)).write(tmp_path / "out.json")

    assert report.main([str(tmp_path / "out.json")]) == 1

    out, err = capsys.readouterr()
    assert "ecq, seed 3: parameters differ" in err and "NO" in out


def test_loss_curves_are_a_picture(tmp_path):
    plots.loss_curves(_results(_run(), _run("onebit"), _run("onebit", seed=1)), tmp_path / "a.png")

    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_loss_over_time_has_a_panel_for_each_link(tmp_path):
    for link in ("100mbit", "none"):
        outcome = _results(_run(), _run("onebit"))
        outcome.network = {"link": link}
        outcome.write(tmp_path / f"{link}.json")
    records = [str(tmp_path / "100mbit.json"), str(tmp_path / "none.json")]

    assert plots.main([*records, "--out", str(tmp_path / "a.svg")]) == 0

    drawn = (tmp_path / "a.svg").read_text()
    for label in ("100 Mbit/s", "no limit", "onebit", "megabytes a rank has sent", "bits a byte"):
        assert label in drawn


def test_a_curve_without_times_is_not_drawn_over_time(tmp_path):
    with pytest.raises(ValueError, match="expected records whose curves have seconds"):
        plots.text_loss([_results(_run(curve=[results.Point(4, 1.0)]))], tmp_path / "a.svg")


def test_markdown():
    table = Table(("name", "value"), [["a", "1"], ["b", "2"]])

    assert table.markdown().splitlines() == [
        "| name | value |",
        "| --- | ---: |",
        "| a | 1 |",
        "| b | 2 |",
    ]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1234, "1.23 kB"), (999_600, "1 MB"), (2.5e12, "2.5e+03 GB")],
)
def test_bytes(count, text):
    assert si_bytes(count) == text


def test_paired_interval_against_the_textbook():
    # Differences 1, 2, 3: mean 2, deviation 1, t quantile with two degrees of freedom 4.3027.
    interval = paired([2, 4, 6], [1, 2, 3])

    assert interval.mean == 2
    assert math.isclose(interval.high - interval.mean, 4.302653 / math.sqrt(3), rel_tol=1e-6)
    assert interval.low < 0


def test_one_pair_has_no_interval():
    with pytest.raises(ValueError, match="expected at least two pairs"):
        paired([1], [1])


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


def test_compressions_are_read_with_their_settings():
    got = compressions.parse(
        "ecq:levels=8,norm=linf,alpha=0.5,exclude=fc*|conv1.*",
        {"levels": 2, "threshold": 64},
        "fc3.*",
    )

    assert got.name == "ecq" and got.text.startswith("ecq:")
    assert got.options == {
        "levels": 8,
        "norm": "linf",
        "alpha": 0.5,
        "exclude": ("fc*", "conv1.*"),
        "threshold": 64,
    }


@pytest.mark.parametrize(
    ("text", "excluded"), [("ternary", ("fc3.*",)), ("ternary:exclude=", ()), ("onebit", None)]
)
def test_ternary_leaves_out_the_last_layer(text, excluded):
    assert compressions.parse(text, {}, "fc3.*").options.get("exclude") == excluded


def test_a_setting_without_a_value():
    with pytest.raises(ValueError, match="expected key=value, got 'levels'"):
        compressions.parse("ecq:levels", {}, "fc.*")
