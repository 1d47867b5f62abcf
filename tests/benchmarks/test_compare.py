"""A codec in a file of the user's, checked, trained, measured and shown beside this package's."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import accuracy, codec_file, compare, results
from benchmarks.launch import ROOT
from hvd_compress.codecs import CODECS

EXAMPLE = ROOT / "docs" / "examples" / "uniform4.py"
QUICK = ["--quick", "--recipe", "digits", "--seeds", "2"]


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    """Forgets codecs and modules of files afterwards."""
    codecs, modules, paths = dict(CODECS), set(sys.modules), list(sys.path)
    yield
    CODECS.clear()
    CODECS.update(codecs)
    sys.path[:] = paths
    for name in sys.modules.keys() - modules:
        if Path(getattr(sys.modules[name], "__file__", None) or "").stem == name:
            del sys.modules[name]


def _changed(folder: Path, *changes: tuple[str, str], name: str = "mine.py") -> Path:
    """Writes the example with other lines."""
    text = EXAMPLE.read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def test_one_file_one_command_one_table(tmp_path, capsys):
    out = tmp_path / "out"
    assert compare.main([str(EXAMPLE), *QUICK, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "uniform4: checked by the contract of codecs ... holds" in printed

    record = json.loads((out / "compare.json").read_text())
    methods = ["none", "int8", "ecq", "onebit", "uniform4"]
    assert list(record["methods"]) == methods and list(record["recipes"]) == ["digits"]
    part = record["recipes"]["digits"]
    assert part["configuration"]["codec_file"] == {
        "name": "uniform4.py",
        "sha256": codec_file.digest(EXAMPLE),
    }
    rows = {row["compression"]: row for row in part["compressions"]}
    assert list(rows) == methods
    assert all(row["seeds"] == 2 and row["parameters_identical"] for row in rows.values())
    # Both have codes of 4 bits, and a scale for 512 numbers.
    mine, ecq = rows["uniform4"], rows["ecq"]
    assert mine["bits_per_element"] == pytest.approx(ecq["bits_per_element"], rel=0.01)
    assert 4 < mine["bits_per_element"] < 5
    assert mine["data_volume"] == pytest.approx(mine["bits_per_element"] / 32, rel=0.01)
    for name, method in record["methods"].items():
        assert method["times"].keys() == {"reference", "cpu"} - {
            "cpu" if name == "uniform4" else ""
        }
        assert all(one["decode"]["copies"] > 0 for one in method["times"].values())
    method = record["methods"]["uniform4"]
    assert (method["error"], method["alpha"]) == ("contractive", 1.0)

    assert compare.table(record).text() in printed
    assert (out / "compare.md").read_text() == compare.table(record).markdown() + "\n"
    line = next(row for row in compare.table(record).rows if row[1] == "uniform4")
    assert line[0] == "digits" and line[2:4] == ["contractive", "1"] and line[-1] == ""
    with (out / "compare.csv").open() as file:
        trained = list(csv.DictReader(file))
    assert [(one["method"], one["seed"]) for one in trained] == [
        (method, str(accuracy.FIRST_SEED + seed)) for method in methods for seed in range(2)
    ]
    assert [one["memory"] for one in trained[::2]] == ["false"] * 3 + ["true"] * 2
    for one in trained:
        row = rows[one["method"]]
        assert float(one["data_volume"]) == pytest.approx(row["message_bytes_per_step"])
        assert 100 * float(one["top_1_accuracy"]) == pytest.approx(row["by_seed"][one["seed"]])
        assert float(one["throughput"]) > 0


def test_an_edited_file_is_trained_again_and_the_others_are_not(tmp_path, capfd):
    out = tmp_path / "out"
    command = ["--compression", "mine", *QUICK, "--out", str(out)]
    rename = ('name: ClassVar[str] = "uniform4"', 'name: ClassVar[str] = "mine"')
    mine = _changed(tmp_path / "folder", rename)
    assert compare.main([str(mine), *command]) == 0
    kept = (out / "digits-quick.json").stat().st_mtime_ns
    (before,) = out.glob("digits-quick-mine-*.json")

    CODECS.pop("mine")
    del sys.modules["mine"]
    mine.write_text(mine.read_text().replace("alpha=1.0", "alpha=0.0"))
    assert compare.main([str(mine), *command]) == 0
    assert (out / "digits-quick.json").stat().st_mtime_ns == kept
    (after,) = set(out.glob("digits-quick-mine-*.json")) - {before}
    norms = [results.read(path).runs[0].residual_norm for path in (before, after)]
    assert norms[0] > 0 == norms[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            [("np.rint(groups / units[:, None])", "np.ceil(groups / units[:, None])")],
            "mine.py: the contract of codecs is broken: Uniform4(group=512), shape (",
        ),
        (
            [("return units, pack_planes", "return units[:, 0], pack_planes")],
            "mine.py:51: IndexError: too many indices for array",
        ),
        ([("= 210", "= 1")], "expected a new codec_id, got 1 for mine.Uniform4, the id of"),
        ([("LEVELS = 7", "LEVELS = = 7")], "mine.py: SyntaxError: invalid syntax"),
    ],
)
def test_a_codec_that_is_wrong_is_not_trained(tmp_path, capsys, changes, message):
    mine = _changed(tmp_path, *changes)
    assert compare.main([str(mine), *QUICK, "--out", str(tmp_path / "out")]) == 1
    found = capsys.readouterr().err
    assert found.startswith("error: ") and message in found and found.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_file_can_say_how_its_codecs_are_checked(tmp_path):
    """A codec without a zero has an error of at most one unit where zeros are sent."""
    mine = _changed(
        tmp_path,
        ("levels[~(units > 0)] = 0", "levels[~(units > 0)] = 1"),
        ("units[units < TINY] = 0", "units[units < TINY] = TINY"),
        ("LEVELS = 7", 'LEVELS = 7\nCHECK = {"uniform4": {"floor": 1e-3}}'),
    )
    (name,) = codec_file.load(mine)
    codec_file.check(CODECS[name]())
