"""The ranks' progress, and the choice of the ranks that have the latest common parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Counts = tuple[int, int]
"""The number of a fragment's exchanges whose average was used, and of those that were dropped."""


@dataclass(frozen=True)
class Progress:
    """A rank's progress, which ranks tell each other when they form a new group.

    Attributes:
        settings: the settings that have to be the same on every rank.
        group: the name of the group that the rank comes from; None if it comes from no group.
        offered: a name for the new group; the group takes the first rank's.
        steps: the number of training steps.
        history: the exchanges of each fragment, by the name of the group in which they were made.
        begins: for a new rank, a digest of its common parameters; otherwise empty.
        to_send: the parameters that the rank sends in the next exchanges, by name; see
            :attr:`~hvd_compress.diloco.fragments.Fragment.to_send`.
    """

    settings: Mapping[str, Any]
    group: str | None
    offered: str
    steps: int
    history: Mapping[str, Sequence[Counts]] = field(default_factory=dict)
    begins: str = ""
    to_send: Mapping[str, bool] = field(default_factory=dict)

    @property
    def new(self) -> bool:
        """Whether the rank does not have the common parameters of any group yet."""
        return not self.history

    def total(self, fragment: int) -> int:
        """The number of a fragment's exchanges in all groups."""
        return sum(sum(counts[fragment]) for counts in self.history.values())

    def ended(self, other: Progress, fragment: int) -> Counts:
        """The exchanges in this rank's group that another rank completed and this rank did not."""
        if self.group is None:
            return 0, 0
        mine = self.history[self.group][fragment]
        theirs = other.history.get(self.group)
        used, dropped = mine if theirs is None else theirs[fragment]
        return used - mine[0], dropped - mine[1]


def sources(told: Sequence[Progress], fragments: int) -> list[int]:
    """For each fragment, the rank whose common parameters all other ranks take.

    This is the rank with the most exchanges; among equals, the first one that is not new.
    """

    def reached(rank: int, fragment: int) -> tuple[int, bool, int]:
        return told[rank].total(fragment), not told[rank].new, -rank

    return [
        max(range(len(told)), key=lambda rank: reached(rank, fragment))
        for fragment in range(fragments)
    ]


def behind(told: Sequence[Progress], chosen: Sequence[int], rank: int) -> list[int]:
    """The fragments whose latest common parameters a rank does not have.

    New ranks that begin with the same common parameters keep the training that they have done since.

    Args:
        told: the progress of each rank.
        chosen: for each fragment, the rank that has the latest parameters.
        rank: the rank.
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


def all_to_send(told: Sequence[Progress]) -> dict[str, bool]:
    """The parameters that some rank has to send; a new rank sends what the others do.

    A new rank has the common parameters, and may not know yet which ones are frozen.
    """
    found: dict[str, bool] = {}
    for one in [one for one in told if not one.new] or told:
        for name, loaded in one.to_send.items():
            found[name] = loaded or found.get(name, False)
    return found


def merged(told: Sequence[Progress], chosen: Sequence[int]) -> dict[str, list[Counts]]:
    """The history of the parameters that come from the chosen ranks, one for each fragment."""
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
