"""The hierarchical exchange: uncompressed within a host, compressed between hosts."""

from __future__ import annotations

import math

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_compress.exchange import agreement, hosts
from hvd_compress.exchange.counters import Counters
from hvd_compress.exchange.errors import ExchangeError
from hvd_compress.exchange.hosts import Hosts
from hvd_compress.exchange.shards import Shards
from hvd_compress.tensorflow.coder import Coder, Encoded
from hvd_compress.tensorflow.collectives import Collectives
from hvd_compress.tensorflow.exchanges.base import Exchange
from hvd_compress.tensorflow.slots import Slot

_PATIENCE = 120.0
"""Seconds for the other ranks to make their compressors."""


class Hierarchical(Exchange):
    """What leaves a host does not depend on the number of its ranks, which share the work.

    A graph holds the numbers of its process sets, so that they are there before anything is traced: all
    ranks make this at the same time.

    Args:
        collectives: all ranks of the job.
        coder: what this rank encodes and decodes with.

    Raises:
        ValueError: some ranks of the job only.
        ExchangeError: on every rank that makes one, hosts of unequal size, ranks not numbered host by
            host, a rank that makes none, or a Horovod that takes no process sets.
    """

    has_residuals = False

    def __init__(self, collectives: Collectives, coder: Coder) -> None:
        super().__init__(collectives, coder)
        if collectives.size != hvd.size():
            raise ValueError(
                f"Compressor.process_set: expected None for exchange='hierarchical', got a set of "
                f"{collectives.size} of {hvd.size()} ranks: hosts are those of the whole job"
            )
        self._hosts = Hosts(hvd.size(), hvd.local_size())
        self._place = hvd.local_rank()
        self._agree()
        self._within: Collectives | None = None
        self._between: Collectives | None = None
        for ranks in self._hosts.groups():
            if len(ranks) == 1:
                continue  # Nothing to send.
            group = collectives.among(ranks)
            if ranks == self._hosts.within(collectives.rank):
                self._within = group
            if ranks == self._hosts.between(collectives.rank):
                self._between = group

    @property
    def owners(self) -> int:
        """See :attr:`Exchange.owners`."""
        return self._hosts.local

    def count(self, counters: Counters, gathered: int, distributed: int, kept: int) -> None:
        """See :meth:`Exchange.count`; the numbers stay in the host."""
        before = counters.wire_bytes
        if self._within is not None:
            counters.add_alltoall(distributed, kept)
            counters.add_allgather(self._hosts.local, self._hosts.count * gathered)
        counters.local_bytes += counters.wire_bytes - before
        if self._between is not None:
            counters.add_allgather(self._hosts.count, gathered)

    def check(self, slot: Slot) -> None:
        """See :meth:`Exchange.check`: parts are cut while tracing."""
        self._check_shape(slot)
        shards, codec = self._shards(slot), slot.route.codec
        hosts.check(slot.label, codec, shards, self._hosts, slot.dtype.size)

    def encode(
        self, slot: Slot, gradient: tf.Tensor, begun: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """See :meth:`Exchange.encode`: the message are numbers, for the owners of the host."""
        own = self._shards(slot).length(self._place)
        return self.coder.parts(slot, gradient, begun, parts=self._parts(slot), own=own)

    def send(
        self, slot: Slot, gradient: tf.Tensor, message: tf.Tensor, step: tf.Tensor
    ) -> tf.Tensor:
        """See :meth:`Exchange.send`: for each place on a host, the payloads of all hosts come back."""
        shards, width = self._shards(slot), slot.dtype.size
        length = shards.length(self._place)
        numbers = message
        if self._within is not None:
            sizes = [width * shards.length(place) for place in range(shards.size)]
            splits = tf.constant(sizes) * tf.cast(tf.size(message) > 0, tf.int32)
            numbers = self._within.distribute(message, splits, f"{slot.label}.within_host")
        payloads = self.coder.average(
            slot,
            numbers,
            step,
            length=length,
            stream=max(0, self.collectives.rank),
            ranks=shards.size,
            distributed=width * shards.count,
            kept=width * length,
            dtype=slot.dtype,
        )
        own = shards.payload_bytes(slot.route.codec)[self._place]
        if self._between is not None:
            payloads = self._between.gather_alike(payloads, own, f"{slot.label}.between_hosts")
        if self._within is not None:
            payloads = self._within.gather(payloads, f"{slot.label}.back_within_host")
        return payloads

    def decode(self, encoded: Encoded, reduced: tf.Tensor, scale: float) -> tf.Tensor:
        """See :meth:`Exchange.decode`."""
        return self.coder.decode(
            encoded,
            reduced,
            ranks=self._hosts.count,
            scale=scale * self._hosts.local,
            sum_scale=scale,
            parts=self._parts(encoded.slot),
        )

    def _agree(self) -> None:
        places = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank())
        line = agreement.serialize({"hosts": hosts.describe(*places)})
        lines = self.collectives.gather_now(line, "hosts", _PATIENCE)
        if lines is None:
            raise ExchangeError(
                f"expected all {self.collectives.size} ranks to make a compressor with "
                f"exchange='hierarchical' within {_PATIENCE:g} seconds of each other, got only some"
            )
        agreement.check(lines)

    def _shards(self, slot: Slot) -> Shards:
        assert slot.shape is not None
        return Shards(math.prod(slot.shape), self._hosts.local, slot.index)

    def _parts(self, slot: Slot) -> list[tuple[int, int]]:
        shards = self._shards(slot)
        return [shards.of(place) for place in range(shards.size)]
