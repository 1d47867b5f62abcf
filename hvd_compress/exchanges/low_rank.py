"""The sum of low-rank factors: ranks add up matrices whose product approximates the sum of gradients.

This is PowerSGD (Vogels, Karimireddy and Jaggi, 2019, algorithm 1): one step of a power iteration, which
begins with the last step's result. With the ranks' gradients ``M_i``, residuals included, and ``Q`` of the
step before:

1. Ranks orthogonalize the columns of ``Q``, and add up ``P = sum(M_i Q)`` in an allreduce.
2. Ranks orthogonalize the columns of ``P``, and add up ``Q = sum(M_i^T P)`` in an allreduce.
3. The sum of the gradients is approximated by ``P Q^T``; a rank's residual is ``M_i - P (M_i^T P)^T``.

The result of an allreduce is the same on every rank. What ranks compute from it consists of additions,
multiplications, divisions and square roots of single elements, in an order that shapes alone determine, so
that all ranks have the same bits, whatever processors they run on.

After the factors ``Q``, a message has a number for each gradient, which counts the ranks that used the
parameter; and the number of senders.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from hvd_compress.codecs import Codec, NoiseKey, PowerSGD
from hvd_compress.codecs.base import Shape, as_matrix
from hvd_compress.codecs.noise import uniform
from hvd_compress.exchanges.base import ByRank, Exchange
from hvd_compress.exchanges.comm import Array, Comm, Exchanging, Group
from hvd_compress.exchanges.simulation import Ranks
from hvd_compress.exchanges.steps import Computation, Gradient, Steps, all_reduce

LEAST = 1e-10
"""The part of a column's length that must be orthogonal to the columns before it. Less is rounding of
float64, which is not orthogonal to them: the approximation would count their directions twice."""

MAX_RANKS = 2**24
"""The largest number of ranks that float32 numbers count exactly."""


def steps(gradient: Gradient) -> Steps:
    """Ranks add up both factors, each after a multiplication with the gradient."""
    assert isinstance(gradient.codec, PowerSGD)
    rank, (rows, columns) = gradient.codec.rank, as_matrix(gradient.shape)
    return (
        Computation(encoded=gradient.count),
        all_reduce(rank * rows),
        Computation(added=gradient.count),
        all_reduce(rank * columns),
        Computation(decoded=gradient.count),
    )


def check(name: str, shape: Shape, codec: Codec, element_bytes: int, group: Group) -> None:
    """Raises ``ValueError`` if the codec is not PowerSGD, or there are too many ranks to count."""
    if not isinstance(codec, PowerSGD):
        raise ValueError(
            f"{name}: expected PowerSGD() for exchange='low_rank', got {codec!r}, which writes payloads: "
            f"use exchange='auto', or None for this tensor in layers="
        )
    if group.size > MAX_RANKS:
        raise ValueError(
            f"{name}: expected at most {MAX_RANKS} ranks for exchange='low_rank', got {group.size}"
        )


def first(shape: Shape, rank: int, seed: int, tensor: int) -> np.ndarray:
    """The ``Q`` of the first step, the same on every rank: shape=(columns, rank), float32.

    ``tensor`` is the tensor's id in the noise.
    """
    columns = as_matrix(shape)[1]
    words = uniform(columns * rank, NoiseKey(seed, 0, tensor))
    return (words - np.float32(2**23)).reshape(columns, rank)


def orthonormal(x: np.ndarray) -> np.ndarray:
    """The columns of a matrix, orthogonalized by Gram and Schmidt's method.

    A column that depends on those before it becomes zeros; see :data:`LEAST`.

    Args:
        x: the matrix, shape=(n, rank), float32.

    Returns:
        The columns, of length 1 or 0, shape=(n, rank), float32; computed in float64.
    """
    x = x.astype(np.float64)
    lengths = np.linalg.norm(x, axis=0)
    for k, before in enumerate(lengths):
        column, rest = x[:, k], x[:, k + 1 :]
        length = np.linalg.norm(column)
        column *= 0 if length < LEAST * before else 1 / (length or 1)
        rest -= np.outer(column, column @ rest)
    return x.astype(np.float32)


def reference(ranks: Ranks, name: str, gradients: ByRank, scale: float) -> np.ndarray:
    """The result on every rank; frameworks may multiply and add in another order."""
    assert isinstance(ranks.codec, PowerSGD)
    shape, kept = ranks.shapes[name], [residuals[name] for residuals in ranks.residuals]
    start = first(shape, ranks.codec.rank, ranks.seed, list(ranks.shapes).index(name))
    state = ranks.states.setdefault((0, name), {"factor": start})
    inputs = [
        ranks.compensate(g, h).reshape(as_matrix(shape))
        for g, h in zip(gradients, kept, strict=True)
    ]
    q = orthonormal(state["factor"])
    p = orthonormal(ranks.total([x @ q for x in inputs]))
    own = [x.T @ p for x in inputs]
    q = ranks.total(own)
    ranks.see(q)
    for gradient, residual, factor in zip(gradients, kept, own, strict=True):
        ranks.carry(gradient, residual, (p @ factor.T).reshape(-1), ranks.noise(name, 0))
    state["factor"] = np.where(q.any(0), q, start)
    return (p @ q.T).reshape(-1) * np.float32(scale)


class Factors(Protocol):
    """A bucket's gradients as products of low-rank factors; see :mod:`hvd_compress.engine.low_rank`."""

    def left(self) -> Array:
        """This rank's left factors, shape=(n,), float32."""
        ...

    def right(self, left: Array) -> Array:
        """This rank's right factors, flags and a 1, shape=(n,), float32; ``left`` is the ranks' sum."""
        ...

    def load(self, right: Array) -> None:
        """Takes the sum of the right factors, which is decoded at the end of the step."""
        ...


def run(factors: Factors, comm: Comm) -> Exchanging:
    """Adds up the left factors, orthogonalizes the sums, and adds up the right factors.

    A rank that fails adds zeros, and does not count itself among the senders.
    """
    left = yield comm.all_reduce(factors.left())
    right = yield comm.all_reduce(factors.right(left))
    factors.load(right)


EXCHANGE = Exchange(("all", "all"), steps, reference, run, check)
