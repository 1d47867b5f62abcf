"""An exchange of norms, then of levels, each in an all_reduce."""

from __future__ import annotations

from hvd_compress.engine.batch import Batch
from hvd_compress.engine.comm import Comm, Exchanging
from hvd_compress.engine.levels import LevelBatch
from hvd_compress.exchanges import layout


def integer_sum(batch: Batch, comm: Comm) -> Exchanging:
    """Adds the ranks' levels, made with common norms, as integers (TernGrad, section 3.1).

    The flags are sent with the norms: their maximum is 1 if some rank used the gradient. A rank that fails
    adds zeros, and does not count itself in the word behind the levels.
    """
    levels = LevelBatch(batch, lambda: layout.levels(batch.plan.members, comm.size))
    norms = yield comm.all_reduce(levels.norms(), "max")
    words = yield comm.all_reduce(levels.encode(norms))
    levels.check(words)
    batch.load_by(lambda scale: levels.decode(words, scale), norms[None, levels.flags :])
