"""The state of a DiLoCo on a mesh in a checkpoint of torch.distributed.checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from hvd_compress.codecs.calls import expect_instance
from hvd_compress.diloco.common import as_placed
from hvd_compress.diloco.diloco import DiLoCo
from hvd_compress.engine.parameters import local
from hvd_compress.engine.state import unsent
from hvd_compress.process_group.device_collectives import collectives_of
from hvd_compress.process_group.stateful import under_own_names
from hvd_compress.process_group.values import problem_told, state_bytes, state_from, tell
from hvd_compress.ranks import agreement

_SHARED = "hvd_compress.diloco"
"""The name of what is the same on every rank: counts, settings and positions in the noise."""

_POSITION = ("step", "exchanges")
"""The numbers of a tensor in its compressor's state. A shard without elements is never encoded, so that
they may differ between shards."""

_EXACT = re.compile(r"worker (\d+), shard (\d+) of (\d+)$")
"""The name of a rank's part of the compressor's state, for a job with the same mesh."""

_PLACED = r"(common|unsent by worker (?P<worker>\d+)|due\.\d+|outer\.[^.]+)\.(?P<name>.*)"
"""The names of parts that a job with any mesh reads."""

Tree = dict[str, Any]
"""Tensors by names of several levels, which torch.distributed.checkpoint joins with dots."""


class ShardedState:
    """The state of all ranks of a :class:`DiLoCo` with a mesh, for ``torch.distributed.checkpoint``::

        dcp.save({"diloco": ShardedState(diloco)}, checkpoint_id=path)
        dcp.load({"diloco": ShardedState(diloco, path)}, checkpoint_id=path)

    Common parameters, the outer optimizer's state, averages that are due, and what each worker has not sent
    are saved as ``DTensor``, so that a job with another number of shards or workers reads its own parts.
    With the same mesh, each rank reads its compressor's state, and training goes on bit for bit. With
    another number of shards, what a rank owed as the owner of parts becomes a part of its residual. With
    another number of workers, residuals are shared out as in :meth:`DiLoCo.load_resized`. All ranks of the
    mesh save and load together.

    Args:
        diloco: this rank's object, made with a mesh.
        saved_at: to load, the folder of the checkpoint, or a ``StorageReader`` for it.

    Raises:
        TypeError, ValueError: the object is not a :class:`DiLoCo`, or was made without a mesh.
    """

    def __init__(self, diloco: DiLoCo, saved_at: Any | None = None) -> None:
        call = "ShardedState({})"
        expect_instance("ShardedState", diloco, DiLoCo, call, "DiLoCo(model, ..., mesh=mesh)")
        if diloco._shards is None:
            raise ValueError(
                "ShardedState: expected a DiLoCo that was made with a mesh, got one without: each rank "
                "saves its state_dict() by torch.save"
            )
        self._diloco = diloco
        self._own: Mapping[str, torch.Tensor] = diloco._common.own
        self._shards = diloco._shards
        self._shard = diloco._shards.number
        self._saved_at = saved_at

    def state_dict(self) -> Tree:
        """This rank's parts of everything; to load, empty parts of what the checkpoint has.

        Raises:
            ValueError: the outer optimizer's state does not have a number for each element, or one for all;
                the compressor has an owner step; or the checkpoint is that of another model.
            ExchangeError: something is wrong on another rank that saves; or the ranks of a worker differ in
                what has to be the same on every rank.
        """
        return self._to_save() if self._saved_at is None else self._to_load(self._saved_at)

    def load_state_dict(self, tree: Tree) -> None:
        """Continues from what was loaded.

        Raises:
            ValueError: the same as from :meth:`DiLoCo.load_state_dict` and :meth:`DiLoCo.load_resized`.
        """
        shared = state_from(tree[_SHARED])
        worker, workers = self._place()
        if shared["workers"] == workers:
            self._diloco.load_state_dict(self._state(tree, shared, worker))
        else:
            states = (self._state(tree, shared, one) for one in range(shared["workers"]))
            self._diloco.load_resized(states)

    def _place(self) -> tuple[int, int]:
        """The number of this rank's worker, and the number of workers."""
        group = self._diloco.compressor.process_group
        return dist.get_rank(group), dist.get_world_size(group)

    @property
    def _exact(self) -> str:
        """This rank's :data:`_EXACT`."""
        number, shards = self._shard
        return f"worker {self._place()[0]}, shard {number} of {shards}"

    def _to_save(self) -> Tree:
        worker, workers = self._place()
        group = self._diloco.compressor.process_group
        with problem_told(group):
            with self._shards.problem_told(), under_own_names():
                state = self._diloco.state_dict()
                common, compressor = state["common"], state["compressor"]
                fields, rest = self._outer(state["outer_optimizer"]["state"], common)
                tensors = compressor["tensors"]
                own = {
                    name: [*_described(tensors.get(name)), state["to_send"].get(name)]
                    for name in common
                }
                alike = {
                    "steps": state["steps"],
                    "history": state["history"],
                    "configuration": {
                        n: v for n, v in state["configuration"].items() if n != "shard"
                    },
                    "outer_optimizer": {**state["outer_optimizer"], "state": rest},
                    "due": {n: (due, *verdict) for n, (due, _, *verdict) in state["due"].items()},
                    "workers": workers,
                    "version": compressor["version"],
                    "seed": compressor["seed"],
                    "dtypes": {name: kind["dtype"] for name, kind in compressor["keys"].items()},
                }
            # Shards have groups, and names of groups, of their own.
            counts = list(state["history"].values())
            shown = {field: str(one) for field, one in {**alike, "history": counts}.items()}
            told = self._shards.tell([own, shown])
            agreement.compare([one for _, one in told])
        # Every worker has to stop where one does: the others would wait for it as they write.
        tell(collectives_of(group), None)
        kept: dict[str, torch.Tensor] = {}
        shared: dict[str, Any] = {**alike, "positions": {}, "to_send": {}}
        for name, values in common.items():
            steps, exchanges, keeps, sends = zip(*(one[name] for one, _ in told), strict=True)
            if name in tensors:
                shared["positions"][name] = max(steps), max(exchanges)
            if any(one is not None for one in sends):
                shared["to_send"][name] = any(sends)
            # Zeros where others have something: a job with other shards reads across these.
            if any(keeps):
                shape = tuple(values.shape)
                kept[name] = unsent(tensors[name], shape).view(shape).to(values.device)
        due = {
            str(number): dict(zip(self._diloco._fragments[number].names, averages, strict=True))
            for number, (_, averages, *_) in state["due"].items()
        }
        return {
            _SHARED: state_bytes(shared),
            "common": self._placed(common),
            "outer": {field: self._placed(values) for field, values in fields.items()},
            "due": {number: self._placed(averages) for number, averages in due.items()},
            f"unsent by worker {worker}": self._placed(kept),
            self._exact: state_bytes({"tensors": tensors, "to_send": state["to_send"]}),
        }

    def _outer(
        self, state: Mapping[int, Mapping[str, Any]], common: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, dict[str, torch.Tensor]], dict[int, dict[str, Any]]]:
        """The outer optimizer's numbers for each element, by field and name; and its other values."""
        fields: dict[str, dict[str, torch.Tensor]] = {}
        rest: dict[int, dict[str, Any]] = {}
        for name, number in self._diloco._common.numbers().items():
            for field, value in state.get(number, {}).items():
                if isinstance(value, torch.Tensor) and value.shape == common[name].shape:
                    fields.setdefault(field, {})[name] = value
                elif isinstance(value, torch.Tensor) and value.numel() > 1:
                    raise ValueError(
                        f"ShardedState: expected an outer optimizer whose state has a number for each "
                        f"element, or one for all, got {field} of shape {tuple(value.shape)} for {name}"
                    )
                else:
                    rest.setdefault(number, {})[field] = value
        return fields, rest

    def _to_load(self, saved_at: Any) -> Tree:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.storage import StorageReader

        reader = saved_at if isinstance(saved_at, StorageReader) else FileSystemReader(saved_at)
        saved = reader.read_metadata().state_dict_metadata
        prefix = next((key.removesuffix(_SHARED) for key in saved if key.endswith(_SHARED)), None)
        if prefix is None:
            raise ValueError(
                f"ShardedState: expected a checkpoint with one, got none in {saved_at}"
            )
        tree: Tree = {_SHARED: b""}
        worker, workers = self._place()
        names = [key.removeprefix(prefix) for key in saved]
        earlier = 1 + max(int(one[1]) for one in map(_EXACT.match, names) if one is not None)
        of_workers = range(earlier) if earlier != workers else [worker]
        if earlier == workers and self._exact in names:
            tree[self._exact] = b""
            of_workers = []
        for key, what in saved.items():
            found = re.fullmatch(re.escape(prefix) + _PLACED, key)
            if found and (found["worker"] is None or int(found["worker"]) in of_workers):
                above = tree
                for level in found[1].split("."):
                    above = above.setdefault(level, {})
                above[found["name"]] = self._empty(found["name"], what)
        return tree

    def _empty(self, name: str, saved: Any) -> torch.Tensor:
        if name not in self._own or saved.size != self._own[name].shape:
            found = tuple(self._own[name].shape) if name in self._own else "none"
            raise ValueError(
                f"ShardedState: expected this model's parameters, got {name} of shape "
                f"{tuple(saved.size)}, and the model has {found}"
            )
        part = torch.empty_like(local(self._own[name].detach()), dtype=saved.properties.dtype)
        return as_placed(part, self._own[name])

    def _state(self, tree: Tree, shared: dict[str, Any], worker: int) -> dict[str, Any]:
        """The :meth:`DiLoCo.state_dict` of an earlier worker's rank with the shards of this rank."""
        numbers, fragments = self._diloco._common.numbers(), self._diloco._fragments
        outer = {n: dict(values) for n, values in shared["outer_optimizer"]["state"].items()}
        for field, values in tree.get("outer", {}).items():
            for name, one in values.items():
                outer.setdefault(numbers[name], {})[field] = local(one)
        common = {name: local(one) for name, one in tree["common"].items()}
        own = {"tensors": self._unsent(tree, shared, worker), "to_send": shared["to_send"]}
        if self._exact in tree:
            own = state_from(tree[self._exact])
        return {
            "steps": shared["steps"],
            "history": shared["history"],
            "configuration": {**shared["configuration"], "shard": self._shard},
            "common": common,
            "outer_optimizer": {**shared["outer_optimizer"], "state": outer},
            "due": {
                # By name: a checkpoint has an order of its own.
                n: (due, [local(tree["due"][str(n)][k]) for k in fragments[n].names], *verdict)
                for n, (due, *verdict) in shared["due"].items()
            },
            "to_send": own["to_send"],
            "compressor": {
                "version": shared["version"],
                "seed": shared["seed"],
                "rank": worker,
                "size": shared["workers"],
                "member": "",
                "keys": {
                    name: {"dtype": dtype, "shape": list(common[name].shape)}
                    for name, dtype in shared["dtypes"].items()
                },
                "tensors": own["tensors"],
            },
        }

    def _unsent(self, tree: Tree, shared: dict[str, Any], worker: int) -> dict[str, Any]:
        """The compressor's tensors of a worker with other shards, in which no rank owns parts."""
        kept = tree.get(f"unsent by worker {worker}", {})
        return {
            name: {
                **dict(zip(_POSITION, position, strict=True)),
                "residual": local(kept[name]).reshape(-1) if name in kept else None,
                "residual_scale": 1.0,
                "owned": None,
                "factor": None,
            }
            for name, position in shared["positions"].items()
        }

    def _placed(self, parts: Mapping[str, torch.Tensor]) -> Tree:
        return {name: as_placed(part, self._own[name]) for name, part in parts.items()}


def _described(saved: dict[str, Any] | None) -> tuple[int, int, bool]:
    """A tensor's position, and whether something is not sent, by its part of the compressor's state."""
    if saved is None:  # No exchange had it yet.
        return 0, 0, False
    owned = saved["owned"]
    if owned is not None and owned["state"]:
        raise ValueError("ShardedState: expected a compressor without owner_step, got one with it")
    owes = owned is not None and owned["residual"] is not None
    return saved["step"], saved["exchanges"], owes or saved["residual"] is not None
