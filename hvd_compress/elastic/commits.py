"""What ranks commit of a compressor, and what becomes of it when ranks have come or gone.

A rank's *unsent* gradients are what it would still add to the sum of all ranks' gradients: its residual,
and what it owes as the owner of parts. ``1 / K`` of it is its part in the average, which is kept.
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


@dataclass(frozen=True, eq=False)
class Commit:
    """A rank's part of a commit.

    Attributes:
        place: the rank, and how many there were.
        positions: in the noise, of each gradient: how often each kind of step was made.
        names: of the gradients.
        sizes: elements of each gradient.
        state: the framework's own, copied.
        norms: of what each rank has not sent, by rank; empty where ranks have not told each other.
        total: what all ranks together have not sent, shape=(elements of all,), float32; None where
            they have not added it up.
    """

    place: tuple[int, int]
    positions: Sequence[tuple[int, ...]]
    names: Sequence[str]
    sizes: Sequence[int]
    state: Any
    norms: Sequence[float] = ()
    total: np.ndarray | None = None


@dataclass(frozen=True)
class _Told:
    """What ranks tell each other before they go on.

    Attributes:
        place: of a rank's commit; None if it has made none.
        shared: whether its commit has a total.
        positions: as of its commit, or as they are now; none where it does not know its gradients yet.
        names: of the gradients, if it knows them.
        sizes: elements of each gradient, if it knows them.
    """

    place: tuple[int, int] | None
    shared: bool
    positions: Sequence[tuple[int, ...]]
    names: Sequence[str]
    sizes: Sequence[int]


class Commits(ABC):
    """The commits of one compressor: what a framework's own class does, and what all of them do with it."""

    def __init__(self) -> None:
        self._last: Commit | None = None
        self._next: Commit | None = None

    @abstractmethod
    def take(self) -> Commit:
        """This rank's part of a commit, of its state as it is now."""

    @property
    @abstractmethod
    def place(self) -> tuple[int, int]:
        """The compressor's rank, and how many there are."""

    @abstractmethod
    def _unsent(self, commit: Commit) -> np.ndarray:
        """What a rank would still add to the sum of all ranks' gradients, shape=(n,), float32."""

    @abstractmethod
    def _gather(self, value: Any, what: str) -> list[Any]:
        """Every rank's value, fit for JSON, by rank."""

    @abstractmethod
    def _sum(self, numbers: np.ndarray) -> np.ndarray:
        """The sum over all ranks, shape=(n,), float32."""

    @abstractmethod
    def _go_back(self, commit: Commit) -> None:
        """Restores the compressor as of a commit that it made in the same place."""

    @abstractmethod
    def _begin_with(self, names: Sequence[str], parts: Sequence[np.ndarray]) -> None:
        """Gives the compressor what is unsent of each gradient, as residuals."""

    @abstractmethod
    def _set_positions(self, names: Sequence[str], positions: Sequence[tuple[int, ...]]) -> None:
        """Gives the compressor its positions in the noise, of each gradient."""

    def take_together(self, share: bool) -> Commit:
        """As :meth:`take`, with what the ranks tell each other; all of them come here.

        Args:
            share: whether they add up what they have not sent.
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
        """Called by all ranks before some of them leave."""
        self._next = self.take_together(share=True)

    def forget(self) -> None:
        """Forgets what was handed over: ranks go back to the last commit."""
        self._next = self._last

    def settle(self) -> None:
        """Gives this rank what it begins with; called by all ranks, whose compressors have their places.

        Where no rank has committed anything, nothing changes.

        Raises:
            ValueError: ranks have different gradients; on every rank.
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
        names, sizes = list(told[stayed].names), told[stayed].sizes
        for rank, one in enumerate(told):
            if one.names and list(one.names) != names:
                raise ValueError(
                    f"expected the gradients of rank {stayed}'s last commit on every rank, {names}, got "
                    f"{list(one.names)} on rank {rank}: every rank must train the same model"
                )
        old = before[stayed][1]
        lost = sorted(set(range(old)) - {rank for rank, _ in before.values()})
        if commit is not None and not lost and commit.place == self.place:
            self._go_back(commit)
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
            self._begin_with(names, np.split(unsent, np.cumsum(sizes)[:-1]))
        known = [one.positions for one in told if one.positions]
        self._set_positions(
            names,
            [tuple(map(max, zip(*every, strict=True))) for every in zip(*known, strict=True)],
        )

    def _missing(self, commit: Commit | None, own: np.ndarray) -> np.ndarray:
        """What lost ranks have not sent: the total, which ranks that stayed know, without their own.

        Args:
            commit: on the rank that speaks for those that stayed; None on the others.
            own: what this rank had not sent.
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
