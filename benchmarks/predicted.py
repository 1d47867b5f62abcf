"""The performance model beside measurements: ``python -m benchmarks.predicted FILE.json --link 1gbit``.

The run of ``local`` in the training benchmark's JSON says how long a step takes without any exchange. From
that, codec speeds and the link, all other runs are predicted. With the JSON of ``benchmarks.exchange`` from
the same network, codecs are as fast as there, and Horovod's own sums are not taken for free: see
:func:`measured_speeds`. That file can also be held against the model itself: one exchange after the other,
nothing overlapping.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import compressions, report, results
from benchmarks.command_line import Parser
from benchmarks.compressions import LOCAL, Compression
from benchmarks.models import MODELS
from benchmarks.models.torch import build
from benchmarks.predict.networks import NETWORKS
from benchmarks.predict.profiles import PROFILES
from benchmarks.results import Results
from benchmarks.tables import Table
from hvd_compress.codecs import Codec, ErrorFeedback
from hvd_compress.exchanges.default import exchange_for
from hvd_compress.exchanges.routing import DEFAULT_THRESHOLD, Route, Router
from hvd_compress.exchanges.steps import Computation
from hvd_compress.perfmodel.arguments import add_machine, machine_of
from hvd_compress.perfmodel.collectives import Collective
from hvd_compress.perfmodel.cost import collective_seconds, seconds, stages_of, wire_bytes
from hvd_compress.perfmodel.machines import Cluster, CodecSpeed
from hvd_compress.perfmodel.networks import Network
from hvd_compress.perfmodel.profiles import Profile
from hvd_compress.perfmodel.step import StepTime, predict

EXCHANGE_SCHEMA = "hvd_compress/exchange/1"

_ROUTER = ("threshold", "exclude")
_FIELDS = dataclasses.fields(CodecSpeed)

Coding = tuple[Codec, ErrorFeedback]
"""What has a speed."""


def network_of(model: str) -> Network:
    """The model's layers, by the names that its parameters have in training.

    Raises:
        ValueError: the performance model does not know it.
    """
    if model not in NETWORKS:
        raise ValueError(f"model: expected one of {', '.join(NETWORKS)}, got {model!r}")
    network = NETWORKS[model]()
    names = dict.fromkeys(name.rpartition(".")[0] for name, _ in build(model).named_parameters())
    layers = zip(network.layers, names, strict=True)
    return Network(model, tuple(dataclasses.replace(layer, name=name) for layer, name in layers))


def router_of(compression: Compression, ranks: int) -> Router:
    """The router that a compression trains with among a number of ranks."""
    route, options = compression.split()
    route = dataclasses.replace(route, exchange=route.exchange or exchange_for(ranks)[0])
    kept = {key: options.pop(key) for key in _ROUTER if key in options}
    if options:
        raise ValueError(
            f"{compression.text}: expected settings of the codec, alpha, beta, exchange, "
            f"{', '.join(_ROUTER)}, got {', '.join(options)}"
        )
    return Router(route, **{"threshold": DEFAULT_THRESHOLD, **kept})


def measured_speeds(record: Mapping[str, Any], cluster: Cluster) -> dict[Coding, CodecSpeed]:
    """How fast ranks computed in the exchange benchmark, medians over all exchanges and sizes.

    An allreduce's ring takes time beyond its bytes, to copy and to add: the rest of the measured transfer
    over the predicted one.

    Args:
        record: JSON of the exchange benchmark.
        cluster: the ranks that it ran on.

    Raises:
        ValueError: another kind of file, or other ranks.
    """
    if record.get("schema") != EXCHANGE_SCHEMA or record["ranks"] != cluster.ranks:
        raise ValueError(
            f"expected JSON of schema {EXCHANGE_SCHEMA} with {cluster.ranks} ranks, got "
            f"{record.get('schema')} with {record.get('ranks')}"
        )
    found: dict[Coding, list[CodecSpeed]] = {}
    for row in record["rows"]:
        parts, route = row["parts"], _route_of(row)
        if "encode" not in parts:
            continue
        stages = stages_of((row["elements"],), route, cluster)
        works = [stage for stage in stages if isinstance(stage, Computation)]
        rings = [stage for stage in stages if isinstance(stage, Collective)]
        wire = sum(collective_seconds([(ring, CodecSpeed())], cluster) for ring in rings)
        rest = parts["transfer"] - wire
        found.setdefault((route.codec, route.feedback), []).append(
            CodecSpeed(
                _each(parts["encode"], sum(work.encoded for work in works)),
                _each(parts["decode"], sum(work.decoded for work in works)),
                _each(rest, sum(ring.added for ring in rings)),
            )
        )
    return {
        coding: CodecSpeed(
            *(statistics.median(getattr(one, field.name) for one in speeds) for field in _FIELDS)
        )
        for coding, speeds in found.items()
    }


def predictions(
    outcome: Results, profile: Profile, speeds: Mapping[Coding, CodecSpeed] | None = None
) -> dict[str, StepTime]:
    """The predicted step of every compression but ``local``, which has to be among them.

    Args:
        outcome: of the training benchmark.
        profile: machines and links.
        speeds: of codecs, where they are not to be the profile's.

    Raises:
        ValueError: ``local`` is missing, or something is unknown to the model.
    """
    measured = _medians(outcome)
    if LOCAL not in measured:
        raise ValueError(f"expected a run of {LOCAL!r}, got {', '.join(measured)}")
    settings: dict[str, Any] = outcome.configuration
    network = network_of(settings["model"])
    computation = profile.computation(network, measured[LOCAL])
    cluster = profile.cluster(outcome.ranks)
    last_layer = MODELS[settings["model"]].last_layer

    def speed(route: Route) -> CodecSpeed:
        found = (speeds or {}).get((route.codec, route.feedback))
        return profile.speed(route) if found is None else found

    return {
        text: predict(
            network,
            computation,
            router_of(compressions.parse(text, settings["options"], last_layer), outcome.ranks),
            speed,
            cluster,
        )
        for text in measured
        if text != LOCAL
    }


def table(outcome: Results, predicted: dict[str, StepTime]) -> Table:
    """One line a compression: measured, predicted, and what the prediction is made of."""
    header = (
        "compression",
        "measured ms",
        "predicted ms",
        "predicted / measured",
        "sent MB",
        "predicted MB",
        "encode",
        "wire",
        "decode",
    )
    rows = []
    for text, measured in _medians(outcome).items():
        if text not in predicted:
            rows.append((text, f"{1e3 * measured:.0f}", *["-"] * 7))
            continue
        step = predicted[text]
        sent = report.by_compression(outcome)[text][0].wire_bytes_per_step
        parts = (f"{1e3 * part:.0f}" for part in (step.encode, step.wire, step.decode))
        rows.append(
            (
                text,
                f"{1e3 * measured:.0f}",
                f"{1e3 * step.seconds:.0f}",
                f"{step.seconds / measured:.2f}",
                f"{sent / 1e6:.2f}",
                f"{step.wire_bytes / 1e6:.2f}",
                *parts,
            )
        )
    return Table(header, rows)


def exchange_table(record: Mapping[str, Any], profile: Profile) -> Table:
    """One line for each exchange and size that the exchange benchmark measured.

    Raises:
        ValueError: an exchange that the model does not know.
    """
    header = (
        "exchange",
        "elements",
        "measured ms",
        "predicted ms",
        "predicted / measured",
        "wire ms",
        "predicted wire",
        "sent MB",
        "predicted MB",
    )
    hosts = dataclasses.replace(profile, local=record["ranks_per_host"])
    cluster = hosts.cluster(record["ranks"])
    rows = []
    for row in record["rows"]:
        shape, route = (row["elements"],), _route_of(row)
        predicted = seconds(shape, route, hosts.speed(route), cluster)
        measured, transfer = row["seconds"]["median"], row["parts"].get("transfer")
        rows.append(
            (
                row["exchange"],
                str(row["elements"]),
                f"{1e3 * measured:.1f}",
                f"{1e3 * predicted.total:.1f}",
                f"{predicted.total / measured:.2f}",
                "-" if transfer is None else f"{1e3 * transfer:.1f}",
                f"{1e3 * predicted.wire:.1f}",
                f"{row['wire_bytes'] / 1e6:.2f}",
                f"{wire_bytes(shape, route, cluster) / 1e6:.2f}",
            )
        )
    return Table(header, rows)


def main(command_line: list[str] | None = None) -> int:
    """Prints the table."""
    parser = Parser(prog="python -m benchmarks.predicted", description=__doc__)
    parser.add_argument(
        "json", type=Path, help="of benchmarks.train with local, or of benchmarks.exchange"
    )
    add_machine(parser, PROFILES, default="lab")
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="FILE",
        help="of python -m benchmarks.exchange on the same network: codecs and sums are as fast as there",
    )
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    args = parser.parse_args(command_line)
    try:
        shown = _table_of(args.json, args.measured, machine_of(args, PROFILES))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(shown.markdown() if args.markdown else shown.text())
    return 0


def _table_of(path: Path, exchanges: Path | None, profile: Profile) -> Table:
    raw = json.loads(path.read_text())
    if raw.get("schema") == EXCHANGE_SCHEMA:
        return exchange_table(raw, profile)
    outcome, speeds = results.read(path), None
    if exchanges is not None:
        record = json.loads(exchanges.read_text())
        speeds = measured_speeds(record, profile.cluster(outcome.ranks))
    return table(outcome, predictions(outcome, profile, speeds))


def _route_of(row: Mapping[str, Any]) -> Route:
    """The way of a line of the exchange benchmark."""
    kind, _, text = row["exchange"].partition(":")
    compression = compressions.parse(text, {"threshold": 0}, last_layer="")
    if kind != "allreduce":
        compression.options["exchange"] = kind
    # The exchange is named above, or is the framework's own.
    return router_of(compression, 1).choose("gradient", (row["elements"],), "float32")


def _each(seconds: float, elements: float) -> float:
    return max(0.0, seconds) / elements if elements else 0.0


def _medians(outcome: Results) -> dict[str, float]:
    """Seconds of a step, the median over seeds."""
    return {
        name: statistics.median(run.step_seconds.median for run in runs)
        for name, runs in report.by_compression(outcome).items()
    }


if __name__ == "__main__":
    sys.exit(main())
