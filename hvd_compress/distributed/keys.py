"""The keys under which tensors are reduced, and a record for each key."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.dlpack import from_dlpack

from hvd_compress.engine.parameters import Slot, like
from hvd_compress.engine.state_checks import expect_state
from hvd_compress.exchanges.routing import Route
from hvd_compress.ranks.errors import ExchangeError

Kind = dict[str, Any]
"""The dtype and shape of a key's tensors, JSON-serializable."""


class Keys:
    """A record for each key, in the order of the keys' first calls.

    Attributes:
        slots: the records by key.
        routed: the keys whose routes have been chosen among the present ranks.
        in_step: the keys of the calls so far in a step that a planner measures.
        route_of: returns the route of a new record for a dtype; set by the compressor.
    """

    route_of: Callable[[Slot, str], Route]

    def __init__(self) -> None:
        self.slots: dict[str, Slot] = {}
        self.routed: set[str] = set()
        self.in_step: set[str] = set()

    @property
    def kinds(self) -> dict[str, Kind]:
        """The dtype and shape of each key's tensors."""
        return {key: kind_of(slot.parameter) for key, slot in self.slots.items()}

    def add(self, key: str, kind: Kind) -> Slot:
        """Adds a record for a key that no call has used yet."""
        one = torch.empty((), dtype=getattr(torch, kind["dtype"]), device="cpu")
        like = one.expand(kind["shape"])
        slot = self.slots[key] = Slot(key, len(self.slots), like)
        slot.route = self.route_of(slot, kind["dtype"])
        return slot

    def exchanges(self, key: str) -> int:
        """The number of calls with a key since its warm-up began; 0 before the first one."""
        slot = self.slots.get(key)
        return 0 if slot is None else slot.exchanges

    def restart_warmup(self, keys: Iterable[str]) -> None:
        """Restarts the ``warmup_steps`` of some keys at their next call; every rank has to call it."""
        for key in keys:
            self.slots[key].exchanges = 0

    def end_warmup(self, keys: Iterable[str], steps: int) -> None:
        """Ends the ``warmup_steps`` of some keys before their next call; every rank has to call it."""
        for key in keys:
            self.slots[key].exchanges = max(self.slots[key].exchanges, steps)

    def of(
        self, tensors: Sequence[torch.Tensor], keys: Sequence[str], device: torch.device
    ) -> list[Slot]:
        """The record of each tensor; new keys get a record without a route.

        Raises:
            TypeError, ValueError: a tensor cannot be reduced, or differs in device, dtype or shape from
                the tensors of earlier calls.
            ExchangeError: another tensor with the same key is being exchanged.
        """
        for key, tensor in zip(keys, tensors, strict=True):
            _check(key, tensor)
            if tensor.device != device:
                raise ValueError(
                    f"{key}: expected a tensor on {device}, as that of the first call, got one on "
                    f"{tensor.device}: make a compressor for each device"
                )
            slot = self.slots.get(key)
            if slot is None:
                slot = self.slots[key] = Slot(key, len(self.slots), like(tensor))
            if (tensor.dtype, tensor.shape) != (slot.parameter.dtype, slot.parameter.shape):
                kept, got = kind_of(slot.parameter), kind_of(tensor)
                raise ValueError(
                    f"{key}: expected a tensor of {kept['dtype']}, shape {kept['shape']}, as in earlier "
                    f"calls with that key, got {got['dtype']}, shape {got['shape']}: give other tensors "
                    f"another key="
                )
            if slot.pending:
                raise ExchangeError(
                    f"{key}: expected no exchange in progress for this key, got a second one: call wait() "
                    f"on what the last all_reduce returned"
                )
        places = [tensor.data_ptr() for tensor in tensors if tensor.numel()]
        if len(set(places)) != len(places):
            raise ValueError("all_reduce: expected each tensor once, got two in the same memory")
        return [self.slots[key] for key in keys]

    @contextlib.contextmanager
    def restored_on_error(self) -> Iterator[None]:
        """Restores the keys on exit if the ``with`` block raises an error."""
        before = dict(self.slots)
        try:
            yield
        except Exception:
            self.slots.clear()
            self.slots.update(before)
            self.routed &= before.keys()
            raise

    @contextlib.contextmanager
    def of_states(self, who: str, states: Sequence[dict[str, Any]]) -> Iterator[None]:
        """Adds records for the keys of states; removes them again if loading the states fails.

        Raises:
            TypeError: a state is not a result of ``state_dict()``.
            ValueError: the states' keys differ from each other, or from the keys of earlier calls.
        """
        for state in states:
            expect_state(who, state)
        kinds = [state.get("keys") for state in states]
        if not kinds or not isinstance(kinds[0], dict) or any(one != kinds[0] for one in kinds):
            raise ValueError(
                f"{who}: expected states of a compressor of hvd_compress.distributed with the same keys, "
                f"got others"
            )
        for key, kind in kinds[0].items():
            _check_kind(f"{who}: {key}", kind)
        before = self.kinds
        if kinds[0] and before and list(before.items()) != list(kinds[0].items()):
            raise ValueError(
                f"{who}: expected the keys, dtypes and shapes of this compressor's calls, in their order, "
                f"got others: load a state before the first call"
            )
        with self.restored_on_error():
            if not kinds[0]:
                self.slots.clear()
            for key, kind in kinds[0].items():
                if key not in before:
                    self.add(key, kind)
            yield


def pairs(tensor: Any, key: Any) -> tuple[list[torch.Tensor], list[str]]:
    """The tensors of a call, and their keys.

    Raises:
        TypeError: ``tensor`` is neither a tensor nor a list of tensors, or there is not one string for each
            tensor as its key.
        ValueError: a key occurs twice.
    """
    if isinstance(tensor, torch.Tensor):
        tensors, keys = [tensor], [key]
    elif isinstance(tensor, Sequence) and not isinstance(tensor, str) and tensor:
        tensors = list(tensor)
        keys = [f"{key}.{i}" for i in range(len(tensors))]
        if not isinstance(key, str):
            keys = list(key) if isinstance(key, Iterable) else [key]
    else:
        got = (
            "an empty one" if isinstance(tensor, Sequence) and not tensor else type(tensor).__name__
        )
        raise TypeError(f"all_reduce.tensor: expected a tensor or a list of tensors, got {got}")
    if not all(isinstance(one, str) for one in keys) or len(keys) != len(tensors):
        raise TypeError(f"all_reduce.key: expected a string, or one for each tensor, got {key!r}")
    twice = sorted(one for one, count in Counter(keys).items() if count > 1)
    if twice:
        raise ValueError(f"all_reduce.key: expected distinct keys, got twice: {', '.join(twice)}")
    return tensors, keys


def parts(
    tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None
) -> tuple[dict[str, torch.Tensor], dict[str, list[int]]]:
    """This rank's parts of tensors that a mesh shares out, and the numbers of these parts, by key.

    Args:
        tensors: the tensors by key; plain ones are returned as they are.
        group: the ranks that reduce them; None is the default group.

    Raises:
        TypeError, ValueError: see :func:`hvd_compress.process_group.meshes.part_of`.
    """
    if not any(hasattr(tensor, "to_local") for tensor in tensors.values()):
        return dict(tensors), {}
    # Few scripts need PyTorch's DTensor, a long import.
    from hvd_compress.process_group import meshes

    own = {key: meshes.part_of(key, tensor, group) for key, tensor in tensors.items()}
    return own, {key: meshes.part_number(tensor) for key, tensor in tensors.items()}


def writable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; or, if ``torch.inference_mode`` has made it, an ordinary one in the same memory.

    Outside of that mode, and in another thread, PyTorch writes to no tensor that was made in it.
    """
    return from_dlpack(tensor) if tensor.is_inference() else tensor


def kind_of(tensor: torch.Tensor) -> Kind:
    """The dtype and shape that a key's tensors have in common."""
    return {"dtype": _dtype(tensor), "shape": list(tensor.shape)}


def _check_kind(who: str, kind: Any) -> None:
    kind = kind if isinstance(kind, dict) else {}
    shape, dtype = kind.get("shape"), getattr(torch, str(kind.get("dtype")), None)
    sizes = shape if isinstance(shape, list) else [None]
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"{who}: expected a floating-point dtype, got {kind.get('dtype')!r}")
    if not all(type(one) is int and one >= 0 for one in sizes):
        raise ValueError(f"{who}: expected a list of sizes for shape, got {shape!r}")


def _check(key: str, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{key}: expected a tensor, got {type(tensor).__name__}")
    if hasattr(tensor, "to_local"):
        raise TypeError(
            f"{key}: expected a tensor of this rank's own, got a {type(tensor).__name__}: hand over its "
            f"to_local()"
        )
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"{key}: expected a dense tensor, got layout {tensor.layout}: use to_dense()"
        )
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise TypeError(
            f"{key}: expected floating-point numbers of 16 bits or more, got {_dtype(tensor)}: use "
            f"torch.distributed.all_reduce for it"
        )
    if not tensor.is_contiguous() and any(
        n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        raise ValueError(
            f"{key}: expected a place in memory for each element, got an expanded tensor: use contiguous()"
        )


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
