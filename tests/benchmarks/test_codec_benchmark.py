"""The codec benchmark measures every variant; what it measures is not tested."""

import json

import pytest

from benchmarks import codec
from benchmarks.codec_cases import CODECS, stable_feedback


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_every_variant_is_measured(tmp_path, capsys, kernels):
    out = tmp_path / "codec.json"

    assert codec.main(["--quick", "--json", str(out), "--kernels", kernels]) == 0

    found = json.loads(out.read_text())
    assert found["schema"] == codec.SCHEMA and found["kernels"] == kernels
    assert set(CODECS) <= set(found["codecs"])
    for name in CODECS:
        row = found["codecs"][name]
        assert row["encode_with_feedback"]["copies"] > 0 and row["decode"]["copies"] > 0
        assert row["encode_with_feedback"]["bandwidth"] > 0
        # A gradient and a residual are read, and a residual and a payload written.
        moved = 12 + row["bits_per_element"] / 8
        assert row["encode_with_feedback"]["bytes_per_element"] == moved
    assert found["codecs"]["none"]["relative_error"] == 0
    assert found["codecs"]["onebit 1024"]["bits_per_element"] < 1.1
    assert found["codecs"]["onebit 1024"]["relative_error"] == pytest.approx(0.363, abs=0.01)
    assert "onebit column" in capsys.readouterr().out


def test_residuals_in_bfloat16(tmp_path):
    out = tmp_path / "codec.json"
    options = ["--quick", "--json", str(out), "--codec", "onebit c", "ecq l2 2"]
    assert codec.main([*options, "--residual-dtype", "bfloat16"]) == 0

    found = json.loads(out.read_text())
    assert found["residual_dtype"] == "bfloat16" and len(found["codecs"]) == 2
    for row in found["codecs"].values():
        # A residual of two bytes an element is read and written.
        moved = 8 + row["bits_per_element"] / 8
        assert row["encode_with_feedback"]["bytes_per_element"] == moved


def test_codecs_are_chosen_by_how_their_names_begin(tmp_path):
    out = tmp_path / "codec.json"
    codec.main(
        ["--quick", "--json", str(out), "--kernels", "reference", "--codec", "fp16", "onebit r"]
    )

    assert list(json.loads(out.read_text())["codecs"]) == ["fp16", "onebit row"]


def test_an_unknown_codec(tmp_path, capsys):
    with pytest.raises(SystemExit):
        codec.main(["--json", str(tmp_path / "a"), "--codec", "gzip"])

    assert "expected beginnings of none, fp16" in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name, case in CODECS.items() if not case.saturates])
def test_the_feedback_that_is_measured_is_stable(name):
    CODECS[name].check_feedback(stable_feedback(CODECS[name], 1 << 26), (8192, 8192))
