"""The two-shot exchange: each rank averages a part of the tensor, and sends the average to all ranks.

The bytes that a rank sends do not grow with the number of ranks (1-bit SGD, section 3.1). Every rank
encodes each owner's part as a separate tensor, and sends the payload to the owner (first shot). The owner
decodes and averages the payloads, encodes the average again, and sends it to all ranks (second shot).

Owners average rather than add, because codecs with a fixed range would clip a sum; the factor that turns
the average into a sum is applied at the end.
"""

from __future__ import annotations

import numpy as np

from hvd_compress.codecs import Codec
from hvd_compress.codecs.base import Shape
from hvd_compress.exchanges.base import Batch, ByRank, Exchange
from hvd_compress.exchanges.comm import Array, Comm, Exchanging, Group
from hvd_compress.exchanges.layout import Owners
from hvd_compress.exchanges.limits import check_message
from hvd_compress.exchanges.shards import shared, transpose, transpose_back
from hvd_compress.exchanges.simulation import Ranks
from hvd_compress.exchanges.steps import Computation, Gradient, Message, Steps, part_bytes

MAX_RANKS = 65535
"""The largest number of ranks for which the noise has enough streams: see :func:`first_stream`."""


def first_stream(rank: int, owner: int, size: int) -> int:
    """The rank in the noise key of the payload from ``rank`` to ``owner``: ``rank * size + owner``.

    The elements of every part are numbered from 0, so that each part needs separate noise; the key's
    tensor and step are the same for all parts.
    """
    return rank * size + owner


def second_stream(owner: int, size: int) -> int:
    """The rank in the noise key of the payload from ``owner`` to all: ``size * size + owner``."""
    return size * size + owner


def steps(gradient: Gradient) -> Steps:
    """Ranks send each part to its owner, which averages the payloads of all ranks and sends the average."""
    part = part_bytes(shared(gradient.codec, gradient.shape), gradient.hosts.size, gradient.bits)
    return (
        Computation(encoded=gradient.count),
        Message("all_to_all", *part),
        Computation(decoded=gradient.count, encoded=gradient.count / gradient.hosts.size),
        Message("all_gather", *part),
        Computation(decoded=gradient.count),
    )


def check(name: str, shape: Shape, codec: Codec, element_bytes: int, group: Group) -> None:
    """Raises ``ValueError`` if there are too many ranks, or messages are too large."""
    if group.size > MAX_RANKS:
        raise ValueError(
            f"{name}: expected at most {MAX_RANKS} ranks for exchange='two_shot', got {group.size}"
        )
    cut = shared(codec, shape)
    sizes = cut.shards(group.size).payload_bytes(cut.codec)
    largest = max(sum(sizes), group.size * max(sizes))
    check_message(name, largest, "use a codec with fewer bits or exclude the tensor")


def owners(group: Group) -> Owners:
    """Every rank owns a part."""
    return Owners(group.size, group.rank, group.size)


def reference(ranks: Ranks, name: str, gradients: ByRank, scale: float) -> np.ndarray:
    """The result on every rank."""
    result, size = np.empty_like(gradients[0]), len(gradients)
    matrix = ranks.shared(name).transposed
    kept = [transpose(residuals[name], matrix) for residuals in ranks.residuals]
    for owner, part, shape in ranks.parts(name):
        sent = [
            ranks.send(name, gradient[part], residual[part], first_stream(rank, owner, size), shape)
            for rank, (gradient, residual) in enumerate(zip(gradients, kept, strict=True))
        ]
        average = ranks.total(sent) * np.float32(1 / size)
        ranks.run_owner_step(owner, name, average)
        residual, stream = ranks.owned[owner][name], second_stream(owner, size)
        again = ranks.send(name, average, residual, stream, shape)
        result[part] = again * np.float32(scale * size)
    for residuals, one in zip(ranks.residuals, kept, strict=True):
        residuals[name] = transpose_back(one, matrix)
    return result


def run(batch: Batch, comm: Comm) -> Exchanging:
    """Sends parts to their owners, averages there, and gathers the averages."""
    plan, rank, size = batch.plan, comm.rank, comm.size
    owners, members = plan.owners, plan.members
    assert owners is not None
    parts = plan.table(
        "parts", lambda: owners.sections(members, lambda owner: first_stream(rank, owner, size))
    )
    received = plan.table("received", lambda: owners.received(members))
    own = plan.table("own", lambda: owners.message(members, second_stream(rank, size)))
    length = own.layout.size
    every = plan.table("every", lambda: owners.gathered(members, length))

    def average(rows: Array) -> Array:
        return batch.guard(
            lambda: batch.encode_averages(own, batch.average(received, rows)), length
        )

    rows = yield from batch.two_shots(comm, batch.encode(parts), average, parts, own, every)
    flags = rows[:, own.layout.flags :]
    batch.load(every, rows.view(1, -1), lambda piece, row: piece.offset // length, flags)


EXCHANGE = Exchange(("all", "all"), steps, reference, run, check, owners, remainders=("all", "all"))
