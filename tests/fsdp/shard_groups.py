"""The reference of what a shard group's encoded reduce-scatters give one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from hvd_compress.codecs import Codec
from tests.fsdp.probes import SHAPES, Beside
from tests.papers.reference import sent
from tests.torch_models import Shapes


class ShardGroup:
    """Ranks that share the parameters out, and one of their places.

    Args:
        ranks: their numbers in the job.
        own: the place.
        codec: the codec of gradients.
        shapes: the shapes of the whole parameters, of modules ``first`` and ``second``.
        seed: the seed of the noise.
        dtype: the dtype in which gradients are reduced.
        factor: the factor on the sum; None averages.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        own: int,
        codec: Codec,
        *,
        shapes: Shapes = SHAPES,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        factor: float | None = None,
    ) -> None:
        self._ranks, self._own, self._codec, self._shapes = ranks, own, codec, shapes
        self._seed, self._dtype = seed, dtype
        self._factor = 1 / len(ranks) if factor is None else factor
        self._step = 0

    def reduced(self, everybodys: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The place's shards in one backward pass, in float32, from each rank's gradients."""
        shards = {}
        # FSDP2 reduces modules whose inputs need no gradients when the backward pass ends, in this order.
        for module in ("first", "second"):
            self._step += 1
            names = [name for name in self._shapes if name.startswith(module)]
            total = torch.zeros(())
            for rank, gradients in zip(self._ranks, everybodys, strict=True):
                part = torch.cat([self._padded(gradients[name]).flatten() for name in names])
                part = part.to(self._dtype)
                total = total + sent(self._codec, part, rank, self._own, self._step, self._seed)
            total = (total * torch.tensor(self._factor)).to(self._dtype).float()
            for name in names:
                count = self._padded(torch.empty(self._shapes[name])).numel()
                own = self._cut(torch.empty(self._shapes[name]))
                shards[name] = total[: own.numel()].reshape(own.shape)
                total = total[count:]
        return shards

    def _padded(self, whole: torch.Tensor) -> torch.Tensor:
        """The place's part, with zeros behind it where others have more rows."""
        size = len(self._ranks)
        rows = -(-whole.shape[0] // size)
        padded = whole.new_zeros((rows * size, *whole.shape[1:]))
        padded[: whole.shape[0]] = whole
        return padded.chunk(size)[self._own]

    def _cut(self, whole: torch.Tensor) -> torch.Tensor:
        parts = torch.chunk(whole, len(self._ranks))
        return parts[self._own] if self._own < len(parts) else whole[:0]


class BesideBoth(Beside):
    """The reference of replicas whose own ranks exchange encoded gradients, too.

    Args:
        mesh: the mesh of the model.
        shard_codec: the codec within replicas.
        others: as for :class:`Beside`.
    """

    def __init__(self, mesh: DeviceMesh, shard_codec: Codec, *others: Any, **options: Any) -> None:
        super().__init__(mesh, *others, **options)
        own = mesh.get_local_rank("shard")
        self._groups = {
            ranks[0]: ShardGroup(ranks, own, shard_codec) for ranks in mesh.mesh.tolist()
        }

    def _within(
        self, ranks: list[int], everybodys: list[dict[str, torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        return self._groups[ranks[0]].reduced(everybodys)
