"""A comparison of the ranks' configurations that does not wait and that names the differences."""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from hvd_compress.process_group.collectives import Collectives, Over, contents, message
from hvd_compress.process_group.launcher import Line
from hvd_compress.ranks import agreement
from hvd_compress.ranks.errors import explained
from hvd_compress.ranks.values import check_lengths, deserialize

_LENGTH_BYTES = _NAME_BYTES = 8


_NOTE = (
    "Not all ranks have compared their settings before the first exchange: one of them has ended, or "
    "trains without the compressor; give it to the model on every rank"
)
"""An explanation that is added to PyTorch's error."""


class Agreement:
    """One comparison of the ranks' configurations.

    A gather needs messages of the same length, and configurations differ in length. So digests are sent
    first; only if they differ, the configurations are sent as well, to show what differs.

    Args:
        collectives: the collectives among the ranks.
        configuration: this rank's configuration, JSON-serializable.
        name: the name that this rank proposes for the agreement; None is a random name.

    Attributes:
        name: the name of the first rank; set by :meth:`settle`.
    """

    name: str

    def __init__(
        self, collectives: Collectives, configuration: dict[str, Any], name: str | None = None
    ) -> None:
        self._collectives = collectives
        self._content = _serialize(configuration)
        proposed = os.urandom(_NAME_BYTES) if name is None else bytes.fromhex(name)
        digest = _digest(self._content, collectives.meeting, proposed)
        self._digests, self._work = collectives.all_gather(digest)

    def settle(self) -> None:
        """Waits for the other ranks.

        Raises:
            ExchangeError: configurations differ (raised on every rank, with the difference).
        """
        with explained(_NOTE):
            self._work.wait()
        self.name = bytes(self._digests[0, -_NAME_BYTES:].tolist()).hex()
        lengths = _lengths_if_different(self._digests[:, :-_NAME_BYTES])
        if lengths:
            padded = message(self._content, max(lengths), self._collectives.meeting)
            told, work = self._collectives.all_gather(padded)
            work.wait()
            _check(told, lengths)


def compare_in_turn(line: Line, configuration: dict[str, Any], over: Over) -> None:
    """The same comparison in the order of launch tickets, without waiting; more comparisons may follow.

    The next comparison in the line starts when this one has ended and ``over`` has returned.

    Args:
        line: a line that carries only comparisons; all ranks take its tickets in the same order.
        configuration: this rank's configuration, JSON-serializable.
        over: a function that any thread calls once, with None, or on every rank with an
            :class:`ExchangeError` that names the difference.
    """
    content = _serialize(configuration)
    asked, told = line.ticket(), line.ticket()

    def end(error: Exception | None) -> None:
        over(error)
        told.end(error)

    def gather(
        ranks: Collectives, sent: torch.Tensor, then: Callable[[torch.Tensor], None]
    ) -> None:
        rows, work = ranks.all_gather(sent)

        def arrived(error: Exception | None) -> None:
            try:
                if error is not None:
                    raise error
                then(rows)
            except Exception as problem:
                end(problem)

        ranks.when_over(work, arrived)

    def compare(digests: torch.Tensor) -> None:
        lengths = _lengths_if_different(digests)
        if not lengths:
            end(None)
            return

        def tell(ranks: Collectives) -> None:
            padded = message(content, max(lengths), ranks.meeting)
            gather(ranks, padded, lambda rows: _check(rows, lengths))

        told.start(tell, end)

    asked.start(lambda ranks: gather(ranks, _digest(content, ranks.meeting), compare), end)


_lines: weakref.WeakKeyDictionary[dist.ProcessGroup, Line] = weakref.WeakKeyDictionary()
"""The line of the comparisons among the ranks of a process group, by this group."""


def line_of(collectives: Collectives) -> Line | None:
    """The line that :func:`make_line` has made in a group of its own among the same ranks, or None."""
    return _lines.get(collectives.group) if type(collectives) is Collectives else None


def make_line(collectives: Collectives) -> Line:
    """Makes the line for all comparisons among some ranks, in a process group of its own.

    The thread of the process group starts comparisons that had to wait for their turn. In the script's own
    group, they would get between its collectives, at a place that depends on time. On devices, the caller's
    thread starts them, so that they stay in the given group.

    Every rank calls it; waits for the other ranks. Later calls return the same line.
    """
    made = line_of(collectives)
    if made is None:
        made = Line(collectives.among(range(collectives.size)))
        if type(collectives) is Collectives:
            _lines[collectives.group] = made
    return made


def forget_line(collectives: Collectives) -> None:
    """Forgets a line that may be lost, so that :func:`make_line` makes another; every rank calls it."""
    _lines.pop(collectives.group, None)


def _serialize(configuration: dict[str, Any]) -> bytes:
    return json.dumps(configuration, sort_keys=True).encode()


def _digest(content: bytes, device: torch.device, name: bytes = b"") -> torch.Tensor:
    length = len(content).to_bytes(_LENGTH_BYTES, "little")
    digest = length + hashlib.sha256(content).digest() + name
    return message(digest, len(digest), device)


def _lengths_if_different(digests: torch.Tensor) -> list[int]:
    """The lengths of the ranks' configurations, or an empty list if these are the same."""
    rows = [bytes(row.tolist()) for row in digests]
    if len(set(rows)) == 1:
        return []
    lengths = [int.from_bytes(row[:_LENGTH_BYTES], "little") for row in rows]
    check_lengths(lengths)
    return lengths


def _check(told: torch.Tensor, lengths: Sequence[int]) -> NoReturn:
    """Raises an :class:`ExchangeError` that names the difference between the configurations."""
    agreement.compare(deserialize(contents(told, lengths)))
    raise AssertionError("expected a setting that differs, as digests do, got none")
