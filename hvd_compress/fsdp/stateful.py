"""A compressor's states in a checkpoint of torch.distributed.checkpoint."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist

from hvd_compress.codecs.calls import expect_instance
from hvd_compress.fsdp.compressor import Compressor


class RankStates:
    """The states of all ranks, each under the rank's number: ``dcp.save({"compressor": RankStates(c)})``.

    torch.distributed.checkpoint takes tensors of one name on several ranks for copies of one another, and
    residuals are not. So each rank's state is saved as one object with a name of its own.

    Args:
        compressor: this rank's.
        saved_ranks: how many ranks saved the checkpoint that is to be loaded, if it was another number than
            now.

    Raises:
        TypeError: it is no compressor.
    """

    def __init__(self, compressor: Compressor, saved_ranks: int | None = None) -> None:
        expect_instance("RankStates", compressor, Compressor, "RankStates({})")
        self._compressor = compressor
        self._resized = saved_ranks is not None
        ranks = [dist.get_rank()] if saved_ranks is None else range(saved_ranks)
        self._names = [f"rank {rank}" for rank in ranks]

    def state_dict(self) -> dict[str, Any]:
        """This rank's state; with ``saved_ranks``, in the places of all that are to be loaded."""
        file = io.BytesIO()
        torch.save(self._compressor.state_dict(), file)
        return dict.fromkeys(self._names, file.getvalue())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where the ranks left off.

        Raises:
            ValueError: as by the compressor's ``load_state_dict`` and ``load_resized``.
        """
        states = [torch.load(io.BytesIO(state[name]), weights_only=True) for name in self._names]
        if self._resized:
            self._compressor.load_resized(states)
        else:
            self._compressor.load_state_dict(states[0])
