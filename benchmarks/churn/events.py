"""The events of a job: ranks are killed and stopped, hosts added and removed."""

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
"""The shortest and the longest time for which a rank is stopped, in seconds."""

FEWEST, MOST = 2, 4
"""The smallest and the largest number of hosts."""


@dataclass(frozen=True)
class Scene:
    """A job at the moment of an event.

    Attributes:
        job: the running job.
        latest: the last report of each rank of the present run, by rank.
        chance: a source of random numbers.
    """

    job: ElasticJob
    latest: list[Report]
    chance: random.Random


def kill(scene: Scene) -> None:
    """Kills a rank by SIGKILL, and replaces its host by another one."""
    victim = scene.chance.choice(scene.latest)
    scene.job.change(add=1, remove=[victim.host])
    os.kill(victim.process, signal.SIGKILL)


def stop(scene: Scene) -> None:
    """Stops a rank by SIGSTOP, and continues it after a while."""
    victim = scene.chance.choice(scene.latest)
    os.kill(victim.process, signal.SIGSTOP)
    time.sleep(scene.chance.uniform(*PAUSE))
    os.kill(victim.process, signal.SIGCONT)


def add(scene: Scene) -> None:
    """Adds a host."""
    scene.job.change(add=1)


def remove(scene: Scene) -> None:
    """Removes a host."""
    scene.job.change(remove=[scene.chance.choice(scene.latest).host])


@dataclass(frozen=True)
class Event:
    """A kind of event.

    Attributes:
        happen: a function that causes the event.
        change: the change of the number of hosts.
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
    """All kinds of events in a random order that keeps the number of hosts permitted, from ``hosts`` on."""
    order: list[str] = []
    left = chance.sample(list(EVENTS), len(EVENTS))
    while left:
        kind = next(kind for kind in left if FEWEST <= hosts + EVENTS[kind].change <= MOST)
        left.remove(kind)
        order.append(kind)
        hosts += EVENTS[kind].change
    return order
