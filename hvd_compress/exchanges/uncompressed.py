"""The exchange of gradients that no codec encodes: the framework's own sum over the ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvd_compress.exchanges.base import ByRank, Exchange
from hvd_compress.exchanges.comm import Comm, Exchanging
from hvd_compress.exchanges.simulation import Ranks
from hvd_compress.exchanges.steps import Computation, Gradient, Steps, all_reduce


def steps(gradient: Gradient) -> Steps:
    """An ``all_reduce`` of the gradient itself, after the cast, if there is one."""
    width = gradient.cast_bytes or gradient.element_bytes
    cast = gradient.count if width != gradient.element_bytes else 0
    return Computation(encoded=cast), all_reduce(gradient.count, width), Computation(decoded=cast)


def reference(ranks: Ranks, name: str, gradients: ByRank, scale: float) -> np.ndarray:
    """The result on every rank; frameworks may add in another order."""
    return ranks.total(gradients) * np.float32(scale)


def run(batch: Any, comm: Comm) -> Exchanging:
    """Adds the ``values`` of a batch, such as :class:`hvd_compress.engine.uncompressed.Uncompressed`."""
    batch.values = yield comm.all_reduce(batch.values)


EXCHANGE = Exchange(("all",), steps, reference, run, residuals=False)
