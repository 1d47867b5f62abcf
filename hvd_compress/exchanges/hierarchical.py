"""The hierarchical exchange: compressed between hosts, and uncompressed or by another codec within a host.

The traffic between hosts does not grow with the number of ranks on a host, which share the work. Each rank
of a host adds up its part of the host's gradients, encodes the average, and exchanges payloads with the
ranks that own this part on the other hosts. Then the ranks of the host send each other the payloads that
they received, so that all ranks decode the same payloads.

With a codec for the inside of hosts, ranks send each other payloads of parts in place of the parts, as in
the first shot of :mod:`hvd_compress.exchanges.two_shot`. A rank's residual holds what that codec did not
send of the rank's own gradient, and an owner's residual what the other codec did not send of the average.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hvd_compress.codecs import Codec
from hvd_compress.codecs.base import Shape
from hvd_compress.exchanges.base import Batch, ByRank, Exchange
from hvd_compress.exchanges.comm import Array, Comm, Exchanging, Group
from hvd_compress.exchanges.hosts import Hosts
from hvd_compress.exchanges.layout import Owners
from hvd_compress.exchanges.limits import check_message
from hvd_compress.exchanges.shards import shared, transpose, transpose_back
from hvd_compress.exchanges.simulation import Ranks
from hvd_compress.exchanges.steps import Computation, Gradient, Message, Steps, part_bytes


def inner_stream(rank: int, owner: int, hosts: Hosts) -> int:
    """The rank in the noise key of the payload from ``rank`` to an owner on its host, by local rank.

    The payloads between hosts have the ranks' own numbers.
    """
    return hosts.size + rank * hosts.local + owner


def steps(gradient: Gradient) -> Steps:
    """Ranks send parts within a host, then payloads of averages between and within hosts."""
    hosts, local, width = gradient.hosts, gradient.hosts.local, gradient.element_bytes
    cut = shared(gradient.codec, gradient.shape)
    longest = max(cut.shards(local).lengths())
    mean, largest = part_bytes(cut, local, gradient.bits)
    first: Steps = (
        Message("all_to_all", width * gradient.count / local, width * longest),
        Computation(added=gradient.count, encoded=gradient.count / local),
    )
    if gradient.inner is not None:
        parts = part_bytes(replace(cut, codec=gradient.inner), local, None)
        first = (
            Computation(encoded=gradient.count),
            Message("all_to_all", *parts),
            Computation(decoded=gradient.count, encoded=gradient.count / local),
        )
    return (
        *first,
        Message("all_gather", mean, largest),
        Message("all_gather", hosts.count * mean, hosts.count * largest),
        Computation(decoded=hosts.count * gradient.count),
    )


def check(
    name: str,
    shape: Shape,
    codec: Codec,
    element_bytes: int,
    group: Group,
    inner: Codec | None = None,
) -> None:
    """Raises ``ValueError`` if messages are too large."""
    assert group.hosts is not None
    cut, local = shared(codec, shape), group.hosts.local
    shards = cut.shards(local)
    parts = [n * element_bytes for n in shards.lengths()]
    sent = cut.count * element_bytes
    if inner is not None:
        parts = shards.payload_bytes(inner)
        sent = sum(parts)
    largest = max(
        sent, local * max(parts), group.hosts.count * sum(shards.payload_bytes(cut.codec))
    )
    check_message(name, largest, "exclude the tensor")


def owners(group: Group) -> Owners:
    """The ranks of a host own the parts of the host's average."""
    assert group.hosts is not None
    return Owners(group.hosts.local, group.hosts.local_rank(group.rank), group.hosts.local)


def reference(ranks: Ranks, name: str, gradients: ByRank, scale: float) -> np.ndarray:
    """The result on every rank."""
    result, hosts, inner = np.empty_like(gradients[0]), ranks.hosts, ranks.inner
    matrix = ranks.shared(name).transposed
    kept = [transpose(residuals[name], matrix) for residuals in ranks.residuals if inner]
    for local_rank, part, shape in ranks.parts(name):
        sent = []
        for owner in hosts.between(local_rank):
            host = [gradients[rank][part] for rank in hosts.within(owner)]
            for number, rank in enumerate(hosts.within(owner) if inner else ()):
                residual, stream = kept[rank][part], inner_stream(rank, local_rank, hosts)
                host[number] = ranks.send(name, host[number], residual, stream, shape, inner)
            average = ranks.total(host) * np.float32(1 / hosts.local)
            sent.append(ranks.send(name, average, ranks.owned[owner][name], owner, shape))
        result[part] = ranks.total(sent) * np.float32(scale * hosts.local)
    for residuals, one in zip(ranks.residuals, kept, strict=False):
        residuals[name] = transpose_back(one, matrix)
    return result


def run(batch: Batch, comm: Comm) -> Exchanging:
    """Averages parts within the host, gathers payloads between hosts, and gathers those within the host."""
    plan, local, cross = batch.plan, comm.local, comm.cross
    owners, members, hosts = plan.owners, plan.members, plan.group.hosts
    assert owners is not None and hosts is not None
    own = plan.table("own", lambda: owners.message(members, comm.rank))
    size = own.layout.size
    every = plan.table("every", lambda: owners.gathered(members, cross.size * size))

    received = None
    if plan.inner:
        received = plan.table("received", lambda: owners.received(members, inner=True))
        parts = plan.table(
            "parts",
            lambda: owners.sections(
                members, lambda owner: inner_stream(comm.rank, owner, hosts), inner=True
            ),
        )
        rows = yield local.all_to_all(batch.encode(parts), parts.layout.sections)
    else:
        rows = yield local.all_to_all(*batch.parts_to_owners())

    def encode() -> Array:
        if received is None:
            return batch.encode_averages(own, batch.average_parts(rows))
        first = hosts.within(comm.rank)[0]
        return batch.encode_averages(own, batch.average(received, rows, first))

    message = batch.guard(encode, size)
    payloads = yield from batch.all_gather(cross, message, own)
    blocks = yield local.all_gather(payloads.reshape(-1))
    # A host's payloads of a part stand in one block; row h begins with host h's payload of the first.
    by_host = blocks.as_strided((cross.size, blocks.numel() - (cross.size - 1) * size), (size, 1))
    flags = blocks.view(local.size, cross.size, size)[..., own.layout.flags :]
    batch.load(
        every,
        by_host,
        lambda piece, host: host * local.size + piece.offset // (cross.size * size),
        flags.transpose(0, 1).flatten(0, 1),
    )


EXCHANGE = Exchange(
    ("local", "cross", "local"),
    steps,
    reference,
    run,
    check,
    owners,
    residuals=False,
    remainders=("cross",),
)
