"""The ranks that share a host, where the launcher does not name them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import hvd_compress.ddp as hvdc
from hvd_compress.process_group import environment
from hvd_compress.process_group.environment import Place, find_place, place_among
from tests.contract.cases import SHAPES, USUAL
from tests.ddp.probes import distributed, exchange
from tests.ranks import on_ranks
from tests.torch_models import Probe, targets


@pytest.mark.parametrize(
    ("names", "places"),
    (
        ("aabb", [(0, 2, 0), (1, 2, 0), (0, 2, 1), (1, 2, 1)]),
        ("aaa", [(0, 3, 0), (1, 3, 0), (2, 3, 0)]),
        ("abc", [(0, 1, 0), (0, 1, 1), (0, 1, 2)]),
        ("abab", [(0, 2, 0), (0, 2, 1), (1, 2, 0), (1, 2, 1)]),
    ),
)
def test_places_by_host_names(names: str, places: list[tuple[int, int, int]]) -> None:
    assert [place_among(list(names), rank) for rank in range(len(names))] == [
        Place(*place) for place in places
    ]


def _averages() -> list[torch.Tensor]:
    ddp, _ = distributed(Probe(SHAPES), *USUAL["hierarchical"], exchange="hierarchical")
    return list(exchange(ddp, targets(SHAPES, dist.get_rank(), 0)).values())


def _without_environment(monkeypatch: pytest.MonkeyPatch, hosts: str) -> None:
    for name in ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name)
    host = hosts[dist.get_rank()]
    monkeypatch.setattr(environment, "host_name", lambda: host)
    find_place()  # Replaces the names that an earlier test has left.
    dist.barrier()


@on_ranks(4, launcher="two nodes")
def test_host_names_give_the_same_bits_as_the_environment() -> None:
    expected = _averages()
    with pytest.MonkeyPatch.context() as monkeypatch:
        _without_environment(monkeypatch, "aabb")
        got = _averages()
    assert len(expected) > 1
    assert all(map(torch.equal, expected, got))


@on_ranks(4, launcher="two nodes")
def test_ranks_without_the_variables_beside_others_that_have_them() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        expected = find_place()
        monkeypatch.setattr(environment, "host_name", lambda: f"host {expected.host}")
        find_place()
        dist.barrier()
        if dist.get_rank() % 2:
            monkeypatch.delenv("GROUP_RANK")
        assert find_place() == expected
        dist.barrier()


@on_ranks(4, launcher="two nodes")
def test_hosts_that_no_hierarchy_fits() -> None:
    for hosts in ("aaab", "abab"):
        with pytest.MonkeyPatch.context() as monkeypatch:
            _without_environment(monkeypatch, hosts)
            with pytest.raises(hvdc.ExchangeError, match=r"hosts.*as local rank"):
                _averages()


@on_ranks(2, launcher="torchrun")
def test_ranks_of_one_machine_share_a_host() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name)
        assert find_place() == Place(dist.get_rank(), 2, 0)
        assert len(_averages()) > 1
