"""Profiles with the rates at which one rank trains named networks, each number with its source.

A profile is a JSON file in the folder ``machines``, which :func:`load` reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.predict.hardware import CPU, GPU, Profile
from benchmarks.predict.layers import Network
from benchmarks.predict.step import Computation
from hvd_compress.planner.machines import Link

_FOLDER = Path(__file__).parent / "machines"


@dataclass(frozen=True)
class Rate:
    """The rate at which one rank trains a network alone.

    Attributes:
        batch: the profile's number of images per rank and step.
        measured_batch: the number of images per step in the measurement of the rate.
        images_per_second: the measured rate.
    """

    batch: int
    measured_batch: int
    images_per_second: float


@dataclass(frozen=True)
class RatedProfile(Profile):
    """A kind of machine whose rates are known.

    Attributes:
        rates: the rates of networks by name.
        sources: the sources of the profile's numbers.
    """

    rates: Mapping[str, Rate]
    sources: Mapping[str, str]

    def rated(self, network: Network, batch: float) -> Computation:
        """The computation of a rank in a step with ``batch`` images, by the profile's rate.

        Raises:
            ValueError: the profile has no rate for the network.
        """
        if network.name not in self.rates:
            raise ValueError(
                f"profile {self.name}: expected one of {', '.join(self.rates)}, got {network.name!r}; "
                f"give the seconds of a step"
            )
        rate = self.rates[network.name]
        seconds = rate.measured_batch / rate.images_per_second
        return self.computation(network, seconds, batch / rate.measured_batch)


def names() -> list[str]:
    """The names of all profiles."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def load(name: str) -> RatedProfile:
    """The profile with the given name.

    Raises:
        ValueError: there is no such profile.
    """
    if name not in names():
        raise ValueError(f"profile: expected one of {', '.join(names())}, got {name!r}")
    data = json.loads((_FOLDER / f"{name}.json").read_text())
    rates = data["networks"]
    parts = ("between", "within", "start", "memory", *(["codecs"] if "codecs" in data else []))
    return RatedProfile(
        name=name,
        title=data["title"],
        local=data["local"],
        between=_link(data["between"]),
        within=_link(data["within"]),
        start=data["start"]["seconds"],
        memory=data["memory"]["bandwidth"],
        speeds=CPU.speeds if "codecs" in data else (),
        rates={
            network: Rate(rate["batch"], rate["measured_batch"], rate["images_per_second"])
            for network, rate in rates.items()
        },
        sources={
            "machines": data["source"],
            **{part: data[part]["source"] for part in parts},
            **{network: rate["source"] for network, rate in rates.items()},
        },
    )


def _link(data: Mapping[str, Any]) -> Link:
    return Link(data["bandwidth"], data["latency"])


PROFILES = {name: load(name) for name in names()} | {
    one.name: RatedProfile(**vars(one), rates={}, sources={}) for one in (CPU, GPU)
}
"""All profiles by name."""
