"""What ranks commit of a compressor, and what becomes of it when ranks have come or gone.

A rank's *unsent* gradients are what it would still add to the sum of all ranks' gradients: its residual,
and what it owes as the owner of parts. ``1 / K`` of it is its part in the average, which is kept.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import horovod.torch as hvd
import torch

from hvd_compress.torch.compressor import Compressor
from hvd_compress.torch_common.slots import Slot
from hvd_compress.torch_common.state import restore, snapshot

_log = logging.getLogger("hvd_compress.torch.elastic")


@dataclass(frozen=True, eq=False)
class Commit:
    """A rank's part of a commit.

    Attributes:
        state: as :func:`hvd_compress.torch_common.state.snapshot` gives it, copied.
        norms: of what each rank has not sent, by rank; empty where ranks have not told each other.
        total: what all ranks together have not sent, shape=(elements of the model,), float32; None where
            they have not added it up.
    """

    state: dict[str, Any]
    norms: Sequence[float] = ()
    total: torch.Tensor | None = None

    @property
    def place(self) -> tuple[int, int]:
        """The rank, and how many there were."""
        return self.state["rank"], self.state["size"]


class Commits:
    """The commits of one compressor.

    Args:
        compressor: this rank's, among all ranks of the job.

    Attributes:
        compressor: as given.

    Raises:
        ValueError: it has a process set, or an owner step.
    """

    def __init__(self, compressor: Compressor) -> None:
        if compressor._process_set not in (None, hvd.global_process_set):
            raise ValueError(
                "TorchState: expected a compressor with process_set=None, got one with a process set, "
                "which a reset makes invalid"
            )
        if compressor._owner_step is not None:
            raise ValueError(
                "TorchState: expected a compressor without owner_step, got one whose state would be lost "
                "with the rank that owns it"
            )
        self.compressor = compressor
        self._begun = self.take()
        self._last: Commit | None = None
        self._next: Commit | None = None

    def take(self) -> Commit:
        """This rank's state as it is now."""
        compressor = self.compressor
        compressor._expect_idle("commit")
        compressor._kernels.settle()
        slots, seed = compressor._slots, compressor._seed
        return Commit(copy.deepcopy(snapshot(slots, compressor._rank, compressor._size, seed)))

    def unsent(self) -> dict[str, torch.Tensor]:
        """What this rank would still add to the sum of all ranks' gradients.

        Returns:
            By name of the parameter, each of shape=(n,), float32.
        """
        slots = self._slots
        parts = _unsent(slots, self.take().state).split([slot.count for slot in slots])
        return {slot.name: part for slot, part in zip(slots, parts, strict=True)}

    def take_together(self, share: bool) -> Commit:
        """The same, with what the ranks tell each other; all of them come here.

        Args:
            share: whether they add up what they have not sent.
        """
        state = self.take().state
        own = _unsent(self._slots, state)
        norm = torch.linalg.vector_norm(own, dtype=torch.float64).reshape(1)
        norms = hvd.allgather(norm, name=self._called("norms")).tolist()
        return Commit(state, norms, self._sum(own) if share else None)

    def keep(self, commit: Commit) -> None:
        """Has a commit be the last one."""
        self._last = self._next = commit

    def hand_over(self) -> None:
        """Called by all ranks before some of them leave."""
        self._next = self.take_together(share=True)

    def restore(self) -> None:
        """Goes back to the last commit, or to the beginning, and forgets the step under way."""
        commit = self._last or self._begun
        self._next = self._last
        restore(self._slots, commit.state, *commit.place, commit.state["seed"])

    def settle(self) -> None:
        """Gives this rank what it begins with; called by all ranks, whose compressors have their places.

        Where no rank has committed anything, nothing changes.
        """
        commit, compressor = self._next, self.compressor
        place = None if commit is None else commit.place
        shared = commit is not None and commit.total is not None
        state = (self._begun if commit is None else commit).state
        positions = [(saved["step"], saved["exchanges"]) for saved in state["tensors"].values()]
        told = hvd.allgather_object((place, shared, positions), name=self._called("places"))
        stayed = [rank for rank, (before, _, _) in enumerate(told) if before is not None]
        if not stayed:
            return
        old = told[stayed[0]][0][1]
        lost = sorted(set(range(old)) - {told[rank][0][0] for rank in stayed})
        own = None if commit is None else _unsent(self._slots, commit.state)
        missing = None
        if lost and all(told[rank][1] for rank in stayed):
            missing = self._missing(own, compressor._rank == stayed[0])
        if lost and commit is not None and compressor._rank == stayed[0]:
            self._report(commit, lost, missing is not None)
        if commit is not None and not lost and commit.place == (compressor._rank, compressor._size):
            restore(self._slots, commit.state, *commit.place, commit.state["seed"])
        else:
            self._begin_with(own, missing, old)
        agreed = [
            tuple(map(max, zip(*every, strict=True)))
            for every in zip(*(p for _, _, p in told), strict=True)
        ]
        for slot, (step, exchanges) in zip(self._slots, agreed, strict=True):
            slot.step, slot.exchanges = step, exchanges

    @property
    def _slots(self) -> list[Slot]:
        return list(self.compressor._slots)

    def _called(self, what: str) -> str:
        return f"{self.compressor._prefix}.commit.{what}"

    def _sum(self, numbers: torch.Tensor) -> torch.Tensor:
        return hvd.allreduce(numbers, op=hvd.Sum, name=self._called("unsent"))

    def _missing(self, own: torch.Tensor | None, first: bool) -> torch.Tensor:
        """What lost ranks have not sent: the total, which ranks that stayed know, without their own."""
        if own is None:
            own = torch.zeros(sum(slot.count for slot in self._slots))
        elif first:
            assert self._next is not None and self._next.total is not None
            own = own - self._next.total
        return -self._sum(own)

    def _begin_with(self, own: torch.Tensor | None, missing: torch.Tensor | None, old: int) -> None:
        """Makes residuals of what this rank, and what lost ranks among ``old`` had not sent."""
        slots, unsent = self._slots, torch.zeros(0)
        if own is not None:
            unsent = own * (self.compressor._size / old)
        if missing is not None:
            share = missing / old
            unsent = unsent + share if own is not None else share
        parts = unsent.split([slot.count for slot in slots]) if len(unsent) else [None] * len(slots)
        for slot, part in zip(slots, parts, strict=True):
            slot.forget()
            slot.owned = None
            if part is not None and bool(part.any()):
                slot.residual, slot.residual_scale = part.clone(), 1.0

    def _report(self, commit: Commit, lost: Sequence[int], shared: bool) -> None:
        if shared:
            what = "is shared out among all ranks"
        else:
            what = "is missing from training; TorchState(..., share_residuals=True) would keep it"
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


def _unsent(slots: Sequence[Slot], state: dict[str, Any]) -> torch.Tensor:
    """What a rank would still add to the sum of all ranks' gradients, parameter after parameter."""
    sums = []
    for slot in slots:
        saved = state["tensors"][slot.name]
        total = torch.zeros(slot.count)
        if saved["residual"] is not None:
            total += saved["residual"].cpu() / saved["residual_scale"]
        owned = saved["owned"]
        if owned is not None and owned["residual"] is not None:
            factor = owned["weight"] / owned["residual_scale"]
            total[owned["begin"] : owned["end"]] += owned["residual"].cpu() * factor
        sums.append(total)
    return torch.cat(sums)
