"""FSDP2's view of a model: the place of each shard in the memory that FSDP2 passes to its hook.

Modules and their hooks are public; the parameters that a module reduces, and their order, are not.
Everything that is not public is read here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hvd_compress.engine.parameters import Slot, like, parameters


@dataclass(frozen=True)
class Place:
    """A shard in the memory of a hook.

    Attributes:
        number: the number of the parameter.
        shape: the shape of the shard.
        strides: the strides of the shard.
        begin: its first element in that memory; None where this rank's shard group has no gradient for it.
        parameter: the parameter whose ``grad`` receives the shard.
    """

    number: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    begin: int | None
    parameter: torch.Tensor


@dataclass(eq=False)
class Unit:
    """A module whose gradients FSDP2 reduces together.

    Attributes:
        name: the name of the module in the model; for the model itself, ``"the model"``.
        module: the module.
        numbers: the numbers of its parameters in the model.
        group: FSDP2's parameter group of the module.
        places: the places of the parameters that need gradients, in the reduction in progress.
        elements: the number of elements in that reduction.
    """

    name: str
    module: FSDPModule
    numbers: tuple[int, ...]
    group: Any
    places: list[Place] = field(default_factory=list)
    elements: int = 0

    def watch(self, discard: Callable[[Unit], None]) -> None:
        """Sets :attr:`places` before each reduction, in which FSDP2 omits parameters without a gradient.

        Args:
            discard: a function that is called with the unit when ``reset_iter_state()`` discards gradients.
        """
        post_backward = self.group.post_backward

        def watched(*unused: Any) -> None:
            self.look()
            post_backward(*unused)

        self.group.post_backward = watched
        reset = getattr(self.group, "_reset_iter_state", None)
        if reset is None:  # Before PyTorch 2.13.
            return

        def watched_reset() -> None:
            reset()
            discard(self)

        self.group._reset_iter_state = watched_reset

    def look(self) -> None:
        """Finds the gradients that FSDP2 would reduce now."""
        self.places, self.elements = [], 0
        # Before PyTorch 2.13, FSDP2 always omits them.
        unused_too = getattr(self.group, "reduce_scatter_unused_params", False)
        for index in self._order():
            number, parameter = self.numbers[index], self.group.fsdp_params[index]
            whole = _whole(parameter)
            needed = whole.requires_grad
            present = (
                parameter.unsharded_accumulated_grad is not None
                or whole.grad is not None
                or (unused_too and needed)
            )
            if present or needed:
                shape, strides = parameter.sharded_size, parameter.contiguous_sharded_stride
                begin = self.elements if present else None
                sharded = parameter.sharded_param
                self.places.append(Place(number, tuple(shape), tuple(strides), begin, sharded))
            if present:
                self.elements += parameter.padded_sharded_param_size.numel()

    def _order(self) -> Sequence[int]:
        """The order of the parameters in the reduction; known from the first forward pass on."""
        usual = range(len(self.numbers))
        if not _has_gradient_dtypes(self.group.fsdp_params):
            return usual
        return self.group._reduce_scatter_param_indices or usual

    def freezes(self, number: int) -> bool:
        """Whether a parameter of the module is not being trained; ``number`` is that in the model."""
        parameter = self.group.fsdp_params[self.numbers.index(number)]
        return not _whole(parameter).requires_grad

    @property
    def accumulates(self) -> bool:
        """Whether ``set_requires_all_reduce(False)`` is in effect."""
        return not self.group.all_reduce_grads

    @property
    def adds_up(self) -> bool:
        """Whether FSDP2 has divided by the user's own divisor, which counts all ranks."""
        return self.group.gradient_divide_factor is not None


def _has_gradient_dtypes(parameters: Sequence[Any]) -> bool:
    """Whether FSDP2 is that of PyTorch 2.15, whose parameter objects have the dtype of their gradients.

    FSDP2 orders a module's gradients by it, and reduces them in it where ``reduce_dtype`` is not set.
    """
    return any(hasattr(one, "sharded_grad_dtype") for one in parameters)


def _reduced(name: str, parameters: Sequence[Any]) -> list[torch.dtype]:
    """The dtype in which FSDP2 reduces the gradient of each of a module's parameters.

    Raises:
        TypeError: FSDP2 reduces them together, in a dtype that depends on which gradients there are.
    """
    policies = [one.mp_policy for one in parameters]
    wanted: list[torch.dtype | None] = [one.reduce_dtype for one in policies]
    if not _has_gradient_dtypes(parameters):
        wanted = [one.reduce_dtype or one.param_dtype for one in policies]
    elif not all(wanted):
        wanted = [one.sharded_grad_dtype for one in parameters]
        pairs = zip(parameters, wanted, strict=True)
        trained = {dtype for one, dtype in pairs if one.sharded_param.requires_grad}
        if len(trained) > 1 or None in trained:
            raise TypeError(
                f"{name}: expected gradients that FSDP2 reduces in one dtype, got parameters with the "
                f"grad_dtype {', '.join(sorted(map(str, trained)))}: set reduce_dtype in "
                f"MixedPrecisionPolicy"
            )
    return [dtype or one.sharded_param.dtype for dtype, one in zip(wanted, parameters, strict=True)]


def _whole(parameter: Any) -> Any:
    """The tensor of FSDP2's parameter object that a script freezes while its module is unsharded."""
    return getattr(parameter, "_unsharded_param", parameter.sharded_param)


@dataclass(eq=False, kw_only=True)
class Shard(Slot):
    """The record of this rank's shard of a parameter, in the dtype in which its gradient is reduced.

    Attributes:
        unit: the module that has the parameter.
        padded: the shape of the parameter's largest shard.
    """

    unit: Unit
    padded: tuple[int, ...]

    @property
    def frozen(self) -> bool:
        """Whether the parameter is not being trained."""
        return self.unit.freezes(self.index)

    @property
    def largest(self) -> tuple[int, ...]:
        """The shape of the parameter's largest shard."""
        return self.padded


@dataclass(frozen=True, eq=False)
class Sharded:
    """A model that FSDP2 shards over one mesh.

    Attributes:
        mesh: a mesh of one dimension.
        units: the model's modules that are reduced together.
        shards: this rank's shards, in the order of the parameters.
    """

    mesh: DeviceMesh
    units: list[Unit]
    shards: list[Shard]

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that share the parameters out."""
        return self.mesh.get_group()


def sharded(model: torch.nn.Module) -> Sharded:
    """Reads how FSDP2 shards a model.

    Raises:
        TypeError: the model is not FSDP2's.
        ValueError: one of its modules has a hook, or is sharded in a way that has no room for one.
        NotImplementedError: the FSDP2 of this version of PyTorch is different.
    """
    modules = _modules(model, "Compressor", "fully_shard(module, mesh=mesh['shard'])")
    named = list(parameters(model, "Compressor.model").items())
    with _as_in_this_version():
        found = _look(modules, named)
        for unit in found.units:
            unit.look()
            _ = unit.accumulates, unit.adds_up, unit.group.post_backward
        return found


@dataclass(frozen=True, eq=False)
class Shared:
    """A module whose parameters FSDP2 gathers, and whose gradients it sums, among a shard group's ranks.

    Attributes:
        name: the name of the module in the model; for the model itself, ``"the model"``.
        module: the module.
        process_group: the ranks, the same for all modules of a model.
        device: the device of the tensors.
        dtype: the dtype in which parameters are gathered, or gradients are summed.
        elements: the number of elements of all its parameters, unsharded.
    """

    name: str
    module: Any
    process_group: dist.ProcessGroup
    device: torch.device
    dtype: torch.dtype
    elements: int


def shared(model: torch.nn.Module, owner: str, collective: str) -> list[Shared]:
    """The modules in which a collective can be replaced; the mesh may have replicas as well.

    Args:
        model: a model, or a part of one.
        owner: the name of the class that replaces the collective.
        collective: ``"reduce_scatter"`` or ``"all_gather"``.

    Raises:
        TypeError: the model is not FSDP2's, or it gathers a module's parameters in several dtypes.
        ValueError: the collective of a module was already replaced, or modules have different ranks.
        NotImplementedError: the FSDP2 of this version of PyTorch is different.
    """
    modules = _modules(model, owner, "fully_shard(module)")
    called = collective.replace("_", "-")
    with _as_in_this_version():
        found = [
            _shared(owner, collective, called, *each)
            for each in _groups(modules, f"custom {called}")
        ]
    ranks = {tuple(dist.get_process_group_ranks(one.process_group)) for one in found}
    if len(ranks) != 1:
        got = f"those of {sorted(map(list, ranks))}" if ranks else "none with parameters"
        raise ValueError(
            f"{owner}.model: expected modules that are sharded over the same ranks, got {got}"
        )
    return found


def _shared(owner: str, collective: str, called: str, name: str, module: Any, group: Any) -> Shared:
    _ = getattr(module, f"set_custom_{collective}")
    _check_sharded(name, group.mesh_info)
    usual = type(getattr(group, f"_{collective}_comm")).__name__
    if usual != f"Default{owner.removeprefix('Compressed')}":
        raise ValueError(
            f"{name}: expected a module with FSDP2's own {called}, got one with {usual}: make one {owner} "
            f"for a model, and call set_custom_{collective}, set_symm_mem and "
            f"set_allocate_memory_from_process_group for nothing else"
        )
    parameters = [one.sharded_param for one in group.fsdp_params]
    if collective == "all_gather":
        dtype = _gathered(name, group.fsdp_params)
    else:
        # All that need gradients are of one dtype; frozen ones, such as quantized weights, may be of any.
        trained = (number for number, one in enumerate(parameters) if one.requires_grad)
        dtype = _reduced(name, group.fsdp_params)[next(trained, 0)]
    return Shared(
        name,
        module,
        getattr(group, f"_{collective}_process_group"),
        group.device,
        dtype,
        sum(parameter.numel() for parameter in parameters),
    )


def _gathered(name: str, parameters: Sequence[Any]) -> torch.dtype:
    """The dtype in which FSDP2 gathers a module's parameters.

    Args:
        name: the name of the module.
        parameters: FSDP2's objects of its parameters, frozen ones as well.
    """
    pairs = [(one.sharded_param, one.mp_policy.param_dtype) for one in parameters]
    dtypes = {cast if cast and one.is_floating_point() else one.dtype for one, cast in pairs}
    if len(dtypes) > 1:
        raise TypeError(
            f"{name}: expected parameters that FSDP2 gathers in one dtype, got some of "
            f"{', '.join(sorted(map(str, dtypes)))}, which it gathers together as bytes: set param_dtype "
            f"in MixedPrecisionPolicy, which casts floating-point parameters; call fully_shard with "
            f"ignored_params= for frozen ones of another dtype; or pass parts of the model without this "
            f"module"
        )
    return dtypes.pop()


def _modules(model: Any, owner: str, call: str) -> dict[str, Any]:
    expected = (
        f"{owner}.model: expected a model with modules that went through {call} of "
        f"torch.distributed.fsdp"
    )
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{expected}, got {type(model).__name__}")
    modules = {
        name or "the model": m for name, m in model.named_modules() if isinstance(m, FSDPModule)
    }
    if not modules:
        raise TypeError(f"{expected}, got {type(model).__name__}, which has none")
    return modules


@contextmanager
def _as_in_this_version() -> Iterator[None]:
    """Reports a missing attribute that is not public as the sign of another version of PyTorch."""
    try:
        yield
    except AttributeError as error:
        raise NotImplementedError(
            f"hvd_compress.fsdp: expected FSDP2 as in PyTorch 2.11 to 2.15, got that of "
            f"{torch.__version__}: {error}"
        ) from None


def _groups(modules: Mapping[str, Any], what: str) -> Iterator[tuple[str, Any, Any]]:
    """Yields for each module its name, itself and FSDP2's parameter group.

    Args:
        modules: the modules, by name.
        what: the feature that FSDP2 does not have for modules with several groups.
    """
    seen: set[int] = set()
    for name, module in modules.items():
        groups = _parameter_groups(module._get_fsdp_state())
        if len(groups) > 1:
            raise ValueError(
                f"{name}: expected parameters on one mesh in each module, got {len(groups)} meshes: FSDP2 "
                f"has no {what} for that"
            )
        for group in groups:
            if id(group) not in seen:  # Else fully_shard got a list of modules.
                seen.add(id(group))
                yield name, module, group


def _parameter_groups(state: Any) -> list[Any]:
    """FSDP2's parameter groups of a module, of which PyTorch before 2.13 has at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _look(modules: dict[str, Any], named: Sequence[tuple[str, torch.Tensor]]) -> Sharded:
    numbers = {id(parameter): number for number, (_, parameter) in enumerate(named)}
    units: list[Unit] = []
    found: dict[int, tuple[torch.dtype, Unit, tuple[int, ...]]] = {}
    meshes: dict[tuple[int, ...], DeviceMesh] = {}
    for name, module, group in _groups(modules, "hook"):
        _check_mesh(name, group.mesh_info)
        if group._all_reduce_hook is not None:
            raise ValueError(
                f"{name}: expected a module without an all-reduce hook, got one that has it: make one "
                f"compressor for a model, and call set_all_reduce_hook for nothing else"
            )
        if group.device.type != "cpu" and any(one.offload_to_cpu for one in group.fsdp_params):
            raise ValueError(
                f"{name}: expected parameters on {group.device}, where FSDP2 has their gradients, got "
                f"some in the memory of the CPU: call fully_shard without CPUOffloadPolicy"
            )
        meshes[tuple(group.mesh_info.mesh.mesh.tolist())] = group.mesh_info.mesh
        own = tuple(numbers[id(one.sharded_param)] for one in group.fsdp_params)
        unit = Unit(name, module, own, group)
        units.append(unit)
        dtypes = _reduced(name, group.fsdp_params)
        for number, one, dtype in zip(own, group.fsdp_params, dtypes, strict=True):
            found[number] = dtype, unit, tuple(one.padded_sharded_param_size)
    if len(meshes) > 1:
        raise ValueError(
            f"Compressor.model: expected modules that are sharded over the same ranks, got {list(meshes)}"
        )
    shards = []
    for number, (name, parameter) in enumerate(named):
        if number not in found or not isinstance(parameter, DTensor):
            raise ValueError(
                f"{name}: expected a parameter that FSDP2 shards, got one that it does not, which "
                f"would not be averaged: call fully_shard on the whole model last"
            )
        if parameter.device_mesh.ndim != 1:
            raise ValueError(
                f"{name}: expected a parameter that is sharded by FSDP2 alone, got one on a mesh of "
                f"{parameter.device_mesh.ndim} dimensions"
            )
        dtype, unit, padded = found[number]
        local = like(parameter.to_local(), dtype)
        shards.append(Shard(name, number, local, unit=unit, padded=padded))
    return Sharded(next(iter(meshes.values())), units, shards)


def _check_sharded(where: str, info: Any) -> None:
    if info.shard_mesh_dim is None:
        raise ValueError(
            f"{where}: expected a module that fully_shard() shards, got one of replicate(), whose "
            f"gradients FSDP2 adds up over all ranks uncompressed: wrap the model in "
            f"DistributedDataParallel and use hvd_compress.ddp; or call fully_shard(module, "
            f"mesh=mesh['shard']) with a mesh of (ranks, 1), and make a Compressor"
        )


def _check_mesh(where: str, info: Any) -> None:
    _check_sharded(where, info)
    if info.replicate_mesh_dim is not None or info.mesh.ndim != 1:
        raise ValueError(
            f"{where}: expected a module that is sharded over a mesh of one dimension, fully_shard(module, "
            f"mesh=mesh['shard']), got a mesh of {info.mesh.ndim}: there, FSDP2 adds gradients up "
            f"uncompressed itself"
        )
