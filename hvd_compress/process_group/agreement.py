"""A comparison of the ranks' configurations that does not wait and that names the differences."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import weakref
from typing import Any

import torch.distributed as dist

from hvd_compress.engine.run import Content, Run
from hvd_compress.exchanges.comm import Comm, Group, Scope, Sending
from hvd_compress.process_group.collectives import Collectives, Over, contents, message
from hvd_compress.process_group.driver import Driver
from hvd_compress.ranks import agreement
from hvd_compress.ranks.errors import explained
from hvd_compress.ranks.values import check_lengths, deserialize

_LENGTH_BYTES = _NAME_BYTES = 8
_STAGES: tuple[Scope, Scope] = "all", "all"

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
        proposed = os.urandom(_NAME_BYTES) if name is None else bytes.fromhex(name)
        self._comparing = _compare(collectives, configuration, proposed)
        self._result, self._work = collectives.start(next(self._comparing))

    def settle(self) -> None:
        """Waits for the other ranks.

        Raises:
            ExchangeError: configurations differ (raised on every rank, with the difference).
        """
        with explained(_NOTE):
            self._work.wait()
        self.name = bytes(self._result[0, -_NAME_BYTES:].tolist()).hex()
        with contextlib.suppress(StopIteration):
            result, work = self._collectives.start(self._comparing.send(self._result))
            work.wait()
            self._comparing.send(result)


def _compare(collectives: Collectives, configuration: dict[str, Any], name: bytes = b"") -> Sending:
    """Compares configurations; this rank's digest is followed by a name of the same length everywhere."""
    content = json.dumps(configuration, sort_keys=True).encode()
    length = len(content).to_bytes(_LENGTH_BYTES, "little")
    digest = length + hashlib.sha256(content).digest()
    comm = Comm(Group(collectives.rank, collectives.size))
    own = digest + name
    digests = yield comm.all_gather(message(own, len(own), collectives.meeting))
    rows = [bytes(row.tolist()) for row in digests[:, : len(digest)]]
    if len(set(rows)) > 1:
        lengths = [int.from_bytes(row[:_LENGTH_BYTES], "little") for row in rows]
        check_lengths(lengths)
        told = yield comm.all_gather(message(content, max(lengths), collectives.meeting))
        agreement.compare(deserialize(contents(told, lengths)))
        raise AssertionError("expected a setting that differs, as digests do, got none")


class Comparisons:
    """Comparisons one after the other, without waiting.

    A comparison starts when the one before has ended and its ``over`` has returned. All ranks start them in
    the same order.

    Args:
        collectives: the ranks, in a process group that carries nothing else while comparisons run.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        group = Group(collectives.rank, collectives.size)
        self._driver = Driver(collectives, group, stages=len(_STAGES))

    def start(self, configuration: dict[str, Any], over: Over) -> None:
        """Starts the next comparison.

        Args:
            configuration: this rank's configuration, JSON-serializable.
            over: a function that any thread calls once, with None, or on every rank with an
                :class:`ExchangeError` that names the difference.
        """

        def comparing() -> Sending:
            yield from _compare(self._collectives, configuration)
            over(None)

        def failed(error: Exception | None) -> None:
            if error is not None:
                over(error)

        self._driver.submit(Run(comparing(), Content(deferred=False), _STAGES), failed)

    def close(self) -> None:
        """Closes this rank's connections in the process group."""
        self._driver.close()


_comparisons: weakref.WeakKeyDictionary[dist.ProcessGroup, Comparisons] = (
    weakref.WeakKeyDictionary()
)
"""The comparisons among the ranks of a process group, by this group."""


def known_comparisons(collectives: Collectives) -> Comparisons | None:
    """The comparisons that :func:`make_comparisons` has made among the same ranks, or None."""
    return _comparisons.get(collectives.group) if type(collectives) is Collectives else None


def make_comparisons(collectives: Collectives) -> Comparisons:
    """Makes the comparisons among some ranks, in a process group of their own.

    The thread of the process group starts comparisons that had to wait for their turn. In the script's own
    group, they would get between its collectives, at a place that depends on time. On devices, the caller's
    thread starts them, so that they stay in the given group.

    Every rank calls it; waits for the other ranks. Later calls return the same object.
    """
    made = known_comparisons(collectives)
    if made is None:
        made = Comparisons(collectives.among(range(collectives.size)))
        if type(collectives) is Collectives:
            _comparisons[collectives.group] = made
    return made


def forget_comparisons(collectives: Collectives) -> None:
    """Forgets comparisons whose order may be lost; every rank calls it."""
    _comparisons.pop(collectives.group, None)
