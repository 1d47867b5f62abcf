"""Throughput over the number of workers, for codecs and exchanges on one kind of machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hvd_compress.exchanges.routing import DEFAULT_THRESHOLD, Route, Router
from hvd_compress.perfmodel.cost import refusal
from hvd_compress.perfmodel.networks import Network
from hvd_compress.perfmodel.profiles import Profile
from hvd_compress.perfmodel.step import StepTime, predict, tensors_of

Scaling = Literal["weak", "strong"]


@dataclass(frozen=True)
class Job:
    """What is trained, on what.

    Attributes:
        network: the network.
        profile: the machines.
        batch: images a step: of each worker in weak scaling, of all together in strong scaling.
        scaling: whether more workers mean more images a step (weak), or fewer for each (strong).
        seconds: of a step of one worker alone with ``batch`` images, if measured.
        overlap: whether the exchange starts during the backward pass.
        threshold: tensors of fewer elements are left to Horovod.
        bits: of an element's code, where payloads vary in length; None is what normally distributed
            gradients take.
    """

    network: Network
    profile: Profile
    batch: int
    scaling: Scaling = "weak"
    seconds: float | None = None
    overlap: bool = True
    threshold: int = DEFAULT_THRESHOLD
    bits: float | None = None

    def images(self, workers: int) -> float:
        """Images of a worker and step."""
        return self.batch if self.scaling == "weak" else self.batch / workers

    def step(self, route: Route, workers: int) -> StepTime:
        """The predicted step of so many workers."""
        profile = self.profile
        if self.seconds is not None and self.scaling == "strong":
            raise ValueError("seconds of a step: expected weak scaling, got strong")
        computation = profile.computation(self.network, self.images(workers), seconds=self.seconds)
        return predict(
            self.network,
            computation,
            Router(route, self.threshold),
            profile.speed,
            profile.cluster(workers),
            overlap=self.overlap,
            bits=self.bits,
        )

    def refused(self, route: Route, workers: int) -> str | None:
        """Why the exchange would refuse the network's largest tensor among so many workers, or None."""
        layers = tensors_of(self.network, Router(route, self.threshold))
        largest = max(
            (tensor for layer in layers for tensor in layer), key=lambda t: math.prod(t.shape)
        )
        cluster = self.profile.cluster(workers)
        return refusal(largest.name, largest.shape, largest.route, cluster)


@dataclass(frozen=True)
class Row:
    """One prediction.

    Attributes:
        codec: with its settings.
        exchange: ``allreduce`` for what Horovod reduces itself.
        workers, hosts, local: how many ranks, on how many machines, how many on each.
        images: of a worker and step.
        step: its predicted times.
        speedup: in images a second, over one worker.
        refused: why the exchange would not run, or None.
    """

    codec: str
    exchange: str
    workers: int
    hosts: int
    local: int
    images: float
    step: StepTime
    speedup: float
    refused: str | None

    @property
    def images_per_second(self) -> float:
        """Of all workers."""
        return self.workers * self.images / self.step.seconds

    def to_json(self) -> dict[str, Any]:
        """As JSON types; seconds and bytes."""
        return {
            "codec": self.codec,
            "exchange": self.exchange,
            "workers": self.workers,
            "hosts": self.hosts,
            "ranks_per_host": self.local,
            "images_per_worker": self.images,
            "seconds": self.step.seconds,
            "computation_seconds": self.step.computation,
            "encode_seconds": self.step.encode,
            "wire_seconds": self.step.wire,
            "decode_seconds": self.step.decode,
            "wire_bytes": self.step.wire_bytes,
            "images_per_second": self.images_per_second,
            "speedup": self.speedup,
            "refused": self.refused,
        }


def sweep(job: Job, routes: Sequence[Route], workers: Sequence[int]) -> list[Row]:
    """Predicts every route with every number of workers.

    Raises:
        ValueError: workers that do not fill machines, or no rate for that network.
    """
    return [row for route in routes for row in _of_route(job, route, workers)]


def optimal_workers(job: Job, route: Route, limit: int) -> int:
    """How many workers keep both the processors and the wire busy: 1-bit SGD, equation 3.

    Strong scaling; whole machines, as many as there are workers at most ``limit``.
    """
    full = job.profile.local
    machines = balanced_workers(
        lambda n: job.step(route, n * full).computation,
        lambda n: job.step(route, n * full).wire,
        max(1, limit // full),
    )
    return machines * full


def balanced_workers(
    computation: Callable[[int], float], communication: Callable[[int], float], limit: int
) -> int:
    """Solves 1-bit SGD's equation 3 for costs that both depend on the number of workers.

    With fewer workers than that the network waits for the computation, with more the computation waits
    for the network.

    Args:
        computation: seconds for a number of workers; falls with it.
        communication: seconds for a number of workers; does not fall.
        limit: the largest number to consider.

    Returns:
        The largest number of workers up to ``limit`` with ``computation >= communication``; 1 where
        there is none.
    """
    low, high = 1, limit
    while low < high:
        middle = (low + high + 1) // 2
        if computation(middle) >= communication(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _of_route(job: Job, route: Route, workers: Sequence[int]) -> Iterator[Row]:
    alone = job.images(1) / job.step(route, 1).seconds
    for count in workers:
        cluster, step = job.profile.cluster(count), job.step(route, count)
        rate = count * job.images(count) / step.seconds
        yield Row(
            codec=str(route.codec),
            exchange="allreduce" if route.uncompressed else route.exchange,
            workers=count,
            hosts=cluster.hosts,
            local=cluster.local,
            images=job.images(count),
            step=step,
            speedup=rate / alone,
            refused=job.refused(route, count),
        )
