"""Profiles of machines: links, memory, and the speeds of codecs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.predict.layers import Network
from benchmarks.predict.step import Computation, LayerTime
from hvd_compress.codecs import (
    BF16,
    ECQ,
    FP16,
    Codec,
    Int8,
    NoCompression,
    OneBit,
    Ternary,
    codec_from_config,
)
from hvd_compress.exchanges.routing import Route
from hvd_compress.planner.machines import Cluster, CodecSpeed, Link

RECORD_SCHEMA = "hvd_compress/codec/1"
"""The schema of the codec benchmark's JSON files."""

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
        name: a short name.
        title: a description of the machines.
        local: the number of ranks on a machine.
        between: a machine's link to the other machines.
        within: a rank's link to the other ranks on its machine.
        start: the seconds before a collective's first message.
        memory: the bytes per second that a rank reads or writes.
        speeds: the measured speeds of codecs. Other codecs are only limited by memory.
    """

    name: str
    title: str
    local: int
    between: Link
    within: Link
    start: float
    memory: float
    speeds: tuple[MeasuredSpeed, ...]

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

    def computation(self, network: Network, seconds: float, images: float = 1.0) -> Computation:
        """The computation of a rank in a step without any exchange.

        A layer takes time in proportion to its multiply-adds and the number of images, plus the time to
        read and write its parameters, which does not depend on the number of images.

        Args:
            network: the network.
            seconds: the measured seconds of a step.
            images: the number of images in the step to predict, relative to those in the measured step.
        """
        passes = FORWARD_BYTES + BACKWARD_BYTES + OPTIMIZER_BYTES
        # At most the whole time, if the memory's speed and the measurement do not fit together.
        touch = min(1 / self.memory, seconds / (passes * network.elements))
        rest = max(0.0, seconds - passes * touch * network.elements)
        # A backward pass has two products for the one of the forward pass.
        unit = images * rest / (3 * network.multiply_adds)
        layers = (
            LayerTime(
                forward=unit * layer.multiply_adds + FORWARD_BYTES * touch * layer.elements,
                backward=2 * unit * layer.multiply_adds + BACKWARD_BYTES * touch * layer.elements,
            )
            for layer in network.layers
        )
        return Computation(tuple(layers), OPTIMIZER_BYTES * touch * network.elements)


def speeds_of_record(record: Mapping[str, Any]) -> tuple[MeasuredSpeed, ...]:
    """The speeds in a record, the content of a JSON file from ``python -m benchmarks.codec``.

    Raises:
        ValueError: the record has another schema.
    """
    if record.get("schema") != RECORD_SCHEMA:
        raise ValueError(
            f"codec speeds: expected a file of schema {RECORD_SCHEMA!r}, got {record.get('schema')!r}"
        )
    return tuple(
        MeasuredSpeed(
            codec_from_config(entry["config"]),
            *(
                1e-9 * entry[part]["ns_per_element"]
                for part in ("encode", "encode_with_feedback", "decode_and_add")
            ),
        )
        for entry in record["codecs"].values()
    )


GPU = Profile(
    name="gpu",
    title="GPUs with 320 GB/s of memory, 4 a machine, 1 Gbit/s",
    local=4,
    between=Link(1.25e8, 5e-5),
    within=Link(1.575e10, 1e-5),  # PCIe 3.0 x16
    start=5e-4,  # Half of Horovod's cycle of 1 ms, for which a tensor waits on average.
    memory=3.2e11,  # NVIDIA's specifications: T4, GeForce GTX 1080.
    speeds=(),
)
"""GPUs at the lower end. The codecs have not been timed there: memory limits them."""

CPU = Profile(
    name="cpu",
    title="two cores of a shared virtual machine, 1 Gbit/s",
    local=1,
    between=Link(119551000.0, 1e-4),  # TCP's share of 1 Gbit/s Ethernet; the latency is estimated.
    within=Link(1e10, 1e-5),  # About the memory's bandwidth.
    start=1e-3,  # Horovod's cycle.
    memory=1.16e10,  # torch.Tensor.copy_ of 61 M float32 by one thread: 8 bytes in 0.69 ns.
    speeds=(  # benchmarks/records/codec-cpu.json, two threads.
        MeasuredSpeed(NoCompression(), 5.288e-10, 9.874e-10, 5.066e-10),
        MeasuredSpeed(FP16(), 3.911e-10, 6.383e-10, 3.597e-10),
        MeasuredSpeed(BF16(), 4.116e-10, 6.286e-10, 3.769e-10),
        MeasuredSpeed(OneBit(), 3.739e-10, 5.506e-10, 2.393e-10),
        MeasuredSpeed(Int8(), 3.524e-10, 5.368e-10, 3.217e-10),
        MeasuredSpeed(Ternary(), 6.471e-10, 8.409e-10, 3.338e-10),
        MeasuredSpeed(ECQ(4, "l2", 4096), 6.569e-10, 7.75e-10, 2.914e-10),
    ),
)
"""An Intel Xeon with AVX-512, on which a rank has two threads for codecs."""
