"""The benchmark of all-reduces in a small lab, and other projects' quantizers, if they are installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.allreduce import __main__ as program
from benchmarks.allreduce import others
from benchmarks.allreduce.rank import METHODS, gradient
from tests.lab import machine
from tests.ranks import on_ranks

_SMALL = ["--hosts", "2", "--rate", "1gbit", "--rtt", "none", "--bytes", str(1 << 18)]


@pytest.mark.skipif(bool(machine.why_not()), reason=machine.why_not())
def test_a_lab_is_measured_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "allreduce.json"
    chosen = ["--methods", "gloo", "bf16 hook", "PowerSGD hook", "Int8, two shots"]
    command = ["--json", str(out), *_SMALL, "--rounds", "2", *chosen]
    assert program.main(command) == 0

    record = json.loads(out.read_text())
    (cell,) = record["cells"]
    errors = {name: row["error"] for name, row in cell["rows"].items()}
    assert list(errors) == chosen[1:]
    assert errors["gloo"] < 1e-6 < errors["bf16 hook"] < 0.01 < errors["Int8, two shots"] < 0.03
    # Normally distributed gradients have no low-rank approximation; the rest is sent later.
    assert 0.9 < errors["PowerSGD hook"] < 1.01
    for row in cell["rows"].values():
        assert [len(one) for one in row["rounds"]] == [3, 3]
    # All bytes that a host sends, with headers: a quarter of float32's, and the payloads' scales.
    sent = {name: row["rounds"][0][2] for name, row in cell["rows"].items()}
    assert sent["gloo"] > 1 << 18 and sent["Int8, two shots"] < 0.35 * sent["gloo"]

    before = out.read_text()
    assert program.main(command) == 0
    assert out.read_text() == before, "what is there is not measured again"

    record["machine"]["commit"] = "another"
    out.write_text(json.dumps(record))
    assert program.main(command) == 1
    assert "write another file" in capfd.readouterr().err


@on_ranks(2, launcher="torchrun")
def test_a_method_sends_in_its_own_group_alone() -> None:
    """Every method starts with connections of its own, and no other's calls keep them warm."""
    here = dist.get_rank()
    mine = gradient(1 << 12, 0) * (1, 1000)[here]
    for name, make in METHODS.items():
        alone = [dist.new_group([rank]) for rank in range(2)][here]
        result = mine.clone()
        make(result.numel(), alone)(result)
        ratio = float(result.norm() / mine.norm())
        assert 0.005 < ratio < 1.2, f"{name}: the other rank's tensor, too: {ratio}"


@pytest.mark.parametrize("name", others.QUANTIZERS)
def test_another_librarys_codes_stand_for_the_values(name: str) -> None:
    kind = others.QUANTIZERS[name]
    if not others.installed(kind.module):
        pytest.skip(f"{kind.module} is not installed; it is here for comparison only")
    quantizer = kind()
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    payload = torch.cat([one.view(torch.uint8) for one in quantizer.encode(values)])
    assert 10_000 < len(payload) < 11_100
    decoded = quantizer.decode(payload, len(values))
    assert float((decoded - values).norm() / values.norm()) < 0.03
