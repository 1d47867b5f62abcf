"""One training step of a whole network: what of the exchange hides behind the backward pass.

Three things are busy, each with one task at a time:

- the *processor*, with the forward pass, the backward pass layer by layer from the last one, the encoders,
  after the backward pass the decoders in the order in which messages arrive, and the optimizer;
- the *wire*, with collectives in the order in which they become ready. Encoded gradients travel in the
  buckets of training, and what waits for the wire travels together, where Horovod fuses;
- the *helper*, with owners' work between two collectives, beside the backward pass and no slower for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hvd_compress.codecs.base import Shape
from hvd_compress.exchanges import buckets
from hvd_compress.exchanges.hosts import Hosts
from hvd_compress.exchanges.routing import Route, Router
from hvd_compress.exchanges.steps import all_reduce
from hvd_compress.perfmodel.collectives import collective
from hvd_compress.perfmodel.cost import stages_of
from hvd_compress.perfmodel.machines import Cluster, CodecSpeed
from hvd_compress.perfmodel.networks import Network
from hvd_compress.perfmodel.pipeline import Totals, Transfer, carry
from hvd_compress.ranks import token

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
class RoutedTensor:
    """A parameter whose gradient is exchanged.

    Attributes:
        number: its position among the network's parameters.
        name: for patterns of the router.
        shape: its shape.
        route: what the router chose.
    """

    number: int
    name: str
    shape: Shape
    route: Route


def tensors_of(network: Network, router: Router) -> list[list[RoutedTensor]]:
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
    bits: float | None = None,
) -> StepTime:
    """The predicted time of one training step.

    Args:
        network: whose gradients, float32.
        computation: of the network's layers, for a rank's batch.
        router: chooses each tensor's route, as it does in training.
        speeds: of the codecs.
        cluster: ranks and links.
        overlap: whether the exchange starts during the backward pass; otherwise after it.
        bits: of an element's code, as for :class:`~hvd_compress.exchanges.steps.Gradient`.
    """
    totals = Totals()
    transfers, now = _backward(network, computation, router, speeds, cluster, totals, bits)
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
) -> Iterator[RoutedTensor]:
    for kind, shape in zip(("weight", "bias"), shapes, strict=False):
        name = f"{layer}.{kind}"
        yield RoutedTensor(next(numbers), name, shape, router.choose(name, shape, "float32"))


def _backward(
    network: Network,
    computation: Computation,
    router: Router,
    speeds: Speeds,
    cluster: Cluster,
    totals: Totals,
    bits: float | None,
) -> tuple[list[Transfer], float]:
    """Forward pass, backward pass and encoders: what is to be sent, and when all is computed."""
    layers = tensors_of(network, router)
    tensors = [tensor for layer in layers for tensor in layer]
    waiting = {tensor.number: bucket for bucket in _buckets(tensors) for tensor in bucket}
    transfers: list[Transfer] = []
    now = sum(layer.forward for layer in computation.layers)
    for layer, time in zip(reversed(layers), reversed(computation.layers), strict=True):
        now += time.backward
        for tensor in reversed(layer):
            bucket = waiting[tensor.number]
            if tensor is not bucket[-1]:
                continue  # It waits for the others of its bucket.
            paths = [stages_of(one.shape, one.route, cluster, bits=bits) for one in bucket]
            transfer = Transfer(now, paths, [speeds(one.route) for one in bucket])
            if transfer.works:
                now += totals.compute(transfer)
            transfer.ready = now
            transfers.append(transfer)
    # Horovod fuses the tokens; the last of them is ready now.
    encoded = sum(not tensor.route.uncompressed for tensor in tensors)
    if encoded and cluster.ranks > 1:
        sums = all_reduce(encoded * len(token.make(0)))
        path = [collective(sums, "all", Hosts(cluster.ranks, cluster.local))]
        transfers.append(Transfer(now, [path], [CodecSpeed()]))
    return transfers, now


def _buckets(tensors: Sequence[RoutedTensor]) -> Iterator[list[RoutedTensor]]:
    """What travels together, in the order of the backward pass, as it does in training.

    Uncompressed tensors are Horovod's, each by itself until Horovod fuses them.
    """
    kinds: dict[str, dict[int, RoutedTensor]] = {}
    for tensor in tensors:
        if tensor.route.uncompressed:
            yield [tensor]
        else:
            kinds.setdefault(tensor.route.exchange, {})[tensor.number] = tensor
    for kind in kinds.values():
        sizes = [(number, math.prod(tensor.shape)) for number, tensor in kind.items()]
        for numbers in buckets.compose(sizes):
            yield [kind[number] for number in numbers]
