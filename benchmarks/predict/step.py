"""One training step of a whole network, with an exchange that overlaps with the backward pass.

The model has three resources, each of which does one task at a time:

- the *processor* does the forward pass, the backward pass layer by layer from the last one, the encoders,
  after the backward pass the decoders in the order in which messages arrive, and the optimizer;
- the *wire* does collectives in the order in which they become ready. Encoded gradients are sent in the
  same buckets as in training, and collectives that wait for the wire are done together if Horovod fuses
  them;
- the *helper* does owners' work between two collectives, in parallel to the backward pass, which it does
  not slow down.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.predict.layers import Network
from benchmarks.predict.pipeline import Transfer, carry
from hvd_compress.codecs.base import Shape
from hvd_compress.exchanges import buckets
from hvd_compress.exchanges.hosts import Hosts
from hvd_compress.exchanges.routing import Route, Router
from hvd_compress.exchanges.steps import all_reduce
from hvd_compress.planner.collectives import collective
from hvd_compress.planner.cost import Cost, stages_of, sum_of
from hvd_compress.planner.machines import Cluster, CodecSpeed
from hvd_compress.ranks import token

Speeds = Callable[[Route], CodecSpeed]
"""A function that returns the speed of a route's codec, with feedback if the route has feedback."""


@dataclass(frozen=True)
class LayerTime:
    """The seconds of one layer's computation for all images of a rank's batch."""

    forward: float
    backward: float


@dataclass(frozen=True)
class Computation:
    """The seconds of a step without any exchange.

    Attributes:
        layers: the seconds of the network's layers, from input to output.
        optimizer: the seconds of the optimizer, which runs after all gradients are complete.
    """

    layers: tuple[LayerTime, ...]
    optimizer: float = 0.0

    @property
    def seconds(self) -> float:
        """The sum of all seconds."""
        return sum(layer.forward + layer.backward for layer in self.layers) + self.optimizer


@dataclass(frozen=True)
class StepTime:
    """The time of a step, and the time that each part of it would take alone, in seconds.

    Attributes:
        seconds: the time of the step.
        computation: the time of the forward pass, the backward pass and the optimizer.
        exchange: the cost of the exchange.
    """

    seconds: float
    computation: float
    exchange: Cost

    @property
    def exposed(self) -> float:
        """The seconds that the exchange adds to the step."""
        return self.seconds - self.computation


@dataclass(frozen=True)
class RoutedTensor:
    """A parameter whose gradient is exchanged.

    Attributes:
        number: the parameter's position among the network's parameters.
        name: the parameter's name, for the patterns of the router.
        shape: the parameter's shape.
        route: the route that the router chose.
    """

    number: int
    name: str
    shape: Shape
    route: Route


def tensors_of(network: Network, router: Router) -> list[list[RoutedTensor]]:
    """Every layer's tensors, numbered from the first layer on."""
    numbers = itertools.count()
    return [
        [
            RoutedTensor(next(numbers), name, shape, router.choose(name, shape, "float32"))
            for name, shape in layer.shapes.items()
        ]
        for layer in network.layers
    ]


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
        network: the network, with float32 gradients.
        computation: the computation of the network's layers for a rank's batch.
        router: the router that chooses each tensor's route, as in training.
        speeds: the speeds of the codecs.
        cluster: the ranks and links.
        overlap: whether the exchange starts during the backward pass; otherwise, it starts afterwards.
        bits: the bits in an element's code, as in :class:`~hvd_compress.exchanges.steps.Gradient`.
    """
    costs: list[Cost] = []
    transfers, now = _backward(network, computation, router, speeds, cluster, costs, bits)
    if not overlap:
        for transfer in transfers:
            transfer.ready = now
    for arrival, transfer in carry(transfers, cluster, costs):
        now = max(now, arrival)
        if transfer.due:
            costs.append(transfer.compute())
            now += costs[-1].total
    return StepTime(now + computation.optimizer, computation.seconds, sum_of(costs))


def _backward(
    network: Network,
    computation: Computation,
    router: Router,
    speeds: Speeds,
    cluster: Cluster,
    costs: list[Cost],
    bits: float | None,
) -> tuple[list[Transfer], float]:
    """Does the forward pass, the backward pass and the encoders; returns the transfers and the end time."""
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
                costs.append(transfer.compute())
                now += costs[-1].total
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
    """The buckets of tensors that are sent together, in the order of the backward pass, as in training.

    Each uncompressed tensor is in a bucket of its own, as Horovod itself may fuse these tensors later.
    """
    kinds: dict[str, dict[int, RoutedTensor]] = {}
    for tensor in tensors:
        if tensor.route.uncompressed:
            yield [tensor]
        else:
            kinds.setdefault(tensor.route.kind, {})[tensor.number] = tensor
    for kind in kinds.values():
        sizes = [(number, math.prod(tensor.shape)) for number, tensor in kind.items()]
        for numbers in buckets.compose(sizes):
            yield [kind[number] for number in numbers]
