"""Horovod's process sets, with the module of any framework, such as ``horovod.torch``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvd_compress.ranks.errors import ExchangeError


def registered(hvd: Any, process_set: Any | None) -> Any:
    """The process set of a compressor; None is all ranks.

    Raises:
        ExchangeError: Horovod is not initialized, or the process set is not registered.
    """
    if not hvd.is_initialized():
        raise ExchangeError("expected hvd.init() before a compressor is made, got no Horovod")
    chosen = hvd.global_process_set if process_set is None else process_set
    if chosen.process_set_id is None:
        raise ExchangeError(
            "expected a registered process set, got one unknown to Horovod: pass it to hvd.init() or "
            "hvd.add_process_set() first"
        )
    return chosen


def among(hvd: Any, known: dict[int, list[int]], ranks: Sequence[int]) -> Any:
    """The process set of some of the job's ranks, which are in increasing order.

    Blocks until all of the job's ranks have called it, unless Horovod already knows the process set.
    ``known`` has the ranks of those that it knows, by their numbers.

    Raises:
        ExchangeError: Horovod does not take process sets now.
    """
    chosen = hvd.ProcessSet(ranks)
    for number, members in known.items():
        if list(members) == list(ranks):
            chosen.process_set_id = number
            return chosen
    try:
        hvd.add_process_set(chosen)
    except ValueError as error:
        raise ExchangeError(
            f"expected a Horovod that takes process sets, got: {error} Or pass "
            f"hvd.ProcessSet({ranks}) to hvd.init()."
        ) from None
    return chosen
