"""Errors that every rank raises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class ExchangeError(RuntimeError):
    """The ranks do not do the same thing, or the framework was asked for what compression cannot do.

    The step is lost and gathers may be left pending: end the job.
    """


@contextmanager
def explained(note: str) -> Iterator[None]:
    """Adds a note to a framework's own error, often a timeout, which does not say what ranks waited for."""
    try:
        yield
    except RuntimeError as error:
        error.add_note(note)
        raise


def another_shard_failed() -> ExchangeError:
    """The error of ranks whose own shard was exchanged, while the exchange of another shard failed."""
    return ExchangeError(
        "expected averages of all shards, but the exchange of another one failed; the own error of its "
        "ranks says why"
    )
