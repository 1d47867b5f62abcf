"""What FSDP2 knows of a model: whose shards stand where in the memory that its hook is given.

Modules and their hooks are public; which parameters a module reduces, and in which order, is not.
Everything that is not public is read here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

Place = tuple[int, tuple[int, ...], tuple[int, ...], int]
"""A parameter's number, and its shard's shape, strides and first element in the memory of a hook."""


@dataclass(frozen=True, eq=False)
class Unit:
    """A module that FSDP2 reduces the gradients of at once.

    Attributes:
        name: of the module in the model.
        module: the module.
        numbers: of its parameters in the model.
        group: what FSDP2 calls its parameter group.
    """

    name: str
    module: FSDPModule
    numbers: tuple[int, ...]
    group: Any

    def places(self) -> tuple[list[Place], int]:
        """Where the shards stand, of the parameters that need gradients now, and elements in all."""
        found, begin = [], 0
        for number, parameter in zip(self.numbers, self.group.fsdp_params, strict=True):
            if parameter.sharded_param.requires_grad:
                shape, strides = parameter.sharded_size, parameter.contiguous_sharded_stride
                found.append((number, tuple(shape), tuple(strides), begin))
                begin += parameter.padded_sharded_param_size.numel()
        return found, begin

    @property
    def accumulates(self) -> bool:
        """Whether ``set_requires_all_reduce(False)`` holds."""
        return not self.group.all_reduce_grads


@dataclass(frozen=True, eq=False)
class Sharded:
    """A model that FSDP2 shards over one mesh.

    Attributes:
        mesh: of one dimension.
        units: its modules.
        parameters: this rank's shards by name, and the dtype that their gradients are reduced in.
    """

    mesh: DeviceMesh
    units: list[Unit]
    parameters: list[tuple[str, torch.Tensor, torch.dtype]]

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that share the parameters out."""
        return self.mesh.get_group()


def sharded(model: torch.nn.Module) -> Sharded:
    """Looks at a model.

    Raises:
        TypeError: it is not FSDP2's.
        ValueError: a module of it has a hook, or is sharded in a way that leaves no place for one.
        NotImplementedError: this version of PyTorch has another FSDP2.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{_EXPECTED}, got {type(model).__name__}")
    modules = {name: m for name, m in model.named_modules() if isinstance(m, FSDPModule)}
    if not modules:
        raise TypeError(f"{_EXPECTED}, got {type(model).__name__}, which has none")
    named = list(model.named_parameters())
    try:
        found = _look(modules, named)
        for unit in found.units:
            _ = unit.places(), unit.accumulates, unit.module.set_reduce_scatter_unused_params
        return found
    except AttributeError as error:
        raise NotImplementedError(
            f"hvd_compress.fsdp: expected FSDP2 as in PyTorch 2.13, got that of {torch.__version__}: "
            f"{error}"
        ) from None


_EXPECTED = (
    "Compressor.model: expected a model with modules that went through fully_shard(module, "
    "mesh=mesh['shard']) of torch.distributed.fsdp"
)


def _look(modules: dict[str, Any], named: Sequence[tuple[str, torch.Tensor]]) -> Sharded:
    numbers = {id(parameter): number for number, (_, parameter) in enumerate(named)}
    units: list[Unit] = []
    dtypes: dict[int, torch.dtype] = {}
    meshes: dict[tuple[int, ...], DeviceMesh] = {}
    for name, module in modules.items():
        where = name or "the model"
        groups = module._get_fsdp_state()._fsdp_param_groups
        if len(groups) > 1:
            raise ValueError(
                f"{where}: expected parameters on one mesh in each module, got {len(groups)} meshes: FSDP2 "
                f"has no hook for that"
            )
        for group in groups:
            if any(unit.group is group for unit in units):
                continue  # fully_shard got a list of modules.
            _check_mesh(where, group.mesh_info)
            if group._all_reduce_hook is not None:
                raise ValueError(
                    f"{where}: expected a module without an all-reduce hook, got one that has it: make one "
                    f"compressor for a model, and call set_all_reduce_hook for nothing else"
                )
            meshes[tuple(group.mesh_info.mesh.mesh.tolist())] = group.mesh_info.mesh
            own = tuple(numbers[id(one.sharded_param)] for one in group.fsdp_params)
            policy = group.mp_policy
            for number in own:
                dtypes[number] = policy.reduce_dtype or policy.param_dtype or named[number][1].dtype
            units.append(Unit(name, module, own, group))
    if len(meshes) > 1:
        raise ValueError(
            f"Compressor.model: expected modules that are sharded over the same ranks, got {list(meshes)}"
        )
    parameters = []
    for number, (name, parameter) in enumerate(named):
        if number not in dtypes or not isinstance(parameter, DTensor):
            raise ValueError(
                f"{name}: expected a parameter that FSDP2 shards, got one that it does not, which "
                f"would not be averaged: call fully_shard on the whole model last"
            )
        if parameter.device_mesh.ndim != 1:
            raise ValueError(
                f"{name}: expected a parameter that is sharded by FSDP2 alone, got one on a mesh of "
                f"{parameter.device_mesh.ndim} dimensions"
            )
        local = parameter.to_local()
        if local.is_meta:
            raise ValueError(
                f"{name}: expected a parameter with memory, got one on the meta device: call "
                f"model.to_empty() and fill it first"
            )
        parameters.append((name, local, dtypes[number]))
    return Sharded(next(iter(meshes.values())), units, parameters)


def _check_mesh(where: str, info: Any) -> None:
    if info.replicate_mesh_dim is not None or info.mesh.ndim != 1:
        raise ValueError(
            f"{where}: expected a module that is sharded over a mesh of one dimension, fully_shard(module, "
            f"mesh=mesh['shard']), got a mesh of {info.mesh.ndim}: there, FSDP2 adds gradients up "
            f"uncompressed itself"
        )
