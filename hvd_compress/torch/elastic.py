"""Elastic Horovod with compressed gradients: what a rank has not sent is part of the state."""

from __future__ import annotations

from typing import Any

from horovod.torch import elastic

from hvd_compress.elastic.state import ResidualState
from hvd_compress.torch.commits import TorchCommits
from hvd_compress.torch.compressor import Compressor


class TorchState(ResidualState, elastic.TorchState):
    """The ``hvd.elastic.TorchState`` of an optimizer that compresses gradients.

    Commits hold residuals and positions in the noise in memory, and :meth:`restore` brings them back. After
    a reset, compressors take their places among the new ranks (:meth:`Compressor.rebind`), and :meth:`sync`
    decides what each rank begins with:

    * A rank that stays keeps its residual, with its weight in the ranks' average: multiplied by ``K' / K``
      with ``K'`` ranks after ``K`` (:mod:`hvd_compress.ranks.resize`).
    * A new rank begins with zeros, and with the positions of the others.
    * What lost ranks had not sent at the last commit is shared out evenly among all ranks if it is
      known. It is known where ranks were told to leave, and with ``share_residuals``. Otherwise it is
      missing: a warning of the logger ``hvd_compress.elastic`` names the lost ranks, and the norm of the
      missing gradients.

    A compressor's ``grad_scaler`` may be among the values, as in ``scaler=scaler``. Horovod's sync replaces
    it by a copy on all ranks but the first; from then on the compressor reads the copy's loss scale.

    Args:
        model: the same as in ``hvd.elastic.TorchState``.
        optimizer: the same as there; its compression, if it is one of this package's compressors, is part
            of the state.
        share_residuals: whether each commit adds up what all ranks have not sent, in an all_reduce of the
            model's size in float32.
        kwargs: the same as in ``hvd.elastic.TorchState``; optimizers among them are treated like
            ``optimizer``, and compressors may be passed by themselves.

    Raises:
        ValueError: there is no compressor; or one has a process set, or an owner step, whose state would be
            lost with its owner.
    """

    def __init__(
        self,
        model: Any | None = None,
        optimizer: Any | None = None,
        *,
        share_residuals: bool = False,
        **kwargs: Any,
    ) -> None:
        values = [optimizer, *kwargs.values()]
        asked = [getattr(value, "_compression", value) for value in values]
        compressors = dict.fromkeys(one for one in asked if isinstance(one, Compressor))
        if not compressors:
            raise ValueError(
                "TorchState: expected an optimizer whose compression is a compressor of "
                "hvd_compress.torch, or a compressor by keyword, got none; without compression, use "
                "hvd.elastic.TorchState"
            )
        self._share_residuals = share_residuals
        self._commits: list[TorchCommits] = [TorchCommits(compressor) for compressor in compressors]
        rest = {}
        for name, value in kwargs.items():
            if isinstance(value, Compressor):
                setattr(self, name, value)
            else:
                rest[name] = value
        # By attribute, the compressors whose scaler is its value.
        self._scaled = {
            name: [one for one in compressors if one._grad_scaler is value]
            for name, value in rest.items()
            if value is not None
        }
        super().__init__(model=model, optimizer=optimizer, **rest)

    def __setattr__(self, name: str, value: Any) -> None:
        """Called by a script, by :meth:`sync` and by :meth:`restore`."""
        super().__setattr__(name, value)
        for compressor in self.__dict__.get("_scaled", {}).get(name, ()):
            compressor._grad_scaler = value

    def reset(self) -> None:
        """Called by ``hvd.elastic.run`` when Horovod has been initialized again."""
        super().reset()
        for commits in self._commits:
            commits.compressor.rebind()

    def sync(self) -> None:
        """Makes all ranks begin with the same model, and decides which residuals each starts with."""
        super().sync()
        for commits in self._commits:
            commits.settle()
