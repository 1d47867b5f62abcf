"""Profiles of machines: links, memory, and the speeds of networks and codecs, each with its source.

A profile is a JSON file in this folder, which :func:`load` reads.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_compress.codecs import Codec, codec_from_config
from hvd_compress.exchanges.routing import Route
from hvd_compress.perfmodel.machines import Cluster, CodecSpeed, Link
from hvd_compress.perfmodel.networks import Network
from hvd_compress.perfmodel.step import Computation, LayerTime

RECORD_SCHEMA = "hvd_compress/codec/1"
"""The schema of the codec benchmark's JSON files."""

_FOLDER = Path(__file__).parent

ENCODE_BYTES = 12
"""The memory traffic per element of an encoder with feedback, which reads the gradient and the residual,
and writes the residual (docs/performance.md)."""

DECODE_BYTES = 8
"""The memory traffic per element of a decoder, which reads and writes the sum."""

ADD_BYTES = 12
"""The memory traffic per element of an addition, which reads two numbers and writes one."""

FORWARD_BYTES, BACKWARD_BYTES, OPTIMIZER_BYTES = 4, 8, 20
"""The memory traffic per element of a parameter. The forward pass reads the parameter; the backward pass
also writes the gradient; SGD with momentum reads parameter, gradient and velocity, and writes parameter
and velocity."""


@dataclass(frozen=True)
class Rate:
    """The rate at which one rank trains a network alone.

    Attributes:
        batch: the profile's number of images per rank and step.
        measured_batch: the number of images per step in the measurement of the rate.
        images_per_second: the measured rate.
    """

    batch: int
    measured_batch: int
    images_per_second: float


@dataclass(frozen=True)
class MeasuredSpeed:
    """The codec benchmark's measurement of one configuration, in seconds per element."""

    codec: Codec
    encode: float
    encode_with_feedback: float
    decode: float


@dataclass(frozen=True)
class Profile:
    """A kind of machine, and the network between several of them.

    Attributes:
        name: the name of the profile's file, without its suffix.
        title: a description of the machines.
        local: the number of ranks on a machine.
        between: a machine's link to the other machines.
        within: a rank's link to the other ranks on its machine.
        start: the seconds before a collective's first message.
        memory: the bytes per second that a rank reads or writes.
        rates: the rates of networks by name.
        speeds: the measured speeds of codecs. Other codecs are only limited by memory.
        sources: the sources of these numbers.
    """

    name: str
    title: str
    local: int
    between: Link
    within: Link
    start: float
    memory: float
    rates: Mapping[str, Rate]
    speeds: Sequence[MeasuredSpeed]
    sources: Mapping[str, str]

    def cluster(self, workers: int) -> Cluster:
        """A cluster of ``workers`` ranks on the fewest machines that hold them.

        Raises:
            ValueError: the ranks do not fill the machines.
        """
        local = min(workers, self.local)
        if workers < 1 or workers % local:
            raise ValueError(
                f"workers: expected a multiple of {local}, the ranks of a machine, got {workers}"
            )
        return Cluster(workers // local, local, self.between, self.within, self.start)

    def speed(self, route: Route) -> CodecSpeed:
        """The speed of a route's codec on this machine: measured, or estimated from its memory traffic."""
        same = [one for one in self.speeds if one.codec == route.codec]
        alike = [one for one in self.speeds if isinstance(one.codec, type(route.codec))]
        add = ADD_BYTES / self.memory
        for measured in same or alike:
            encode = measured.encode_with_feedback if route.feedback.enabled else measured.encode
            return CodecSpeed(encode, measured.decode, add)
        return CodecSpeed(ENCODE_BYTES / self.memory, DECODE_BYTES / self.memory, add)

    def computation(
        self, network: Network, batch: float, *, seconds: float | None = None
    ) -> Computation:
        """The computation of a rank in a step without any exchange.

        A layer takes time in proportion to its multiply-adds and the number of images, plus the time to
        read and write its parameters, which does not depend on the number of images.

        Args:
            network: the network; one of the profile's networks if ``seconds`` is None.
            batch: the number of images per rank and step.
            seconds: the measured seconds of a step with ``batch`` images; None means the profile's rate.

        Raises:
            ValueError: the profile has no rate for the network.
        """
        if seconds is not None:
            measured, images = seconds, batch
        elif network.name in self.rates:
            rate = self.rates[network.name]
            measured, images = (
                rate.measured_batch / rate.images_per_second,
                float(rate.measured_batch),
            )
        else:
            raise ValueError(
                f"profile {self.name}: expected one of {', '.join(self.rates)}, got {network.name!r}; "
                f"give the seconds of a step"
            )
        passes = FORWARD_BYTES + BACKWARD_BYTES + OPTIMIZER_BYTES
        # At most the whole time, if the memory's speed and the rate do not fit together.
        touch = min(1 / self.memory, measured / (passes * network.elements))
        rest = max(0.0, measured - passes * touch * network.elements)
        # A backward pass has two products for the one of the forward pass.
        unit = rest / images / (3 * network.multiply_adds)
        layers = (
            LayerTime(
                forward=unit * batch * layer.multiply_adds + FORWARD_BYTES * touch * layer.elements,
                backward=2 * unit * batch * layer.multiply_adds
                + BACKWARD_BYTES * touch * layer.elements,
            )
            for layer in network.layers
        )
        return Computation(tuple(layers), OPTIMIZER_BYTES * touch * network.elements)

    def with_speeds(self, speeds: Sequence[MeasuredSpeed]) -> Profile:
        """The same machine with other codec speeds."""
        return dataclasses.replace(self, speeds=tuple(speeds))


def names() -> list[str]:
    """The names of all profiles."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def load(name: str) -> Profile:
    """The profile with the given name.

    Raises:
        ValueError: there is no such profile.
    """
    if name not in names():
        raise ValueError(f"profile: expected one of {', '.join(names())}, got {name!r}")
    data = json.loads((_FOLDER / f"{name}.json").read_text())
    rates, codecs = data["networks"], data.get("codecs", {"speeds": ()})
    parts = {part: data[part]["source"] for part in ("between", "within", "start", "memory")}
    if "source" in codecs:
        parts["codecs"] = codecs["source"]
    return Profile(
        name=name,
        title=data["title"],
        local=data["local"],
        between=_link(data["between"]),
        within=_link(data["within"]),
        start=data["start"]["seconds"],
        memory=data["memory"]["bandwidth"],
        rates={
            network: Rate(rate["batch"], rate["measured_batch"], rate["images_per_second"])
            for network, rate in rates.items()
        },
        speeds=tuple(_speed(entry) for entry in codecs["speeds"]),
        sources={
            "machines": data["source"],
            **parts,
            **{network: rate["source"] for network, rate in rates.items()},
        },
    )


def speeds_of_record(record: Mapping[str, Any]) -> list[MeasuredSpeed]:
    """The speeds in a record, the content of a JSON file from ``python -m benchmarks.codec``.

    Raises:
        ValueError: the record has another schema.
    """
    if record.get("schema") != RECORD_SCHEMA:
        raise ValueError(
            f"codec speeds: expected a file of schema {RECORD_SCHEMA!r}, got {record.get('schema')!r}"
        )
    return [
        MeasuredSpeed(
            codec_from_config(entry["config"]),
            *(
                1e-9 * entry[part]["ns_per_element"]
                for part in ("encode", "encode_with_feedback", "decode_and_add")
            ),
        )
        for entry in record["codecs"].values()
    ]


def _link(data: Mapping[str, Any]) -> Link:
    return Link(data["bandwidth"], data["latency"])


def _speed(entry: Mapping[str, Any]) -> MeasuredSpeed:
    return MeasuredSpeed(
        codec_from_config(entry["config"]),
        entry["encode"],
        entry["encode_with_feedback"],
        entry["decode"],
    )
