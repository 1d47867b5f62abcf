"""The hierarchical exchange: compressed between hosts, and uncompressed or by another codec within."""

from __future__ import annotations

from dataclasses import replace

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_compress.exchanges import hierarchical, hosts
from hvd_compress.exchanges.hosts import Hosts
from hvd_compress.ranks.counters import Counters
from hvd_compress.tensorflow.buckets import GraphBucket
from hvd_compress.tensorflow.coder import Coder, Cut
from hvd_compress.tensorflow.collectives import GraphCollectives
from hvd_compress.tensorflow.exchanges.base import GraphExchange
from hvd_compress.tensorflow.slots import GraphSlot


class Hierarchical(GraphExchange):
    """Averages gradients within hosts first: traffic between hosts does not grow with the ranks in a host.

    The ranks of a host share the work. A graph holds the numbers of its process sets, so they have to exist
    before anything is traced: all ranks make this exchange at the same time.

    Args:
        collectives: the collectives among all ranks of the job.
        coder: this rank's encoder and decoder.

    Raises:
        ValueError: the collectives are among some ranks of the job only.
        ExchangeError: hosts differ in size, ranks are not numbered host by host, a rank does not make the
            exchange, or Horovod does not accept process sets; raised on every rank that makes one.
    """

    common = hierarchical.EXCHANGE
    content = "numbers"
    hosts: Hosts

    def __init__(self, collectives: GraphCollectives, coder: Coder) -> None:
        super().__init__(collectives, coder)
        if collectives.size != hvd.size():
            raise ValueError(
                f"Compressor.process_set: expected None for exchange='hierarchical', got a set of "
                f"{collectives.size} of {hvd.size()} ranks: hosts are those of the whole job"
            )
        self.hosts = Hosts(hvd.size(), hvd.local_size())
        self._local_rank = hvd.local_rank()
        self._agree()
        self._within: GraphCollectives | None = None
        self._between: GraphCollectives | None = None
        for ranks in self.hosts.groups():
            if len(ranks) == 1:
                continue  # Nothing to send.
            group = collectives.among(ranks)
            if ranks == self.hosts.within(collectives.rank):
                self._within = group
            if ranks == self.hosts.between(collectives.rank):
                self._between = group

    def count(self, counters: Counters, gathered: int, distributed: int, kept: int) -> None:
        """See :class:`GraphExchange`; first messages stay within the host."""
        before = counters.wire_bytes
        if self._within is not None:
            counters.add_alltoall(distributed, kept)
            counters.add_allgather(self.hosts.local, self.hosts.count * gathered)
        counters.local_bytes += counters.wire_bytes - before
        if self._between is not None:
            counters.add_allgather(self.hosts.count, gathered)

    def cut(self, slot: GraphSlot) -> Cut:
        (shards, _), rank = self._shards(slot), self.group.rank
        parts = [shards.of(owner) for owner in range(shards.size)]
        streams = [
            hierarchical.inner_stream(rank, owner, self.hosts) for owner in range(shards.size)
        ]
        return Cut(
            self.shared(slot), streams=streams, parts=parts, own=self._local_rank, own_stream=rank
        )

    def send(self, bucket: GraphBucket, message: tf.Tensor, sizes: tf.Tensor) -> tf.Tensor:
        """See :class:`GraphExchange`; returns the payloads of all hosts for each local rank."""
        label = bucket.label
        if self._within is not None:
            message = self._within.all_to_all(message, sizes, f"{label}.within_host")
        message = self._average(bucket, message, self.hosts.local)
        if self._between is not None:
            length = self._length(bucket)
            message = self._between.all_gather_alike(message, length, f"{label}.between_hosts")
        if self._within is not None:
            message = self._within.all_gather(message, f"{label}.back_within_host")
        return message

    def decode(self, bucket: GraphBucket) -> tf.Operation:
        hosts, local = self.hosts.count, self.hosts.local
        return self._decode(bucket, "averages", copies=hosts, weight=local)

    def _length(self, bucket: GraphBucket) -> int | None:
        """The least number of bytes of a local rank's averages, where it is known."""
        shards, codec = self._shards(bucket.slots[0])
        return None if bucket.length is None else min(shards.payload_bytes(codec))

    def _agree(self) -> None:
        ranks = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank())
        what = "make a compressor with exchange='hierarchical'"
        self.collectives.compare_now({"hosts": hosts.describe(*ranks)}, "hosts", what)


class HierarchicalByTwoCodecs(Hierarchical):
    """The same, with the route's ``inner`` codec for the gradients within a host."""

    common = replace(hierarchical.EXCHANGE, residuals=True)
    content = "inner"
