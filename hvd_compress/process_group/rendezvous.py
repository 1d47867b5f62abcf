"""A rendezvous of the ranks between two steps, for calls that every rank has to make."""

from __future__ import annotations

import logging
from typing import Any

from hvd_compress.process_group.private import job_store
from hvd_compress.process_group.values import wait_until
from hvd_compress.ranks import agreement
from hvd_compress.ranks.errors import ExchangeError
from hvd_compress.ranks.values import deserialize, serialize

_WARN_AFTER = 10.0
"""The time in seconds after which a rank that waits logs which ranks it waits for."""

_log = logging.getLogger(__name__)


class Rendezvous:
    """Makes ranks wait for each other in the job's store until all of them have made the same call.

    A rank with other settings than the rest sends messages that the rest cannot receive. So ranks change
    their settings together. The store is not on the way of a step: ranks that make no such call do not use
    it.

    Args:
        name: the same name on every rank, which no other rendezvous of the job has.
        rank: this rank's number.
        size: the number of ranks.

    Attributes:
        step: the number of steps that have begun, which the owner counts.
    """

    step = 0

    def __init__(self, name: str, rank: int, size: int) -> None:
        self._name, self._rank, self._size = name, rank, size
        self._last = 0, 0  # The step, and the number of calls since it began.

    def wait(self, call: str, arguments: dict[str, Any], limit: float) -> None:
        """Waits until every rank has called this method between the same two steps.

        After ten seconds, a message in the log names the missing ranks.

        Args:
            call: the call that every rank has to make, for messages.
            arguments: the call's arguments, JSON-serializable.
            limit: the time in seconds after which this rank gives up.

        Raises:
            ExchangeError: the ranks' calls or arguments differ, or some ranks have not come within the
                limit of one that waited. Every rank that has called the method, or does so later between
                these steps, raises it.
        """
        step, calls = self._last
        self._last = self.step, calls + 1 if step == self.step else 0
        place = f"hvd_compress/{self._name}/{self._last}"
        store, ranks = job_store(), [f"{place}/{rank}" for rank in range(self._size)]
        came, verdict, left = f"{place}/came", f"{place}/verdict", f"{place}/left"

        def decide(error: str | None) -> None:
            # The first verdict counts, so that all ranks take the same one.
            store.compare_set(verdict, "", serialize(error).decode())

        def decided() -> bool:
            return bool(store.check([verdict]))

        def problem(seconds: float) -> str:
            missing = [rank for rank, key in enumerate(ranks) if not store.check([key])]
            return (
                f"{call}: expected a call on every rank between the same two steps, got none from rank "
                f"{agreement.ranges(missing)} in {seconds:g} seconds"
            )

        store.set(ranks[self._rank], serialize({"call": call, **arguments}).decode())
        if store.add(came, 1) == self._size:
            decide(_difference([store.get(key) for key in ranks]))
        first = min(_WARN_AFTER, limit)
        if not wait_until(decided, first):
            _log.warning("%s: still waiting", problem(first))
            if not wait_until(decided, limit - first):
                decide(f"{problem(limit)}: nothing has changed; call it on every rank")
        (error,) = deserialize([store.get(verdict)])
        if store.add(left, 1) == self._size:
            for key in (*ranks, came, verdict, left):
                store.delete_key(key)
        if error is not None:
            raise ExchangeError(error)


def _difference(contents: list[bytes]) -> str | None:
    """The difference between the ranks' calls, or None."""
    try:
        agreement.compare(deserialize(contents))
    except ExchangeError as error:
        return str(error)
    return None
