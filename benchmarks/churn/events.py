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

MOST = 4
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


def kill(scene: Scene) -> bool:
    """Kills a rank by SIGKILL, whose host another one replaces. Returns whether ranks change."""
    victim = scene.chance.choice(scene.latest)
    scene.job.change(add=1, remove=[victim.host])
    os.kill(victim.process, signal.SIGKILL)
    return True


def stop(scene: Scene) -> bool:
    """Stops a rank for a while by SIGSTOP; ranks stay as they are."""
    victim = scene.chance.choice(scene.latest)
    os.kill(victim.process, signal.SIGSTOP)
    time.sleep(scene.chance.uniform(*PAUSE))
    os.kill(victim.process, signal.SIGCONT)
    return False


def add(scene: Scene) -> bool:
    """Has another host be found, or, where there are many, one no more."""
    if len(scene.latest) >= MOST:
        return remove(scene)
    scene.job.change(add=1)
    return True


def remove(scene: Scene) -> bool:
    """Has a host be found no more, or, where there are two, another one."""
    if len(scene.latest) <= 2:
        return add(scene)
    scene.job.change(remove=[scene.chance.choice(scene.latest).host])
    return True


EVENTS: dict[str, Callable[[Scene], bool]] = {
    "kill": kill,
    "add": add,
    "stop": stop,
    "remove": remove,
}
