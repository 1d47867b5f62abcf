"""The codec benchmark measures every variant, and computes its figures from the times."""

import itertools
import json
from types import SimpleNamespace

import pytest

from benchmarks import codec, timing
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


def test_figures_follow_from_the_times(tmp_path, capsys, monkeypatch):
    """A call of a codec takes 10 ms between copies of 1 and 3 ms and triads of 2 and 6 ms."""
    took = itertools.cycle((0.001, 0.002, 0.010, 0.003, 0.006))
    clock = itertools.accumulate(x for seconds in took for x in (1.0, seconds))
    fake = SimpleNamespace(perf_counter=lambda: next(clock), sleep=lambda seconds: None)
    monkeypatch.setattr(timing, "time", fake)
    out = tmp_path / "codec.json"
    assert codec.main(["--quick", "--json", str(out), "--codec", "int8 linear 2048"]) == 0

    found = json.loads(out.read_text())
    (row,) = found["codecs"].values()
    ns, payload = 0.010e9 / codec.QUICK_ELEMENTS, row["bits_per_element"] / 8
    for operation, moved in {"encode": 4, "encode_with_feedback": 12, "decode": 4}.items():
        times = row[operation]
        assert times["copies"] == pytest.approx(5)
        assert times["ns_per_element"] == pytest.approx(ns)
        assert times["copy_ns_per_element"] == pytest.approx(ns / 5)
        assert times["gigabytes_per_second"] == pytest.approx((moved + payload) / ns)
        assert times["bandwidth"] == pytest.approx((moved + payload) / 12 / 2.5)
    assert found["copy_ns_per_element"] == pytest.approx(ns / 5)
    assert found["triad_gigabytes_per_second"] == pytest.approx(12 * 2.5 / ns)
    share = f"{(12 + payload) / 30:.0%}"
    assert f"5.00 ({ns:.2f}; {share})" in capsys.readouterr().out


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


@pytest.mark.parametrize("name", [name for name, case in CODECS.items() if not case.saturates])
def test_the_feedback_that_is_measured_is_stable(name):
    CODECS[name].check_feedback(stable_feedback(CODECS[name], 1 << 26), (8192, 8192))
