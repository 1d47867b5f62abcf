"""How far ranks have come, and who of them has the latest common parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Counts = tuple[int, int]
"""Exchanges of a fragment whose average was used, and those that were dropped."""


@dataclass(frozen=True)
class Progress:
    """What ranks tell each other when they meet.

    Attributes:
        settings: what has to be the same on every rank, serialized.
        group: a name of the group that the rank comes from; None if it comes from none.
        offered: a name for the new group, which the first rank's is.
        steps: of training.
        history: exchanges of each fragment, by the name of the group in which they were made.
        begins: where the rank is new, a digest of its common parameters; nothing otherwise.
    """

    settings: str
    group: str | None
    offered: str
    steps: int
    history: Mapping[str, Sequence[Counts]] = field(default_factory=dict)
    begins: str = ""

    @property
    def new(self) -> bool:
        """Whether the rank has common parameters of no group yet."""
        return not self.history

    def total(self, fragment: int) -> int:
        """Exchanges of a fragment in all groups."""
        return sum(sum(counts[fragment]) for counts in self.history.values())

    def ended(self, other: Progress, fragment: int) -> Counts:
        """Exchanges in the group of this rank that another rank ended, and this one did not."""
        if self.group is None:
            return 0, 0
        mine = self.history[self.group][fragment]
        theirs = other.history.get(self.group)
        used, dropped = mine if theirs is None else theirs[fragment]
        return used - mine[0], dropped - mine[1]


def sources(told: Sequence[Progress], fragments: int) -> list[int]:
    """For each fragment, the rank whose common parameters all others take.

    The one that has come furthest; among equals, the first one that is not new.
    """

    def reached(rank: int, fragment: int) -> tuple[int, bool, int]:
        return told[rank].total(fragment), not told[rank].new, -rank

    return [
        max(range(len(told)), key=lambda rank: reached(rank, fragment))
        for fragment in range(fragments)
    ]


def behind(told: Sequence[Progress], chosen: Sequence[int], rank: int) -> list[int]:
    """The fragments of which a rank has not the latest common parameters.

    New ranks that begin with the same ones keep what they have learnt since.

    Args:
        told: by rank.
        chosen: for each fragment, the rank that has them.
        rank: whose.
    """
    return [
        fragment
        for fragment, source in enumerate(chosen)
        if rank != source
        and (
            told[rank].begins != told[source].begins
            or told[rank].total(fragment) < told[source].total(fragment)
        )
    ]


def merged(told: Sequence[Progress], chosen: Sequence[int]) -> dict[str, list[Counts]]:
    """The history that belongs to the parameters of those ranks.

    Args:
        told: by rank.
        chosen: a rank for each fragment.
    """
    groups = {name: None for rank in chosen for name in told[rank].history}
    return {
        name: [
            _pair(told[rank].history[name][fragment]) if name in told[rank].history else (0, 0)
            for fragment, rank in enumerate(chosen)
        ]
        for name in groups
    }


def _pair(counts: Sequence[int]) -> Counts:
    used, dropped = counts  # A list, where it has travelled.
    return used, dropped
