"""The exchanges as functions, with the names of :mod:`hvd_compress.exchanges.registry`."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module

from hvd_compress.engine.batch import Batch
from hvd_compress.engine.comm import Comm, Exchanging


@lru_cache
def exchange_of(name: str) -> Callable[[Batch, Comm], Exchanging]:
    """The exchange of the given name: the function of that name in the module of that name."""
    function: Callable[[Batch, Comm], Exchanging] = getattr(
        import_module(f"{__name__}.{name}"), name
    )
    return function
