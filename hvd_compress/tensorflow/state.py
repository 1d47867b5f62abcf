"""A checkpoint's data besides variables: its rank, and what a job with another number of ranks inherits."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_compress.exchanges.shards import Shards, Shared, transpose, transpose_back
from hvd_compress.ranks import resize
from hvd_compress.tensorflow.slots import GraphSlot

_VERSION = 4
_OWNER = "owner"
_SLOTS = "slots"


class StateOwner(tf.train.experimental.PythonState):
    """The rank whose residuals a checkpoint holds; refuses those of another before anything is restored.

    Args:
        rank: this rank in the compressor's process set.
        size: the number of ranks in the process set.
        seed: the seed of the noise.
        describe: returns the rest of the checkpoint. ``orders`` has for each gradient how elements are
            ordered and cut, see :class:`hvd_compress.exchanges.shards.Shared`; its ``key``; the variable's
            name as ``of``; the number of its first ``call``, see :class:`GraphSlot`; and its
            ``residual_dtype``.
        restored: called with a checkpoint's content when it is this rank's.
        settings: ``exchange``, on which the residuals that are kept depend, and ``owners``, the number of
            ranks that share out a gradient: all, or 0. A compressor that plans describes the owners of each
            gradient in a list.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        seed: int,
        describe: Callable[[], dict[str, Any]],
        restored: Callable[[dict[str, Any]], None],
        **settings: Any,
    ) -> None:
        self.rank, self.size, self.seed = rank, size, seed
        self._expected = {"version": _VERSION, "rank": rank, "size": size, "seed": seed, **settings}
        self._describe, self._restored = describe, restored
        self._names: list[str] = []
        self._orders: list[dict[str, Any]] = []

    def serialize(self) -> str:
        """The text for a checkpoint."""
        return json.dumps({**self._expected, **self._describe()})

    def deserialize(self, string_value: str | bytes) -> None:
        """Compares a checkpoint's text with this rank and its settings.

        Raises:
            ValueError: the rank, number of ranks, seed, exchange, order of variables, or the order, parts
                or dtype of residuals differs; or some variables cannot be told apart.
        """
        got = json.loads(string_value)
        for name, want in self._expected.items():
            if got.get(name) != want:
                raise ValueError(
                    f"restore: expected a compressor's checkpoint of {name} {want}, got {got.get(name)}; "
                    f"each rank saves and restores one of its own; another number of ranks or another "
                    f"exchange needs those of all: load_resized()"
                )
        self._names = names_in_order([(of["of"], of["call"]) for of in got["orders"]], "restore")
        self._orders = got["orders"]
        for index, order in enumerate(self._describe()["orders"]):
            self.check(index, order)
        self._restored(got)

    def check(self, index: int, order: Mapping[str, Any]) -> None:
        """Raises ``ValueError`` if a gradient's description is not that in its place in the checkpoint."""
        name = order["of"]
        _check_order(self._names, index, name)
        for saved in self._orders[index : index + 1]:
            want, got = map(_form_of, (order, saved))
            if want != got:
                raise ValueError(
                    f"restore: expected residuals of {name} in {want}, got {got}: restore before the first "
                    f"step, with the codec and the residual_dtype of the job that wrote the checkpoint, or "
                    f"pass the checkpoints of all ranks to load_resized(), which converts residuals"
                )


def _form_of(order: Mapping[str, Any]) -> str:
    """The dtype and, where ranks own parts, the order and the cut of residuals, as text."""
    dtype = order.get("residual_dtype", "float32")
    if "row" not in order:
        return dtype
    columns = "columns" if order["transposed"] else "rows"
    return (
        f"{dtype} in the order of {columns}, cut at multiples of {order['row']} elements, from rank "
        f"{order['key']} on"
    )


@dataclass
class _Left:
    """A rank's saved state of one gradient.

    Attributes:
        residual: the residual of its own gradients.
        owners: the number of ranks that shared out the gradient: all, or 0.
        owned: the residual of the average of the part that it owned.
        exchanges: the number of exchanges of the gradient so far.
        row: the number of elements that stay together where ranks share out the gradient.
        transposed: rows and columns of the gradient, where residuals are in column order; otherwise None.
        key: the gradient's number in the order of owners' parts.
        of: the variable's name.
        call: see :class:`GraphSlot`.
        residual_dtype: the dtype of the residuals in the checkpoint.
    """

    residual: np.ndarray
    owners: int
    owned: np.ndarray
    exchanges: int
    row: int = 1
    transposed: tuple[int, int] | None = None
    key: int = 0
    of: str = ""
    call: int = 0
    residual_dtype: str = "float32"


class Inheritance:
    """The state with which gradients will start; here, zeros."""

    def give(self, slot: GraphSlot, *, owners: int, shared: Shared | None) -> None:
        """Hands over a gradient's part, if there is one, once.

        Args:
            slot: the slot to set.
            owners: the number of ranks that share out the gradient now.
            shared: the order and the parts in which they do; None where they do not.
        """


@dataclass
class Resized(Inheritance):
    """The state that another job left.

    Attributes:
        left: each rank's saved state of each gradient, by the gradient's position.
        heir: this rank, and the current number of ranks.
        names: the names of the variables, in the order of positions.
    """

    left: dict[int, list[_Left]]
    heir: StateOwner
    names: Sequence[str]

    def give(self, slot: GraphSlot, *, owners: int, shared: Shared | None) -> None:
        _check_order(self.names, slot.index, slot.variable_name)
        if slot.index not in self.left:
            slot.begin_anew()
            return
        old = self.left.pop(slot.index)
        residual, owned = _inherited(slot.index, old, self.heir, owners, shared)
        slot.begin_with(residual, owned)
        slot.exchanges.assign(old[0].exchanges)


def inheritance(checkpoints: Sequence[str], name: str, heir: StateOwner) -> Resized:
    """One rank's part of what all ranks of a job with another size or exchange had not sent.

    Follows the rule of :mod:`hvd_compress.ranks.resize`.

    Args:
        checkpoints: the paths of the checkpoints, one of each rank, in any order.
        name: the compressor's name in the checkpoint: ``"a"`` for ``tf.train.Checkpoint(a=compressor)``.
        heir: this rank, and the current number of ranks.

    Raises:
        ValueError: there is not one checkpoint of each rank, the seed or version differs, or the
            checkpoints are of different steps or exchanges.
    """
    states = sorted((_read(path, name) for path in checkpoints), key=lambda state: state["rank"])
    ranks = [state["rank"] for state in states]
    sizes = {state["size"] for state in states}
    if not states or ranks != list(range(len(states))) or sizes != {len(states)}:
        raise ValueError(
            f"load_resized: expected one checkpoint of each rank, got those of ranks {ranks} of {sizes}"
        )
    if any(state["seed"] != heir.seed for state in states):
        raise ValueError(
            f"load_resized: expected seed {heir.seed}, got {sorted({s['seed'] for s in states})}"
        )
    exchanges = [state["exchange"] for state in states]
    if len(set(exchanges)) > 1:
        raise ValueError(f"load_resized: expected checkpoints of one exchange, got {exchanges}")
    owners = [state["owners"] for state in states]
    known = {0, len(states)}
    if any(some != owners[0] or not known.issuperset(np.ravel(some)) for some in owners):
        raise ValueError(
            f"load_resized: expected gradients that all ranks share out in the same way or not at all, got "
            f"owners {owners}"
        )
    counts = [{i: kept.exchanges for i, kept in state["slots"].items()} for state in states]
    if any(count != counts[0] for count in counts):
        raise ValueError(f"load_resized: expected checkpoints of one step, got exchanges {counts}")
    for rank, state in enumerate(states):
        for i, left in state["slots"].items():
            _check_left(rank, left, [other["slots"][i] for other in states])
    slots = states[0]["slots"].values()
    names = names_in_order([(left.of, left.call) for left in slots], "load_resized")
    return Resized({i: [state["slots"][i] for state in states] for i in counts[0]}, heir, names)


def check_restored(slot: GraphSlot, owners: int, shared: Shared | None, rank: int) -> None:
    """Raises ``ValueError`` where residuals from a checkpoint cannot be a rank's, or would never be sent.

    Args:
        slot: the slot with the residuals.
        owners: the number of ranks that share out the gradient.
        shared: the order and the parts in which they do; None where they do not.
        rank: this rank.
    """
    count = None if slot.shape is None else math.prod(slot.shape)
    part = shared.shards(owners, slot.index).length(rank) if shared else 0
    own, owned = (kept.numpy().astype(np.float32) for kept in slot.kept)
    _check_numbers(slot.label, own, count, "its residual")
    _check_numbers(slot.label, owned, part, "the residual of the part that this rank owns")
    route = slot.route
    if (own.any() or owned.any()) and (route.uncompressed or not route.feedback.enabled):
        raise ValueError(
            f"{slot.label}: expected a route with error feedback, since its checkpoint has a residual, got "
            f"{route}, which would never send it: use the codec of the job that wrote the checkpoint, or "
            f"call reset() to discard all residuals"
        )


def _check_left(rank: int, left: _Left, every: Sequence[_Left]) -> None:
    """Raises ``ValueError`` unless a rank's residuals are finite and of the size of all ranks' gradient."""
    who, count = f"load_resized: {left.of} on rank {rank}", _count(every)
    _check_numbers(who, left.residual, count, "its residual")
    part = Shards(count, left.owners, left.key, left.row).length(rank) if left.owners else 0
    _check_numbers(who, left.owned, part, "the residual of the part that this rank owned")


def _check_numbers(who: str, numbers: np.ndarray, size: int | None, what: str) -> None:
    bad = np.count_nonzero(~np.isfinite(numbers))
    if bad or (size is not None and len(numbers) not in (0, size)):
        raise ValueError(
            f"{who}: expected {'' if size is None else f'{size} '}finite numbers as {what}, got "
            f"{len(numbers)}, {bad} of them Inf or NaN: use the checkpoint that this rank wrote"
        )


def _count(every: Sequence[_Left]) -> int:
    """The number of elements of a gradient, from all ranks' residuals."""
    owned = sum(len(left.owned) for left in every)
    return max(owned, *(len(left.residual) for left in every))


def names_in_order(variables: Sequence[tuple[str, int]], caller: str) -> list[str]:
    """The names of the variables of gradients, in the order of positions.

    Args:
        variables: for each gradient, the name of its variable and the number of the call in which it was
            first exchanged, see :class:`GraphSlot`.
        caller: the function that needs the names, for the message.

    Raises:
        ValueError: variables of different calls have the same name, so that only the order of their later
            calls could tell them apart.
    """
    calls: dict[str, int] = {}
    for name, call in variables:
        if calls.setdefault(name, call) != call:
            raise ValueError(
                f"{caller}: expected names that tell the variables of a compressor apart, got {name!r} "
                f"twice, in different calls of a tape or optimizer: give tf.Variable names, or exchange "
                f"the gradients of all in one call before the first save"
            )
    return [name for name, _ in variables]


def _check_order(names: Sequence[str], index: int, name: str) -> None:
    """Raises ``ValueError`` if a variable has another place than in a checkpoint; its name may be new."""
    if names.count(name) == 1 and names.index(name) != index:
        raise ValueError(
            f"restore: expected gradients for the first time in the order of the job that wrote the "
            f"checkpoint, {list(names)}, got that of {name} as number {index}: restore before the first "
            f"step, and exchange the same variables first"
        )


def _inherited(
    key: int,
    old: Sequence[_Left],
    heir: StateOwner,
    owners: int,
    shared: Shared | None,
) -> tuple[np.ndarray, np.ndarray]:
    """The residual of a gradient, and that of the part of its average that the heir owns."""
    count, none = _count(old), np.zeros(0, np.float32)
    residual, averages = resize.hand_on(
        [(left.residual, 1.0) if len(left.residual) else None for left in old],
        (_spread(left, count, rank) for rank, left in enumerate(old) if len(left.owned)),
        heir.size,
        heir.rank,
        divided=owners > 0,
    )

    def ordered(numbers: np.ndarray | None) -> np.ndarray:
        if numbers is None:
            return np.zeros(count, np.float32)
        numbers = transpose_back(numbers, old[0].transposed)
        return transpose(numbers, shared.transposed if shared else None)

    if not owners:
        return ordered(residual), none
    assert shared is not None
    part = Shards(count, owners, key, shared.row).of(heir.rank)
    return ordered(residual), ordered(averages)[slice(*part)]


def _spread(left: _Left, count: int, rank: int) -> np.ndarray:
    """The residual of the part that a rank owned, in its place among all elements of the gradient."""
    spread = np.zeros(count, np.float32)
    spread[slice(*Shards(count, left.owners, left.key, left.row).of(rank))] = left.owned
    return spread


def _read(path: str, name: str) -> dict[str, Any]:
    reader = tf.train.load_checkpoint(path)
    prefix = f"{name}/" if name else ""
    key = f"{prefix}{_OWNER}/.ATTRIBUTES/py_state"
    if not reader.has_tensor(key):
        raise ValueError(
            f"load_resized: expected a compressor called {name!r} in {path}, got none: pass the name that "
            f"tf.train.Checkpoint was given"
        )
    state = json.loads(reader.get_tensor(key))
    if state["version"] != _VERSION:
        raise ValueError(
            f"load_resized: expected checkpoints of version {_VERSION}, got {state['version']} in {path}"
        )
    slots: dict[int, _Left] = {}
    while reader.has_tensor(_variable(f"{prefix}{_SLOTS}/{len(slots)}/residual")):
        at = f"{prefix}{_SLOTS}/{len(slots)}"
        residual, owned, exchanges = (
            reader.get_tensor(_variable(f"{at}/{what}"))
            for what in ("residual", "owned", "exchanges")
        )
        residual, owned = (kept.astype(np.float32) for kept in (residual, owned))
        owners = state["owners"]
        if isinstance(owners, list):
            owners = owners[len(slots)]
        order = state["orders"][len(slots)] if state["orders"] else {}
        slots[len(slots)] = _Left(residual, owners, owned, int(exchanges), **order)
    return {**state, "slots": slots}


def _variable(path: str) -> str:
    return f"{path}/.ATTRIBUTES/VARIABLE_VALUE"
