"""All gradients of a model through the compressors: what is measured is also right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pytest
import torch

from benchmarks import compressions, gradients, launch
from tests.ranks import on_ranks

CHOSEN = ["none", "fp16", "onebit", "onebit:exchange=two_shot", "int8"]


def test_two_ranks_measure(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "gradients.json"
    arguments = ["--model", "lenet", "--repeats", "2", "--compression", *CHOSEN]
    launch.horovodrun(2, "benchmarks.gradients", ["--json", str(out), *arguments])
    record = json.loads(out.read_text())
    rows = {row["compression"]: row for row in record["rows"]}
    assert record["schema"] == gradients.SCHEMA
    assert list(rows) == CHOSEN
    assert all(row["right"] for row in rows.values())
    assert rows["none"]["wire_bytes"] > rows["fp16"]["wire_bytes"] > rows["onebit"]["wire_bytes"]
    assert all(0 < row["seconds"]["median"] < 60 for row in rows.values())
    assert " NO" not in capfd.readouterr().out


@on_ranks(2)
def test_lost_gradient_and_ranks_that_differ_are_seen() -> None:
    found = gradients.Gradients("lenet")
    compression = compressions.parse("onebit", {}, last_layer="")

    def verified(spoil: Any) -> bool:
        side = gradients.Side(found, compression, threads=1)
        exchange = side.exchange

        def spoilt() -> float:
            seconds = exchange()
            spoil(found.tensors[2].view(-1), side.compressor)
            return seconds

        side.exchange = spoilt  # type: ignore[method-assign]
        return side.verify()

    def residual(tensor: torch.Tensor, compressor: Any) -> None:
        state = compressor.state_dict()
        for entry in state["tensors"].values():
            if entry["residual"] is not None:
                entry["residual"].view(-1)[0] += 0.01
        compressor.load_state_dict(state)

    assert verified(lambda tensor, compressor: None)
    assert not verified(lambda tensor, compressor: tensor[7].add_(0.001))
    assert not verified(lambda tensor, compressor: tensor[-1].add_(hvd.rank()))
    assert not verified(residual)
