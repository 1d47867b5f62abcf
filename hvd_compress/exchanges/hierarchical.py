"""The hierarchical exchange: uncompressed within a host, compressed between hosts.

The traffic between hosts does not grow with the number of ranks on a host, which share the work. Each rank
of a host adds up its part of the host's gradients, encodes the average, and exchanges payloads with the
ranks that own this part on the other hosts. Then the ranks of the host send each other the payloads that
they received, so that all ranks decode the same payloads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hvd_compress.codecs import Codec
from hvd_compress.codecs.base import Shape
from hvd_compress.exchanges.base import ByRank, Exchange, Group
from hvd_compress.exchanges.layout import Owners
from hvd_compress.exchanges.limits import check_message
from hvd_compress.exchanges.shards import shared
from hvd_compress.exchanges.steps import Computation, Gradient, Message, Steps, part_bytes

if TYPE_CHECKING:
    from hvd_compress.engine.batch import Batch
    from hvd_compress.engine.comm import Comm, Exchanging
    from hvd_compress.exchanges.reference import Simulation


def steps(gradient: Gradient) -> Steps:
    """Ranks send uncompressed parts within a host, then payloads of averages between and within hosts."""
    hosts, local, width = gradient.hosts, gradient.hosts.local, gradient.element_bytes
    cut = shared(gradient.codec, gradient.shape)
    longest = max(cut.shards(local).lengths())
    mean, largest = part_bytes(cut, local, gradient.bits)
    return (
        Message("all_to_all", width * gradient.count / local, width * longest),
        Computation(added=gradient.count, encoded=gradient.count / local),
        Message("all_gather", mean, largest),
        Message("all_gather", hosts.count * mean, hosts.count * largest),
        Computation(decoded=hosts.count * gradient.count),
    )


def check(name: str, shape: Shape, codec: Codec, element_bytes: int, group: Group) -> None:
    """Raises ``ValueError`` if messages are too large."""
    assert group.hosts is not None
    cut, local = shared(codec, shape), group.hosts.local
    shards = cut.shards(local)
    largest = max(
        cut.count * element_bytes,
        local * max(shards.lengths()) * element_bytes,
        group.hosts.count * sum(shards.payload_bytes(cut.codec)),
    )
    check_message(name, largest, "exclude the tensor")


def owners(group: Group) -> Owners:
    """The ranks of a host own the parts of the host's average."""
    assert group.hosts is not None
    return Owners(group.hosts.local, group.hosts.local_rank(group.rank), group.hosts.local)


def reference(ranks: Simulation, name: str, gradients: ByRank, scale: float) -> np.ndarray:
    """What every rank receives."""
    result, hosts = np.empty_like(gradients[0]), ranks.hosts
    for local_rank, part, shape in ranks.parts(name):
        sent = []
        for owner in hosts.between(local_rank):
            host = [gradients[rank][part] for rank in hosts.within(owner)]
            average = ranks.total(host) * np.float32(1 / hosts.local)
            sent.append(ranks.send(name, average, ranks.owned[owner][name], owner, shape))
        result[part] = ranks.total(sent) * np.float32(scale * hosts.local)
    return result


def run(batch: Batch, comm: Comm) -> Exchanging:
    """Averages parts within the host, gathers payloads between hosts, and gathers those within the host."""
    plan, local, cross = batch.plan, comm.local, comm.cross
    owners, members = plan.owners, plan.members
    assert owners is not None
    own = plan.table("own", lambda: owners.message(members, comm.rank))
    size = own.layout.size
    every = plan.table("every", lambda: owners.gathered(members, cross.size * size))

    rows = yield local.all_to_all(*batch.parts_to_owners())
    message = batch.guard(lambda: batch.encode_averages(own, batch.average_parts(rows)), size)
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
