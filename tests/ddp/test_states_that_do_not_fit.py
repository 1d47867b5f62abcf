"""States that were altered: each is loaded as it is, or refused by name with nothing changed."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hvd_compress.ddp as hvdc
import hvd_compress.distributed as of_all_reduce
from hvd_compress.codecs import ErrorFeedback, OneBit
from tests.ddp.probes import Probe, distributed, exchange
from tests.ranks import on_ranks
from tests.torch_models import targets

SHAPES = {"a": (40, 70), "b": (3000,)}

_GONE = object()

_OTHERS = (
    _GONE,
    None,
    "1",
    -1,
    0,
    2.5,
    math.nan,
    math.inf,
    2**70,
    True,
    [],
    {"x": 1},
    torch.ones(3),
)
"""The values that replace each field."""


def _altered(whole: Any) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    """Each field's path, what replaces it, and the whole with that."""
    for path, value in list(_fields(whole)):
        others = list(_OTHERS)
        if isinstance(value, torch.Tensor):
            nan = value.clone()
            nan.view(-1)[-1:] = math.nan
            others += [nan, value.to("meta"), value[:-1], value.view(1, -1), value.int()]
            others += [value.to_sparse(), value.double()]
        for other in others:
            changed = copy.deepcopy(whole)
            place = changed
            for key in path[:-1]:
                place = place[key]
            if other is _GONE:
                del place[path[-1]]
            else:
                place[path[-1]] = other
            yield path, other, changed


def _fields(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if path:
        yield path, value
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _fields(one, (*path, key))


def _alike(left: Any, right: Any) -> bool:
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_alike(left[key], right[key]) for key in left)
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.shape == right.shape and torch.equal(left.double(), right.double())
    return bool(left == right)


def _check(compressor: Any, state: dict[str, Any]) -> None:
    before, loaded, count = copy.deepcopy(compressor.state_dict()), 0, 0
    for path, other, changed in _altered(state):
        count += 1
        try:
            compressor.load_state_dict(changed)
        except (TypeError, ValueError) as error:
            named = [str(key) for key in path if key not in ("tensors", "keys", "owned")]
            assert not named or any(name in str(error) for name in named), (path, other, error)
            if len(path) > 2 and path[0] == "tensors":
                assert path[1] in str(error), (path, other, error)
            assert _alike(compressor.state_dict(), before), (path, other)
        else:
            loaded += 1
            got = {key: compressor.state_dict()[key] for key in changed if key != "member"}
            assert _alike(got, {key: changed[key] for key in got}), (path, other)
            compressor.load_state_dict(before)
    assert count > 200
    assert 0 < loaded < count / 3


@on_ranks(2, launcher="torchrun")
def test_every_field_of_a_state() -> None:
    ddp, compressor = distributed(
        Probe(SHAPES), OneBit(), ErrorFeedback(), exchange="two_shot", owner_step=hvdc.AdaGrad()
    )
    for step in range(2):
        exchange(ddp, targets(SHAPES, dist.get_rank(), step))
    _check(compressor, copy.deepcopy(compressor.state_dict()))
    exchange(ddp, targets(SHAPES, dist.get_rank(), 2))


@on_ranks(2, launcher="torchrun")
def test_every_field_of_the_state_of_an_all_reduce() -> None:
    compressor = of_all_reduce.Compressor(OneBit(), exchange="two_shot", threshold=0)
    tensors = targets(SHAPES, dist.get_rank(), 0)
    of_all_reduce.all_reduce(list(tensors.values()), compressor, key=list(tensors))
    _check(compressor, copy.deepcopy(compressor.state_dict()))


@on_ranks(2, launcher="torchrun")
def test_every_field_of_the_states_of_a_job_of_another_size() -> None:
    ddp, compressor = distributed(Probe(SHAPES), OneBit(), ErrorFeedback(), exchange="two_shot")
    exchange(ddp, targets(SHAPES, dist.get_rank(), 0))
    states: list[Any] = [None, None]
    dist.all_gather_object(states, compressor.state_dict())
    before = copy.deepcopy(compressor.state_dict())
    for place in range(2):
        for path, other, changed in _altered(states[place]):
            given = [changed if rank == place else states[rank] for rank in range(2)]
            try:
                compressor.load_resized(given)
            except (TypeError, ValueError):
                assert _alike(compressor.state_dict(), before), (path, other)
            else:
                for one in compressor.state_dict()["tensors"].values():
                    assert one["residual"] is None or bool(one["residual"].isfinite().all())
                compressor.load_state_dict(before)


@on_ranks(2, launcher="torchrun")
def test_parts_that_overlap_are_refused() -> None:
    ddp, compressor = distributed(Probe(SHAPES), OneBit(), ErrorFeedback(), exchange="two_shot")
    exchange(ddp, targets(SHAPES, dist.get_rank(), 0))
    states: list[Any] = [None, None]
    dist.all_gather_object(states, compressor.state_dict())
    states[1]["tensors"]["b"]["owned"] = states[0]["tensors"]["b"]["owned"]
    with pytest.raises(ValueError, match="b: expected parts owned by the ranks that make up 3000"):
        compressor.load_resized(states)
