"""Ranks of one process, which take turns: the compressors of real ones, with messages in memory.

Routes, payloads, residuals and sums are the package's own code, so that numbers are those of real ranks,
bit for bit. Where ranks share a core, this saves what processes and sockets cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvd_compress.engine.batch import judge
from hvd_compress.engine.compressor import CompressorBase
from hvd_compress.engine.parameters import slots_of
from hvd_compress.engine.ranks import Ranks
from hvd_compress.exchanges.comm import Collective, Group
from hvd_compress.exchanges.routing import Route
from hvd_compress.process_group.packing import Packer
from hvd_compress.process_group.step import Bucket
from hvd_compress.ranks.counters import Counters

_CPU = torch.device("cpu")


class LocalRanks:
    """Averages the gradients of several ranks by the route of a compressor, in one bucket.

    Args:
        model: the model, whose parameters are the same on all ranks.
        route: the codec, the error feedback and the exchange.
        size: the number of ranks.
        options: the other options of a compressor, such as ``threshold``.
    """

    def __init__(self, model: torch.nn.Module, route: Route, size: int, **options: Any) -> None:
        self._ranks = [_Compressor(model, route, rank, size, options) for rank in range(size)]

    def average(self, gradients: Sequence[Sequence[torch.Tensor]]) -> Sequence[torch.Tensor]:
        """Makes one step.

        Args:
            gradients: each rank's gradients in the order of the parameters; averages are written over them.

        Returns:
            The averages that the first rank has; those of the other ranks are the same.
        """
        buckets = [rank.pack(own) for rank, own in zip(self._ranks, gradients, strict=True)]
        for runs in zip(*(bucket.runs for bucket in buckets), strict=True):
            while runs[0].request is not None:
                asked = [run.request for run in runs if run.request is not None]
                for run, result in zip(runs, _results(asked), strict=True):
                    run.resume(result)
        for rank, bucket in zip(self._ranks, buckets, strict=True):
            rank.take(bucket)
        return gradients[0]

    def state(self) -> list[dict[str, Any]]:
        """Each rank's residuals and positions in the noise."""
        return [rank.state_dict() for rank in self._ranks]

    def load_state(self, states: Sequence[dict[str, Any]]) -> None:
        """Restores what :meth:`state` returned."""
        for rank, state in zip(self._ranks, states, strict=True):
            rank.load_state_dict(state)

    @property
    def counters(self) -> Counters:
        """The first rank's counters."""
        return self._ranks[0].counters


class _Compressor(CompressorBase):
    """One rank's compressor."""

    _chained = True
    _remedy = "call LocalRanks.average"

    def __init__(
        self, model: torch.nn.Module, route: Route, rank: int, size: int, options: dict[str, Any]
    ) -> None:
        ranks = _Ranks(Group(rank, size))
        own = slots_of(model.named_parameters())
        super().__init__(own, route, ranks, threads=1, **options)
        self._own = own
        self._join()
        self._packer = Packer(self._batches, self._routes, _CPU)
        self._routes.choose(own)

    def pack(self, gradients: Sequence[torch.Tensor]) -> Bucket:
        """Encodes this rank's gradients."""
        self._begin_encoding()
        bucket = Bucket(gradients, _CPU, 1 / self._ranks.group.size)
        tensors = zip(self._own, gradients, gradients, strict=True)
        self._packer.pack(bucket, tensors, self.counters)
        return bucket

    def take(self, bucket: Bucket) -> None:
        """Writes the averages, and settles residuals."""
        with torch.no_grad():
            bucket.write()
            bucket.settle(judge([run.content for run in bucket.runs]))
        bucket.count(self.counters)
        self.counters.steps += 1


class _Ranks(Ranks):
    """One of the ranks, which agree since one loop drives them all."""

    def __init__(self, group: Group) -> None:
        self.group = group

    @property
    def busy(self) -> bool:
        return False

    @staticmethod
    def of_job() -> int:
        return 1

    def check(self, slot: Any, route: Route) -> None:
        """Accepts every route."""

    def configuration(self, *, hierarchical: bool) -> dict[str, Any]:
        return {}

    def forget_agreement(self) -> None:
        """Does nothing: nothing is compared."""

    def usable(self, routes: Sequence[Route]) -> tuple[Sequence[Route], int]:
        return routes, self.group.size

    def result_of(self, collective: Collective, name: str) -> torch.Tensor:
        raise TypeError("expected a codec that is chosen beforehand, got a planner")

    def wait(self, call: str, **arguments: str) -> None:
        """Does nothing: one loop makes all calls."""


def _results(asked: Sequence[Collective]) -> list[torch.Tensor]:
    """The ranks' results of one collective."""
    first, messages = asked[0], [one.message for one in asked]
    if first.kind == "all_to_all":
        shares = [message.split(list(first.sizes)) for message in messages]
        return [torch.stack(to_rank) for to_rank in zip(*shares, strict=True)]
    if first.kind == "all_gather":
        rows = torch.stack(messages)
        return [rows for _ in asked]
    total = torch.stack(messages)
    if first.op == "max":
        return [total.amax(0) for _ in asked]
    summed = messages[0].clone()
    for message in messages[1:]:
        summed += message
    return [summed.clone() for _ in asked]
