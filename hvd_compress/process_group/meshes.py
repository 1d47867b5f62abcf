"""Tensors that the ranks of a device mesh share out: this rank's part, and the ranks with the same part."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hvd_compress.exchanges.default import AUTO
from hvd_compress.exchanges.registry import EXCHANGES
from hvd_compress.process_group.collectives import Collectives
from hvd_compress.process_group.private import is_unregistered
from hvd_compress.ranks.errors import ExchangeError, another_shard_failed

FLAT = (AUTO, *(name for name, one in EXCHANGES.items() if set(one.stages) == {"all"}))
"""The exchanges that do not depend on hosts: on a mesh, the ranks of a host hold different shards."""


_NOT_FINITE, _FINITE, _FAILED, _LOST = range(4)


class Verdicts:
    """Combines the findings of the ranks that share parameters out, each about its shards of averages.

    What the ranks decide about averages, such as to drop them, they have to decide alike for all shards.

    Args:
        ranks: these ranks; None means that each rank has all of the parameters.
    """

    def __init__(self, ranks: Collectives | None) -> None:
        self._ranks = ranks
        self._met = self._apart = False

    def judge(
        self, finite: bool, changed: Sequence[bool] = (), exchange: int = 0
    ) -> tuple[bool, list[bool]]:
        """Combines what the ranks have found in their shards of averages; all of them call it.

        Args:
            finite: whether this rank's are finite.
            changed: for each parameter, whether this rank's average is not zero everywhere.
            exchange: the number of the exchange, where several may be in progress.

        Returns:
            Whether all shards are finite; for each parameter, whether some shard's average is not zero.

        Raises:
            ExchangeError: the exchange of another shard has failed.
            RuntimeError: it has failed since a rank is lost; or another exchange has failed.
        """
        self._met = True
        if self._ranks is None:
            return finite, list(changed)
        words = self._gather(_FINITE if finite else _NOT_FINITE, exchange)
        _check_none_lost(words)
        if _FAILED in words:
            raise another_shard_failed()
        masks = self._ranks.gather_numbers(*changed) if changed else []
        return _NOT_FINITE not in words, [any(flags) for flags in zip(*masks, strict=True)]

    @contextlib.contextmanager
    def failure_told(self, exchange: int = 0) -> Iterator[None]:
        """Makes the other ranks' :meth:`judge` raise an error if this block raises one before its own.

        Args:
            exchange: the number of the exchange; -1 if the block belongs to none.

        Raises:
            RuntimeError: this block has raised an error, and a rank is lost that exchanges another shard.
        """
        self._met = False
        try:
            yield
        except Exception as error:
            if not self._met and self._ranks is not None:
                known, words = isinstance(error, (ExchangeError, TypeError, ValueError)), []
                with contextlib.suppress(Exception):
                    words = self._gather(_FAILED if known else _LOST, exchange)
                if known:
                    _check_none_lost(words)
            raise

    def _gather(self, own: int, exchange: int) -> list[int]:
        if not self._apart:
            assert self._ranks is not None
            rows = self._ranks.gather_numbers(own, exchange)
            words = [word for word, _ in rows]
            together = all(number == exchange for _, number in rows)
            # On all of these ranks: each now ends the exchanges that it has in progress, and others may
            # have begun fewer, so that their next calls would not belong together.
            self._apart = not together or _LOST in words
            if together:
                return words
        raise RuntimeError(
            "expected averages of all shards, but another shard's exchange of another fragment failed, or "
            "its rank is lost: call rebind() on all ranks"
        )


def _check_none_lost(words: Sequence[int]) -> None:
    """Raises ``RuntimeError`` if one of the words of a worker's ranks is ``_LOST``."""
    if _LOST in words:
        raise RuntimeError("a rank is lost that exchanges another shard of this worker")


def one_mesh(owner: str, named: Mapping[str, torch.Tensor]) -> DeviceMesh | None:
    """The mesh that shares out all of some parameters; None if each rank has all of them.

    ``owner`` names the argument in errors.

    Raises:
        ValueError: a mesh shares out some of the parameters and not others; there are several meshes, or
            one of several dimensions.
    """
    meshes = {
        name: one.device_mesh if isinstance(one, DTensor) else None for name, one in named.items()
    }
    found = list(dict.fromkeys(meshes.values()))
    if len(found) > 1:
        first = {mesh: name for name, mesh in reversed(meshes.items())}
        got = " and ".join(f"{mesh or 'none'} for {first[mesh]}" for mesh in found)
        raise ValueError(f"{owner}: expected all parameters on one mesh, or on none, got {got}")
    mesh = found[0] if found else None
    if mesh is not None and mesh.ndim != 1:
        raise ValueError(
            f"{owner}: expected parameters on a mesh of one dimension, got {mesh}: call "
            f"fully_shard(module, mesh=mesh['shard'])"
        )
    return mesh


def replicas(
    owner: str,
    mesh: Any,
    group: dist.ProcessGroup | None,
    shard_mesh: DeviceMesh,
    otherwise: str = "",
) -> dist.ProcessGroup:
    """The process group of the ranks with this rank's shards.

    Args:
        owner: the name of the object that was given the arguments, for errors.
        mesh: a mesh of two dimensions, replicas first and shards second; or None.
        group: the process group itself; or None.
        shard_mesh: the mesh over which the model is sharded.
        otherwise: an addition to errors: what to do if there are no replicas.

    Raises:
        TypeError, ValueError: not exactly one of the two was passed, or it does not fit the model's mesh.
        ExchangeError: this rank is not in the group.
    """
    if (mesh is None) == (group is None):
        got = "neither" if mesh is None else "both"
        raise TypeError(
            f"{owner}: expected mesh=, of two dimensions (replicate, shard), or process_group=, the "
            f"ranks with the same shard, got {got}{otherwise}"
        )
    shards = shard_mesh.mesh.tolist()
    if mesh is not None:
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"{owner}.mesh: expected a DeviceMesh, got {type(mesh).__name__}")
        if mesh.ndim != 2:
            raise ValueError(
                f"{owner}.mesh: expected two dimensions, replicas first and shards second, got "
                f"{mesh.ndim}{otherwise}"
            )
        rows = [row for row in mesh.mesh.tolist() if dist.get_rank() in row]
        if rows != [shards]:
            raise ValueError(
                f"{owner}.mesh: expected the ranks {shards} that the model is sharded over along the "
                f"second dimension, got {rows[0] if rows else 'a mesh without this rank'}"
            )
        return mesh.get_group(0)
    assert group is not None
    if dist.get_rank(group) < 0:
        raise ExchangeError("expected a process group with this rank in it, got one without")
    ranks = dist.get_process_group_ranks(group)
    shared = sorted(set(ranks) & set(shards))
    if shared != [dist.get_rank()]:
        raise ValueError(
            f"{owner}.process_group: expected ranks with the same shard of the model, which is sharded "
            f"over ranks {shards}, got {ranks}"
        )
    return group


def part_of(key: str, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """This rank's part of a tensor; it shares the tensor's memory. A plain tensor is returned as it is.

    The ranks of ``group`` reduce the tensor; None is the default group.

    Raises:
        TypeError: the ranks hold summands of the tensor (``Partial``).
        ValueError: several dimensions of the mesh share the tensor out; or ranks of the group have other
            parts of it.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    mesh, placements = tensor.device_mesh, tensor.placements
    if any(placement.is_partial() for placement in placements):
        raise TypeError(
            f"{key}: expected a tensor that is sharded or replicated on its mesh, got {placements}: "
            f"redistribute() it to Replicate() or Shard() first"
        )
    cut = [n for n, placement in enumerate(placements) if not placement.is_replicate()]
    if len(cut) > 1 or not all(type(placements[n]) is Shard for n in cut):
        raise ValueError(
            f"{key}: expected a tensor that Shard() cuts on at most one dimension of its mesh, got "
            f"{placements}: hand over its to_local(), and the ranks with the same part as the group"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"{key}: expected a tensor on a mesh with this rank in it, got {mesh}")
    if cut and not is_unregistered(group):
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        together = mesh.mesh.movedim(cut[0], 0).reshape(mesh.size(cut[0]), -1).tolist()
        own = next(row for row in together if dist.get_rank() in row)
        others = sorted(set(ranks) & {rank for row in together if row is not own for rank in row})
        if others:
            raise ValueError(
                f"{key}: expected a process group of ranks with the same part of the tensor, which is "
                f"{placements} on {mesh}, got ranks {ranks}, of which {others} have other parts: make the "
                f"compressor with process_group=mesh.get_group('replicate') of a mesh with replicas"
            )
    part: torch.Tensor = tensor.to_local().detach()
    return part


def part_number(tensor: torch.Tensor) -> list[int]:
    """The number of this rank's part of a tensor, and the number of parts; the ranks compare it."""
    if isinstance(tensor, DTensor):
        for dimension, placement in enumerate(tensor.placements):
            if isinstance(placement, Shard):
                mesh = tensor.device_mesh
                return [mesh.get_local_rank(dimension), mesh.size(dimension)]
    return [0, 1]
