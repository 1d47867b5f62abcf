"""Compares the performance model to measurements: ``python -m benchmarks.predicted FILE --link 1gbit``.

The run of ``local`` in the training benchmark's JSON gives the time of a step without any exchange. From
that time, the codecs' speeds and the link, the other runs are predicted. The speeds, and the time of
Horovod's own sums, can come from a file of ``benchmarks.exchange`` on the same network: see
:func:`measured_speeds`. Such a file can also be compared to the model itself, one exchange at a time.
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
from benchmarks.predict.arguments import add_machine, machine_of
from benchmarks.predict.hardware import Profile
from benchmarks.predict.layers import Network
from benchmarks.predict.networks import NETWORKS, named
from benchmarks.predict.profiles import PROFILES
from benchmarks.predict.step import StepTime, predict
from benchmarks.results import Results
from benchmarks.tables import Table
from hvd_compress.codecs import Codec, ErrorFeedback
from hvd_compress.exchanges.default import exchange_for
from hvd_compress.exchanges.routing import DEFAULT_THRESHOLD, Route, Router
from hvd_compress.exchanges.steps import Computation
from hvd_compress.planner.collectives import Collective
from hvd_compress.planner.cost import collective_seconds, seconds, stages_of, wire_bytes
from hvd_compress.planner.machines import Cluster, CodecSpeed

EXCHANGE_SCHEMA = "hvd_compress/exchange/1"

_ROUTER = ("threshold", "exclude")
_FIELDS = dataclasses.fields(CodecSpeed)

Coding = tuple[Codec, ErrorFeedback]
"""A codec with its feedback, to which a speed belongs."""


def network_of(model: str) -> Network:
    """The model's layers, by the names that its parameters have in training.

    Raises:
        ValueError: the performance model does not know the model.
    """
    if model == "gpt2":
        return named("benchmarks.models.torch.transformer:gpt2")
    if model not in NETWORKS:
        raise ValueError(f"model: expected one of {', '.join(NETWORKS)}, got {model!r}")
    names = iter(dict(build(model).named_parameters()))
    layers = (
        dataclasses.replace(layer, shapes={next(names): one for one in layer.shapes.values()})
        for layer in NETWORKS[model]().layers
    )
    return Network(model, tuple(layers))


def router_of(compression: Compression, ranks: int) -> Router:
    """The router of a training with a compression among ``ranks`` ranks.

    Raises:
        ValueError: the compression has settings that the model does not know.
    """
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
    """The codecs' speeds in the exchange benchmark, medians over all exchanges and sizes.

    An allreduce's ring also takes time to copy and to add: the measured time of its transfer beyond the
    predicted one.

    Args:
        record: the record of the exchange benchmark.
        cluster: the cluster of its ranks.

    Raises:
        ValueError: the record has another schema, or another number of ranks.
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
    """The predicted step of every compression but ``local``, whose run is required.

    Args:
        outcome: the results of the training benchmark.
        profile: the machines and links.
        speeds: the codecs' speeds; None: those of the profile.

    Raises:
        ValueError: there is no run of ``local``, or the performance model does not know a compression.
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
    """A line for each compression: the measured time, the predicted one and its parts."""
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
        parts = (f"{1e3 * part:.0f}" for part in step.exchange[:3])
        rows.append(
            (
                text,
                f"{1e3 * measured:.0f}",
                f"{1e3 * step.seconds:.0f}",
                f"{step.seconds / measured:.2f}",
                f"{sent / 1e6:.2f}",
                f"{step.exchange.sent / 1e6:.2f}",
                *parts,
            )
        )
    return Table(header, rows)


def exchange_table(record: Mapping[str, Any], profile: Profile) -> Table:
    """A line for each exchange and size that the exchange benchmark measured.

    Raises:
        ValueError: the performance model does not know an exchange.
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
    """Prints the comparison as a table."""
    parser = Parser(prog="python -m benchmarks.predicted", description=__doc__)
    parser.add_argument(
        "json", type=Path, help="a file of benchmarks.train with local, or of benchmarks.exchange"
    )
    add_machine(parser, PROFILES, default="lab")
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="FILE",
        help="a file of benchmarks.exchange on the same network, for the speeds of codecs and sums",
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
    """The route of a row of the exchange benchmark."""
    kind, _, text = row["exchange"].partition(":")
    compression = compressions.parse(text, {"threshold": 0}, last_layer="")
    if kind != "allreduce":
        compression.options["exchange"] = kind
    # For one rank, because the exchange is named above, or is the framework's own.
    return router_of(compression, 1).choose("gradient", (row["elements"],), "float32")


def _each(seconds: float, elements: float) -> float:
    return max(0.0, seconds) / elements if elements else 0.0


def _medians(outcome: Results) -> dict[str, float]:
    """The median seconds of a step over seeds, by compression."""
    return {
        name: statistics.median(run.step_seconds.median for run in runs)
        for name, runs in report.by_compression(outcome).items()
    }


if __name__ == "__main__":
    sys.exit(main())
