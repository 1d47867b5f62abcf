"""The order in which a process group's collectives start."""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist

from hvd_compress.distributed.collectives import Collectives
from hvd_compress.distributed.launcher import Line
from tests.ranks import on_ranks


def test_tickets_are_served_in_order() -> None:
    line = Line("the group")  # type: ignore[arg-type]
    tickets = [line.ticket() for _ in range(4)]
    begun: list[tuple[int, object]] = []

    def begin(ticket: int) -> Any:
        def call(group: object) -> None:
            begun.append((ticket, group))
            if ticket == 1:
                line.start(3, begin(3))  # As where a collective is over at once.

        return call

    line.start(tickets[2], begin(2))
    line.start(tickets[1], begin(1))
    assert not begun
    line.start(tickets[0], begin(0))
    assert begun == [(ticket, "the group") for ticket in range(4)]


# Alone: ranks that have made different numbers of groups cannot make another one.
@on_ranks(3, launcher="torchrun", alone=True)
def test_groups_for_further_stages_have_the_timeout_of_the_ranks_own() -> None:
    seconds = datetime.timedelta(seconds=77)
    group = dist.new_group(timeout=seconds)
    collectives = Collectives(group)
    for ranks in ([0, 1, 2], [dist.get_rank()]):
        made = collectives.among(ranks)._group
        assert made is not None and made is not group
        assert made._get_backend(torch.device("cpu")).options._timeout == seconds
