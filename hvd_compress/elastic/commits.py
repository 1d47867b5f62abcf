"""A compressor's commits, and their use after ranks were added or removed.

A rank's *unsent* gradients are the numbers that it still has to add to the sum of all ranks' gradients: its
residual, and its debt as the owner of parts. ``1 / K`` of them is their weight in the average, which is
kept.
"""

from __future__ import annotations

import dataclasses
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_compress.ranks.values import records

_log = logging.getLogger("hvd_compress.elastic")

Positions = Sequence[tuple[int, ...]]
"""The positions in the noise, for each gradient: the number of steps made of each kind."""


@dataclass(frozen=True, eq=False)
class Commit:
    """A rank's part of a commit.

    Attributes:
        place: the rank, and the number of ranks.
        positions: the gradients' positions in the noise.
        names: the names of the gradients.
        sizes: the number of elements of each gradient.
        state: the framework's own state, copied.
        norms: the norm of each rank's unsent gradients, by rank; empty where ranks have not exchanged them.
        total: the sum of all ranks' unsent gradients, shape=(elements of all,), float32; None where they
            have not been added up.
    """

    place: tuple[int, int]
    positions: Positions
    names: Sequence[str]
    sizes: Sequence[int]
    state: Any
    norms: Sequence[float] = ()
    total: np.ndarray | None = None


@dataclass(frozen=True)
class _Told:
    """The data that ranks send each other before they continue.

    Attributes:
        place: the place of a rank's commit; None if it has made none.
        shared: whether its commit has a total.
        positions: the positions of its commit, or the current ones; empty where the rank does not know its
            gradients yet.
        names: the names of the gradients, if the rank knows them.
        sizes: the number of elements of each gradient, if the rank knows them.
    """

    place: tuple[int, int] | None
    shared: bool
    positions: Positions
    names: Sequence[str]
    sizes: Sequence[int]


class Commits(ABC):
    """The commits of one compressor: the part of each framework, and the part that all have in common."""

    _begun: Commit  # The state before the first commit, set by a framework's class.

    def __init__(self) -> None:
        self._last: Commit | None = None
        self._next: Commit | None = None

    @abstractmethod
    def take(self) -> Commit:
        """This rank's part of a commit of its current state."""

    @property
    @abstractmethod
    def place(self) -> tuple[int, int]:
        """The compressor's rank, and the number of ranks."""

    def _comparable(self, names: Sequence[str]) -> list[str]:
        """The names of gradients as far as they are the same on all ranks."""
        return list(names)

    @abstractmethod
    def _unsent(self, commit: Commit) -> np.ndarray:
        """The numbers a rank has yet to add to the sum of all ranks' gradients, shape=(n,), float32."""

    @abstractmethod
    def _gather(self, value: Any, what: str) -> list[Any]:
        """Every rank's value, fit for JSON, in the order of ranks."""

    @abstractmethod
    def _sum(self, numbers: np.ndarray) -> np.ndarray:
        """The sum over all ranks, shape=(n,), float32."""

    @abstractmethod
    def _go_back(self, commit: Commit, positions: Positions) -> None:
        """Restores the compressor from a commit that it made in the same place."""

    @abstractmethod
    def _begin_with(
        self, names: Sequence[str], parts: Sequence[np.ndarray], positions: Positions
    ) -> None:
        """Gives the compressor the unsent part of each gradient, as residuals, and its positions."""

    def take_together(self, share: bool) -> Commit:
        """The same as :meth:`take`, with data that the ranks exchange; all of them call it.

        Args:
            share: whether they add up their unsent gradients.
        """
        commit = self.take()
        own = self._unsent(commit)
        norm = float(np.sqrt(np.einsum("i,i->", own, own, dtype=np.float64)))
        norms = self._gather(norm, "norms")
        total = self._sum(own) if share else None
        return dataclasses.replace(commit, norms=norms, total=total)

    def keep(self, commit: Commit) -> None:
        """Makes a commit the last one."""
        self._last = self._next = commit

    def hand_over(self) -> None:
        """Takes a commit with a total, to continue from; all ranks call it before some of them leave."""
        self._next = self.take_together(share=True)

    def forget(self) -> None:
        """Forgets the commit of :meth:`hand_over`: ranks go back to the last commit."""
        self._next = self._last

    def restore(self) -> None:
        """Goes back to the last commit, or to the beginning."""
        self.forget()
        commit = self._last or self._begun
        self._go_back(commit, commit.positions)

    def settle(self) -> None:
        """Gives this rank its first state; called by all ranks, whose compressors have their places.

        Where no rank has committed anything, nothing changes.

        Raises:
            ValueError: ranks have different gradients; raised on every rank.
        """
        commit = self._next
        now = self.take() if commit is None else commit
        told = self._gather(
            _Told(
                None if commit is None else commit.place,
                commit is not None and commit.total is not None,
                now.positions,
                now.names,
                now.sizes,
            ),
            "places",
        )
        told = records(_Told, told)
        before = {rank: one.place for rank, one in enumerate(told) if one.place is not None}
        if not before:
            return
        stayed = min(before)
        names, sizes = told[stayed].names, told[stayed].sizes
        wanted = self._comparable(names)
        for rank, one in enumerate(told):
            if one.names and self._comparable(one.names) != wanted:
                raise ValueError(
                    f"expected the gradients of rank {stayed}'s last commit on every rank, "
                    f"{list(names)}, got {list(one.names)} on rank {rank}: every rank must train the same "
                    f"model"
                )
        known = [one.positions for one in told if one.positions]
        positions = [
            tuple(map(max, zip(*every, strict=True))) for every in zip(*known, strict=True)
        ]
        old = before[stayed][1]
        lost = sorted(set(range(old)) - {rank for rank, _ in before.values()})
        if commit is not None and not lost and commit.place == self.place:
            self._go_back(commit, positions)
        else:
            own = np.zeros(sum(sizes), np.float32) if commit is None else self._unsent(commit)
            missing = None
            if lost and all(told[rank].shared for rank in before):
                first = self.place[0] == stayed
                missing = self._missing(commit if first else None, own)
            if lost and commit is not None and self.place[0] == stayed:
                _report(commit, lost, missing is not None)
            unsent = own * np.float32(self.place[1] / old)
            if missing is not None:
                unsent += missing * np.float32(1 / old)
            own_names = names if commit is None else commit.names
            self._begin_with(own_names, np.split(unsent, np.cumsum(sizes)[:-1]), positions)

    def _missing(self, commit: Commit | None, own: np.ndarray) -> np.ndarray:
        """The unsent gradients of lost ranks: the total, which the remaining ranks know, minus their own.

        ``commit`` is that of one of the remaining ranks; None on the others.
        """
        if commit is not None:
            assert commit.total is not None
            own = own - commit.total
        return -self._sum(own)


def _report(commit: Commit, lost: Sequence[int], shared: bool) -> None:
    if shared:
        what = "is shared out among all ranks"
    else:
        what = "is missing from training; share_residuals=True of the elastic state would keep it"
    norms = [commit.norms[rank] for rank in lost] if commit.norms else []
    norm = f"{sum(n**2 for n in norms) ** 0.5:.6g}" if norms else "unknown"
    level = logging.INFO if shared else logging.WARNING
    _log.log(
        level,
        "ranks %s of %d are gone; what they had not sent at the last commit, of norm %s, %s",
        list(lost),
        commit.place[1],
        norm,
        what,
    )
