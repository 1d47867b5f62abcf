"""Predictions beside measurements that are given here."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from benchmarks import predicted, results
from benchmarks.compressions import parse
from benchmarks.predict.profiles import load
from benchmarks.predict.step import tensors_of
from hvd_compress.codecs import FP16, OneBit
from hvd_compress.planner.cost import seconds
from hvd_compress.planner.machines import Cluster, CodecSpeed, Link
from tests.planner.strategies import route_of

STEPS = {"local": 0.4, "none": 2.6, "fp16": 2.0, "onebit:exchange=two_shot": 0.5}
WIRE = {"none": 244_403_360.0, "onebit:exchange=two_shot": 8_124_056.0}


def _results(steps: dict[str, float], model: str = "alexnet") -> results.Results:
    configuration = {"model": model, "batch_size": 8, "options": {}}
    runs = [
        results.Run(
            compression=name,
            seed=0,
            steps=4,
            curve=[],
            epochs=[],
            test_accuracy=None,
            uncompressed_bytes_per_step=0.0,
            message_bytes_per_step=0.0,
            wire_bytes_per_step=WIRE.get(name, 0.0),
            compression_ratio=None,
            step_seconds=results.Seconds(step, step, step),
            encode_seconds_per_step=0.0,
            decode_seconds_per_step=0.0,
            residual_norm=0.0,
            parameters_identical=True,
        )
        for name, step in steps.items()
    ]
    return results.Results(configuration, 2, {}, {}, runs)


def test_computation_is_the_local_step() -> None:
    steps = predicted.predictions(_results(STEPS), load("lab"))
    assert list(steps) == ["none", "fp16", "onebit:exchange=two_shot"]
    for name, step in steps.items():
        assert math.isclose(step.computation, 0.4)
        if name in WIRE:
            assert step.exchange.sent == WIRE[name]


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lab.json"
    _results(STEPS).write(path)
    assert predicted.main([str(path), "--link", "1gbit", "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| compression | measured ms | predicted ms |")
    assert lines[2].startswith("| local | 400 | - |")
    _, name, measured, prediction, ratio, sent, model, *_ = map(str.strip, lines[3].split("|"))
    assert (name, measured, sent, model) == ("none", "2600", "244.40", "244.40")
    assert math.isclose(float(ratio), float(prediction) / 2600, abs_tol=0.006)


def test_speeds_of_measured_exchanges(tmp_path: Path) -> None:
    """Measurements that the model itself made up, with known seconds an element, are taken apart again."""
    cluster = Cluster(2, 1, Link(1e8, 1e-4), start=1e-3)
    true = {"none": CodecSpeed(add=7e-9), "onebit": CodecSpeed(encode=3e-9, decode=2e-9)}
    rows = []
    for kind, name in (("allreduce", "none"), ("allgather", "onebit")):
        for count in (10**6, 10**7):
            route = predicted.router_of(parse(name, {}, ""), 2).choose("w", (count,), "float32")
            cost = seconds((count,), route, true[name], cluster)
            # A gather decodes the payloads of both ranks.
            codec = {"encode": true[name].encode * count, "decode": 2 * true[name].decode * count}
            assert math.isclose(cost.total - cost.wire, sum(codec.values()), abs_tol=1e-12)
            exchange = f"{kind}:{name}"
            parts = {"transfer": cost.wire, **codec}
            rows.append({"exchange": exchange, "elements": count, "parts": parts})
    record = {"schema": predicted.EXCHANGE_SCHEMA, "ranks": 2, "rows": rows}
    found = predicted.measured_speeds(record, cluster)
    for speed, name in zip(found.values(), true, strict=True):
        for field in ("encode", "decode", "add"):
            assert getattr(speed, field) == pytest.approx(getattr(true[name], field), abs=1e-15)
    free = {coding: dataclasses.replace(speed, add=0.0) for coding, speed in found.items()}
    slow, fast = (predicted.predictions(_results(STEPS), load("lab"), one) for one in (found, free))
    added = slow["none"].exchange.wire - fast["none"].exchange.wire
    assert math.isclose(added, 7e-9 * 61_100_840 / 2, rel_tol=1e-6)
    # Only biases below the threshold go uncompressed among fp16's tensors.
    assert math.isclose(slow["fp16"].exchange.wire, fast["fp16"].exchange.wire, rel_tol=1e-4)
    shots = slow["onebit:exchange=two_shot"]
    assert shots.exchange.encode > 3e-9 * 61_000_000, "not the profile's"
    sums = tmp_path / "sums.json"
    sums.write_text(json.dumps({**record, "ranks": 3}))
    trained = tmp_path / "lab.json"
    _results(STEPS).write(trained)
    assert predicted.main([str(trained), "--measured", str(sums)]) == 2


def test_exchanges_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    count = 4_194_304
    payload = OneBit(512).payload_bytes((count,))
    rows = [
        {
            "exchange": name,
            "elements": count,
            "wire_bytes": sent,
            "seconds": {"median": 0.5},
            "parts": parts,
        }
        for name, sent, parts in (
            ("allreduce:fp16", 2 * 7 / 8 * 2 * count, {"transfer": 0.4}),
            ("allgather:onebit:group=512", 7 * payload, {"transfer": 0.4}),
            ("two_shot:onebit", 0, {}),
        )
    ]
    record = {"schema": predicted.EXCHANGE_SCHEMA, "ranks": 8, "ranks_per_host": 2, "rows": rows}
    path = tmp_path / "exchange.json"
    path.write_text(json.dumps(record))
    assert predicted.main([str(path), "--link", "100mbit", "--efficiency", "1", "--markdown"]) == 0
    _, _, half, gather, shots = (
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in capsys.readouterr().out.splitlines()
    )
    lab = load("lab")
    cluster = Cluster(4, 2, Link(1.25e7, lab.between.latency), lab.within, lab.start)
    for line, codec, exchange in (
        (half, FP16(), "allgather"),
        (gather, OneBit(512), "allgather"),
        (shots, OneBit(), "two_shot"),
    ):
        route = route_of(codec, exchange)
        cost = seconds((count,), route, lab.speed(route), cluster)
        assert line[2] == "500.0" and line[3] == f"{1e3 * cost.total:.1f}"
        assert line[6] == f"{1e3 * cost.wire:.1f}"
    # Sent, as measured and as predicted.
    assert half[-1] == half[-2] and gather[-1] == gather[-2]
    assert shots[5] == "-"


def test_routers_are_those_of_training() -> None:
    compression = parse(
        "onebit:group=512,alpha=0.5,exchange=two_shot,threshold=100000,exclude=fc3*", {}, "fc3.*"
    )
    layers = tensors_of(predicted.network_of("alexnet"), predicted.router_of(compression, 2))
    encoded = {
        tensor.name: tensor.route
        for layer in layers
        for tensor in layer
        if not tensor.route.uncompressed
    }
    assert list(encoded) == [
        *(f"conv{number}.weight" for number in (2, 3, 4, 5)),
        "fc1.weight",
        "fc2.weight",
    ]
    route = encoded["fc1.weight"]
    assert route.codec == OneBit(512) and route.feedback.alpha == 0.5
    assert route.exchange == route_of(OneBit(512), "two_shot").exchange
    with pytest.raises(ValueError, match=r"ternary:zip=1: expected settings of the codec"):
        predicted.router_of(parse("ternary:zip=1", {}, "fc"), 2)
