"""A compressor's states in a checkpoint of torch.distributed.checkpoint."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from hvd_compress.codecs.calls import expect_instance
from hvd_compress.fsdp.compressor import Compressor
from hvd_compress.process_group.values import state_bytes, state_from


class RankStates:
    """The states of all ranks, each under the rank's number: ``dcp.save({"compressor": RankStates(c)})``.

    torch.distributed.checkpoint treats tensors with the same name on several ranks as copies of each other,
    which residuals are not. So each rank's state is saved as one object with its own name.

    Args:
        compressor: this rank's compressor.
        saved_ranks: the number of ranks that saved the checkpoint to be loaded, if it differs from the
            current number.

    Raises:
        TypeError: the argument is not a compressor.
    """

    def __init__(self, compressor: Compressor, saved_ranks: int | None = None) -> None:
        expect_instance("RankStates", compressor, Compressor, "RankStates({})")
        self._compressor = compressor
        self._resized = saved_ranks is not None
        ranks = [dist.get_rank()] if saved_ranks is None else range(saved_ranks)
        self._names = [f"rank {rank}" for rank in ranks]

    def state_dict(self) -> dict[str, Any]:
        """This rank's state; with ``saved_ranks``, under the names of all ranks to be loaded."""
        return dict.fromkeys(self._names, state_bytes(self._compressor.state_dict()))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where the ranks stopped.

        Raises:
            ValueError: the same as from the compressor's ``load_state_dict`` and ``load_resized``.
        """
        states = [state_from(state[name]) for name in self._names]
        if self._resized:
            self._compressor.load_resized(states)
        else:
            self._compressor.load_state_dict(states[0])
