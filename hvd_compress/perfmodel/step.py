"""One training step of a whole network: what of the exchange hides behind the backward pass.

Three things are busy, each with one task at a time:

- the *processor*, with the forward pass, the backward pass layer by layer from the last one, the encoders,
  after the backward pass the decoders in the order in which messages arrive, and the optimizer;
- the *wire*, with collectives in the order in which they become ready. What waits for it travels
  together, where Horovod fuses;
- the *helper*, with owners' work between two collectives, beside the backward pass and no slower for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hvd_compress.codecs.base import Shape
from hvd_compress.exchange.bundling import bundles
from hvd_compress.exchange.routing import Route, Router
from hvd_compress.perfmodel.cost import steps_of
from hvd_compress.perfmodel.exchanges import tokens
from hvd_compress.perfmodel.machines import Cluster, CodecSpeed
from hvd_compress.perfmodel.networks import Network
from hvd_compress.perfmodel.pipeline import Totals, Transfer, carry

Speeds = Callable[[Route], CodecSpeed]
"""How fast each route's codec is, with feedback where the route has it."""


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer's computation, for all images of a rank's batch."""

    forward: float
    backward: float


@dataclass(frozen=True)
class Computation:
    """Seconds of a step without any exchange.

    Attributes:
        layers: of the network, from input to output.
        optimizer: after all gradients are there.
    """

    layers: tuple[LayerTime, ...]
    optimizer: float = 0.0

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(layer.forward + layer.backward for layer in self.layers) + self.optimizer


@dataclass(frozen=True)
class StepTime:
    """What a step takes, and what each part of it would take alone.

    Attributes:
        seconds: of the step.
        computation: forward, backward and optimizer.
        encode: in encoders.
        wire: in collectives.
        decode: in decoders.
        wire_bytes: that a rank sends, on average.
    """

    seconds: float
    computation: float
    encode: float
    wire: float
    decode: float
    wire_bytes: float

    @property
    def exposed(self) -> float:
        """Seconds that the exchange adds to the step."""
        return self.seconds - self.computation


@dataclass(frozen=True)
class Tensor:
    """A parameter whose gradient is exchanged.

    Attributes:
        number: its place among the network's parameters.
        name: for patterns of the router.
        shape: its shape.
        route: what the router chose.
    """

    number: int
    name: str
    shape: Shape
    route: Route

    @property
    def bundled(self) -> bool:
        """Whether it is in a bundle of ours: Horovod does each alltoall by itself."""
        return not self.route.dense and self.route.exchange == "two_shot"


def tensors_of(network: Network, router: Router) -> list[list[Tensor]]:
    """Every layer's tensors, numbered from the first layer on."""
    numbers = iter(range(2**31))
    return [list(_of_layer(layer.name, layer.shapes, router, numbers)) for layer in network.layers]


def predict(
    network: Network,
    computation: Computation,
    router: Router,
    speeds: Speeds,
    cluster: Cluster,
    *,
    overlap: bool = True,
) -> StepTime:
    """The predicted time of one training step.

    Args:
        network: whose gradients, float32.
        computation: of the network's layers, for a rank's batch.
        router: chooses each tensor's route, as it does in training.
        speeds: of the codecs.
        cluster: ranks and links.
        overlap: whether the exchange starts during the backward pass; otherwise after it.
    """
    totals = Totals()
    transfers, now = _backward(network, computation, router, speeds, cluster, totals)
    if not overlap:
        for transfer in transfers:
            transfer.ready = now
    for arrival, transfer in carry(transfers, cluster, totals):
        now = max(now, arrival) + (totals.compute(transfer) if transfer.due else 0.0)
    return StepTime(
        seconds=now + computation.optimizer,
        computation=computation.seconds,
        encode=totals.encode,
        wire=totals.wire,
        decode=totals.decode,
        wire_bytes=totals.sent,
    )


def _of_layer(
    layer: str, shapes: tuple[Shape, ...], router: Router, numbers: Iterator[int]
) -> Iterator[Tensor]:
    for kind, shape in zip(("weight", "bias"), shapes, strict=False):
        name = f"{layer}.{kind}"
        yield Tensor(next(numbers), name, shape, router.choose(name, shape, "float32"))


def _backward(
    network: Network,
    computation: Computation,
    router: Router,
    speeds: Speeds,
    cluster: Cluster,
    totals: Totals,
) -> tuple[list[Transfer], float]:
    """Forward pass, backward pass and encoders: what is to be sent, and when all is computed."""
    layers = tensors_of(network, router)
    bundled = (
        (tensor.number, math.prod(tensor.shape))
        for layer in layers
        for tensor in layer
        if tensor.bundled
    )
    bundle_of = {number: i for i, numbers in enumerate(bundles(bundled)) for number in numbers}
    waiting: dict[int, Transfer] = {}
    transfers: list[Transfer] = []
    now = sum(layer.forward for layer in computation.layers)
    for layer, time in zip(reversed(layers), reversed(computation.layers), strict=True):
        now += time.backward
        for tensor in reversed(layer):
            speed = speeds(tensor.route)
            steps = steps_of(tensor.shape, tensor.route, cluster)
            transfer = Transfer(now, [steps], [speed])
            if transfer.works:
                now += totals.compute(transfer)
            bundle = waiting.get(bundle_of.get(tensor.number, -1))
            if bundle is None:
                transfers.append(transfer)
                if tensor.bundled:
                    waiting[bundle_of[tensor.number]] = transfer
            else:
                # It has encoded its own first step, as this one has: both go on with the next.
                bundle.paths.append(steps)
                bundle.speeds.append(speed)
                transfer = bundle
            transfer.ready = now
    # As soon as they come, but the last of them now; Horovod fuses them.
    encoded = sum(not tensor.route.dense for layer in layers for tensor in layer)
    if encoded:
        transfers.append(Transfer(now, [tokens(encoded, cluster)], [CodecSpeed()]))
    return transfers, now
