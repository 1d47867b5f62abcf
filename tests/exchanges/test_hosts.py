"""The ranks of a host, those with the same place on others, and jobs that are laid out otherwise."""

from __future__ import annotations

import pytest

from hvd_compress.codecs import Int8, OneBit
from hvd_compress.exchanges import hierarchical, hosts
from hvd_compress.exchanges.comm import Group
from hvd_compress.exchanges.hosts import Hosts


def test_groups_of_three_hosts_of_two() -> None:
    layout = Hosts(size=6, local=2)
    assert layout.count == 3
    assert layout.within(3) == [2, 3] and layout.between(3) == [1, 3, 5]
    assert layout.groups() == [[0, 1], [2, 3], [4, 5], [0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize(("size", "local"), ((1, 1), (4, 1), (4, 4), (12, 3), (64, 8)))
def test_every_rank_is_in_one_group_of_each_kind(size: int, local: int) -> None:
    layout = Hosts(size, local)
    within, between = layout.groups()[: layout.count], layout.groups()[layout.count :]
    for kind in (within, between):
        assert sorted(rank for group in kind for rank in group) == list(range(size))
    for rank in range(size):
        assert layout.within(rank) in within and layout.between(rank) in between
        assert set(layout.within(rank)) & set(layout.between(rank)) == {rank}


def test_ranks_agree_on_jobs_that_are_laid_out_host_by_host() -> None:
    told = {hosts.describe(rank, 6, rank % 2, 2, rank // 2) for rank in range(6)}
    assert told == {"2 ranks each, numbered host by host"}


@pytest.mark.parametrize(
    "places",
    (
        [(0, 2, 0), (1, 2, 0), (0, 1, 1)],  # two and one
        [(0, 1, 0), (0, 2, 1), (1, 2, 0)],  # one and two
        [(0, 2, 0), (0, 2, 1), (1, 2, 0), (1, 2, 1)],  # in turns
    ),
)
def test_ranks_differ_on_others(places: list[tuple[int, int, int]]) -> None:
    told = [hosts.describe(rank, len(places), *place) for rank, place in enumerate(places)]
    assert len(set(told)) > 1


def test_what_cannot_take_it() -> None:
    group = Group(0, 8, Hosts(size=8, local=2))
    hierarchical.check("w", (2**28,), Int8(), 4, group)
    with pytest.raises(ValueError, match="w: expected at most 2147483647 bytes in one message"):
        hierarchical.check("w", (2**29,), OneBit(), 4, group)


def test_every_payload_has_noise_of_its_own() -> None:
    all_hosts = hosts.Hosts(12, 4)
    pairs = [(rank, owner) for rank in range(12) for owner in range(4)]
    streams = [hierarchical.inner_stream(rank, owner, all_hosts) for rank, owner in pairs]
    assert len({*streams, *range(12)}) == len(pairs) + 12
