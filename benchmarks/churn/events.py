"""What happens to a job: ranks are killed and stopped, hosts come and go."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.churn.elastic_job import ElasticJob
from benchmarks.churn.reports import Report

PAUSE = (0.5, 3.0)
"""The shortest and the longest seconds for which a rank is stopped."""

FEWEST, MOST = 2, 4
"""Hosts."""


@dataclass(frozen=True)
class Scene:
    """A job at the moment of an event.

    Attributes:
        job: as it runs.
        latest: the last report of each rank of the present run, by rank.
        chance: random numbers.
    """

    job: ElasticJob
    latest: list[Report]
    chance: random.Random


def kill(scene: Scene) -> None:
    """Kills a rank by SIGKILL, whose host another one replaces."""
    victim = scene.chance.choice(scene.latest)
    scene.job.change(add=1, remove=[victim.host])
    os.kill(victim.process, signal.SIGKILL)


def stop(scene: Scene) -> None:
    """Stops a rank for a while by SIGSTOP."""
    victim = scene.chance.choice(scene.latest)
    os.kill(victim.process, signal.SIGSTOP)
    time.sleep(scene.chance.uniform(*PAUSE))
    os.kill(victim.process, signal.SIGCONT)


def add(scene: Scene) -> None:
    """Has another host be found."""
    scene.job.change(add=1)


def remove(scene: Scene) -> None:
    """Has a host be found no more."""
    scene.job.change(remove=[scene.chance.choice(scene.latest).host])


@dataclass(frozen=True)
class Event:
    """What can happen to a job.

    Attributes:
        happen: does it.
        change: of the number of hosts.
    """

    happen: Callable[[Scene], None]
    change: int = 0


EVENTS: dict[str, Event] = {
    "kill": Event(kill),
    "stop": Event(stop),
    "add": Event(add, +1),
    "remove": Event(remove, -1),
}


def shuffled(chance: random.Random, hosts: int) -> list[str]:
    """All kinds of events in an order in which they can happen, where there are so many hosts at first."""
    order: list[str] = []
    left = chance.sample(list(EVENTS), len(EVENTS))
    while left:
        kind = next(kind for kind in left if FEWEST <= hosts + EVENTS[kind].change <= MOST)
        left.remove(kind)
        order.append(kind)
        hosts += EVENTS[kind].change
    return order
