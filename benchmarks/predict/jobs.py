"""Predictions of throughput over the number of workers, for codecs and exchanges on one kind of machine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.predict.hardware import Profile
from benchmarks.predict.layers import Network
from benchmarks.predict.step import Computation, StepTime, predict, tensors_of
from hvd_compress.exchanges.routing import DEFAULT_THRESHOLD, Route, Router
from hvd_compress.planner.cost import refusal


@dataclass(frozen=True)
class Job:
    """A network to train, and the machines that train it.

    Attributes:
        network: the network.
        profile: the machines.
        alone: the computation of a worker's step.
        batch: the images per worker and step.
        overlap: whether the exchange starts during the backward pass.
        threshold: the smallest number of elements that is compressed; Horovod reduces smaller tensors.
        bits: the average bits in an element's code, if payloads vary in length; None means those of
            normally distributed gradients.
    """

    network: Network
    profile: Profile
    alone: Computation
    batch: float
    overlap: bool = True
    threshold: int = DEFAULT_THRESHOLD
    bits: float | None = None

    def images(self, workers: int) -> float:
        """The images per worker and step."""
        return self.batch

    def computation(self, workers: int) -> Computation:
        """The computation of a worker's step."""
        return self.alone

    def step(self, route: Route, workers: int) -> StepTime:
        """The predicted time of a step with the given number of workers."""
        return predict(
            self.network,
            self.computation(workers),
            Router(route, self.threshold),
            self.profile.speed,
            self.profile.cluster(workers),
            overlap=self.overlap,
            bits=self.bits,
        )

    def refused(self, route: Route, workers: int) -> str | None:
        """The message with which the exchange would refuse the network's largest tensor, or None."""
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
        codec: the codec with its settings.
        exchange: the exchange; ``allreduce`` for a codec that Horovod reduces itself.
        workers, hosts, local: the numbers of ranks, of machines, and of ranks on each machine.
        images: the images per worker and step.
        step: the predicted times of the step.
        speedup: the images per second, divided by those of one worker.
        refused: the message with which the exchange would refuse to run, or None.
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
        """The images per second of all workers."""
        return self.workers * self.images / self.step.seconds

    def to_json(self) -> dict[str, Any]:
        """The prediction as JSON types, in seconds and bytes."""
        return {
            "codec": self.codec,
            "exchange": self.exchange,
            "workers": self.workers,
            "hosts": self.hosts,
            "ranks_per_host": self.local,
            "images_per_worker": self.images,
            "seconds": self.step.seconds,
            "computation_seconds": self.step.computation,
            "encode_seconds": self.step.exchange.encode,
            "wire_seconds": self.step.exchange.wire,
            "decode_seconds": self.step.exchange.decode,
            "wire_bytes": self.step.exchange.sent,
            "images_per_second": self.images_per_second,
            "speedup": self.speedup,
            "refused": self.refused,
        }


def sweep(job: Job, routes: Sequence[Route], workers: Sequence[int]) -> list[Row]:
    """Predicts every route with every number of workers.

    Raises:
        ValueError: the workers do not fill the machines.
    """
    return [row for route in routes for row in _of_route(job, route, workers)]


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
