"""The parts of torch.distributed and autograd that PyTorch does not publish do what the package needs."""

from __future__ import annotations

import datetime
import weakref
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from hvd_compress.engine.autograd import after_backward, has_gradient_hook
from hvd_compress.process_group import private
from tests.ranks import on_ranks

CPU = torch.device("cpu")


@on_ranks(2, launcher="torchrun")
def test_a_group_has_its_order_timeout_and_backend_and_leaves_the_count_of_groups() -> None:
    c10d: Any = dist.distributed_c10d
    seconds = datetime.timedelta(seconds=77)
    parent = dist.new_group([0, 1], timeout=seconds)
    counted = c10d._world.group_count
    made, other = (private.make_group(parent, [1, 0], CPU) for _ in range(2))
    assert c10d._world.group_count == counted
    assert dist.get_process_group_ranks(made) == [1, 0]
    assert dist.get_rank(made) == 1 - dist.get_rank()
    assert made.group_name != other.group_name
    assert private.backend_for(made, CPU).options._timeout == seconds
    assert dist.get_backend_config(made) == dist.get_backend_config(parent)
    assert private.devices_of_gloo(private.backend_for(made, CPU)) >= 1
    with pytest.raises(RuntimeError):
        private.backend_for(made, torch.device("mps"))


@on_ranks(2, launcher="torchrun")
def test_a_forgotten_group_is_in_none_of_the_tables() -> None:
    world = dist.distributed_c10d._world
    made = private.make_group(dist.group.WORLD, [0, 1], CPU)  # type: ignore[arg-type]
    names = [name for name, kind in vars(type(world)).items() if isinstance(kind, property)]
    tables = {name: getattr(world, name) for name in names}
    by_group = {
        name: table
        for name, table in tables.items()
        if isinstance(table, dict) and name != "tags_to_pg"
    }
    assert {"pg_map", "pg_names", "pg_group_ranks", "pg_to_tag"} <= by_group.keys()
    for table in by_group.values():
        table.setdefault(made, None)
    names_before = len(world.pg_names)
    assert not private.is_unregistered(made)
    private.forget_group(made)
    assert private.is_unregistered(made)
    assert [name for name, table in by_group.items() if made in table] == []
    assert not any(made in tagged for tagged in world.tags_to_pg.values())
    assert len(world.pg_names) == names_before
    with pytest.raises(RuntimeError):
        torch._C._distributed_c10d._resolve_process_group(made.group_name)
    seen = weakref.ref(made)
    del made
    assert seen() is None


@on_ranks(2, launcher="torchrun")
def test_a_store_that_all_ranks_share() -> None:
    private.job_store().set(f"test_private/{dist.get_rank()}", "here")
    assert private.job_store().get(f"test_private/{1 - dist.get_rank()}") == b"here"


def test_a_future_that_raises_an_exception_that_cannot_be_pickled() -> None:
    def raising(_: object) -> NoReturn:
        raise ArithmeticError(lambda: None)

    future: torch.futures.Future = torch.futures.Future()
    private.fail(future, raising)
    assert future.done()
    with pytest.raises(ArithmeticError):
        future.wait()


def test_calls_at_the_end_of_a_backward_pass() -> None:
    told: list[str] = []
    parameter = torch.ones(3, requires_grad=True)
    assert not has_gradient_hook(parameter)

    def begin(_: torch.Tensor) -> None:
        after_backward(lambda: told.append("first"))
        after_backward(lambda: told.append("second"))
        told.append("within")

    handle = parameter.register_post_accumulate_grad_hook(begin)
    assert has_gradient_hook(parameter)
    parameter.sum().backward()
    assert told == ["within", "first", "second"]
    handle.remove()
    assert not has_gradient_hook(parameter)
    with pytest.raises(RuntimeError):
        after_backward(lambda: None)
