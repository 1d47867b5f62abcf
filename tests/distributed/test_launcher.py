"""The order in which a process group's collectives start."""

from __future__ import annotations

from typing import Any

from hvd_compress.distributed.launcher import Line


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
