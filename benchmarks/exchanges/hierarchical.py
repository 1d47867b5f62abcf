"""Uncompressed within a host, payloads between hosts."""

from __future__ import annotations

import horovod.torch as hvd
import numpy as np
import torch

from benchmarks.exchanges.base import Answer, Clock, Coded, Work
from hvd_compress.codecs import NoiseKey
from hvd_compress.exchange.hosts import Hosts
from hvd_compress.exchange.routing import Route
from hvd_compress.exchange.shards import Shards
from hvd_compress.kernels.oracle import OracleKernels
from hvd_compress.torch.collectives import Collectives
from hvd_compress.torch.exchanges import hierarchical
from hvd_compress.torch_common.encoder import Encoder
from hvd_compress.torch_common.executors import Executors
from hvd_compress.torch_common.slots import Slot


class Hierarchical(Coded):
    """The exchange of the compressors, as it is: needs ``HOROVOD_DYNAMIC_PROCESS_SETS=1``.

    What a rank encodes between two of its collectives is counted as transfer. Of the bytes, those that
    leave a host are counted.
    """

    parts = ("transfer", "decode")

    def prepare(self, collectives: Collectives, threads: int, elements: int) -> Work:
        """See :meth:`Exchange.prepare`."""
        encoder = Encoder(Executors(threads), 0, collectives.rank, None)
        exchange = hierarchical.Hierarchical(collectives, encoder)
        route = Route(self._codec, self._feedback, "hierarchical")
        name = f"hierarchical.{self._codec!r}.{elements}"
        slot = Slot(name, 0, torch.empty(elements, device="meta"))
        slot.route = route
        exchange.check(slot, route)
        exchange.prepare([slot])
        result = torch.empty(elements)

        def work(gradient: torch.Tensor, clock: Clock) -> torch.Tensor:
            result.copy_(gradient)  # It is written over.
            clock.skip()
            transfer = exchange.encode(slot, result)
            slot.step = 0
            relay = transfer.start()
            while relay is not None and relay.handle is not None:
                relay.advance()
            clock.lap("transfer")
            if transfer.error is not None:
                raise transfer.error
            transfer.write(1.0)
            clock.lap("decode")
            return result

        return work

    def wire_bytes(self, elements: int, ranks: int) -> float:
        """See :meth:`Exchange.wire_bytes`; the mean over the ranks, whose parts differ a little."""
        hosts = Hosts(ranks, hvd.local_size())
        sizes = Shards(elements, hosts.local, 0).payload_bytes(self._codec)
        return (hosts.count - 1) / hosts.local * sum(sizes)

    def answer(self, gradients: list[np.ndarray]) -> Answer:
        """See :meth:`Exchange.answer`: the oracle's bits, and no others."""
        oracle = OracleKernels()
        total = np.empty_like(gradients[0])
        hosts = Hosts(len(gradients), hvd.local_size())
        shards = Shards(len(total), hosts.local, 0)
        for place in range(hosts.local):
            begin, end = shards.of(place)
            shape = (end - begin,)
            payloads = np.empty((hosts.count, self._codec.payload_bytes(shape)), np.uint8)
            if begin == end:
                continue
            for payload, owner in zip(payloads, hosts.between(place), strict=True):
                average = np.zeros(shape, np.float32)
                for rank in hosts.within(owner):
                    average += gradients[rank][begin:end]
                average *= np.float32(1 / hosts.local)
                oracle.encode(
                    self._codec,
                    shape,
                    average,
                    payload,
                    feedback=self._feedback,
                    residual=np.zeros_like(average) if self._feedback.enabled else None,
                    noise=NoiseKey(rank=owner),
                )
            part = total[begin:end]
            oracle.decode_sum(self._codec, shape, payloads, part, step=0, scale=float(hosts.local))
        return total, 0.0
