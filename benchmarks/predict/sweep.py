"""Jobs on machines with known rates, with weak and strong scaling, and the best number of workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.predict.jobs import Job
from benchmarks.predict.layers import Network
from benchmarks.predict.profiles import RatedProfile
from benchmarks.predict.step import Computation
from hvd_compress.exchanges.routing import Route

Scaling = Literal["weak", "strong"]


@dataclass(frozen=True)
class StrongJob(Job):
    """A job in which more workers mean fewer images for each; ``batch`` is the images of all workers."""

    profile: RatedProfile

    def images(self, workers: int) -> float:
        """The images per worker and step."""
        return self.batch / workers

    def computation(self, workers: int) -> Computation:
        """The computation of a worker's step."""
        return self.profile.rated(self.network, self.images(workers))


def job(
    network: Network,
    profile: RatedProfile,
    *,
    batch: int | None = None,
    seconds: float | None = None,
    scaling: Scaling = "weak",
    **options: Any,
) -> Job:
    """A job with the profile's rate, or with a measured step.

    Args:
        network: the network.
        profile: the machines.
        batch: the images per step: of each worker in weak scaling, of all workers in strong scaling; None
            means the profile's.
        seconds: the measured seconds of a step of one worker alone with ``batch`` images; None means the
            profile's rate.
        scaling: whether more workers mean more images per step (weak) or fewer images for each (strong).
        options: further fields of :class:`~benchmarks.predict.jobs.Job`.

    Raises:
        ValueError: something is missing, or there are seconds in strong scaling.
    """
    if scaling == "strong" and seconds is not None:
        raise ValueError("seconds of a step: expected weak scaling, got strong")
    missing = []
    if network.name not in profile.rates and seconds is None:
        missing.append("--compute: expected the time of a step without exchange, such as 120ms")
    if network.name not in profile.rates and batch is None:
        missing.append("--batch: expected images of a step, such as 32")
    if missing:
        said = ", got none; ".join(missing)
        raise ValueError(f"{said}, got none, for {network.name} on {profile.name}")
    images = profile.rates[network.name].batch if batch is None else batch
    alone = (
        profile.rated(network, images) if seconds is None else profile.computation(network, seconds)
    )
    made = StrongJob if scaling == "strong" else Job
    return made(network, profile, alone, images, **options)


def optimal_workers(job: Job, route: Route, limit: int) -> int:
    """The number of workers that keeps both the processors and the wire busy (1-bit SGD, equation 3).

    The job should use strong scaling. The result is a number of whole machines' workers, up to ``limit``.
    """
    full = job.profile.local
    machines = balanced_workers(
        lambda n: job.step(route, n * full).computation,
        lambda n: job.step(route, n * full).exchange.wire,
        max(1, limit // full),
    )
    return machines * full


def balanced_workers(
    computation: Callable[[int], float], communication: Callable[[int], float], limit: int
) -> int:
    """Solves 1-bit SGD's equation 3 for costs that both depend on the number of workers.

    With fewer workers, the network waits for the computation; with more, the computation waits for the
    network.

    Args:
        computation: a function from the number of workers to seconds, which decreases.
        communication: a function from the number of workers to seconds, which does not decrease.
        limit: the largest number to consider.

    Returns:
        The largest number of workers up to ``limit`` with ``computation >= communication``; 1 if there
        is none.
    """
    low, high = 1, limit
    while low < high:
        middle = (low + high + 1) // 2
        if computation(middle) >= communication(middle):
            low = middle
        else:
            high = middle - 1
    return low
