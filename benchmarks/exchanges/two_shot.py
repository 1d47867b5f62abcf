"""Parts to their owners, averages from them."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.exchanges.base import Answer, Clock, Coded, Work
from hvd_compress.codecs import NoiseKey
from hvd_compress.exchange import two_shot
from hvd_compress.exchange.routing import Route
from hvd_compress.exchange.shards import Shards
from hvd_compress.kernels.oracle import OracleKernels
from hvd_compress.torch.collectives import Collectives
from hvd_compress.torch_common.encoder import Encoder
from hvd_compress.torch_common.executors import Executors
from hvd_compress.torch_common.shipment import Shipment
from hvd_compress.torch_common.shots import Shots, owned_of
from hvd_compress.torch_common.slots import Slot


class TwoShot(Coded):
    """An alltoall of payloads, and an allgather of the averages' payloads.

    What the owners do between the shots is counted as encoding and decoding.
    """

    def prepare(self, collectives: Collectives, threads: int, elements: int) -> Work:
        """See :meth:`Exchange.prepare`."""
        rank, size = collectives.rank, collectives.size
        encoder = Encoder(Executors(threads), 0, rank, None)
        slot = Slot("gradient", 0, torch.empty(elements, device="meta"))
        slot.route = Route(self._codec, self._feedback, "two_shot")
        slot.owned = owned = owned_of(slot, rank, size)
        two_shot.check(slot.name, self._codec, Shards(elements, size, 0))
        result = torch.empty(elements)
        name = f"two_shot.{self._codec!r}.{elements}"

        def work(gradient: torch.Tensor, clock: Clock) -> torch.Tensor:
            result.copy_(gradient)  # They are written over.
            if self._feedback.enabled:
                encoder.residual(slot, result.device)
                encoder.residual(owned, result.device)
            clock.skip()
            shots = Shots(encoder, size, slot, result)
            shipment = Shipment(name, [shots], rank, size)
            message = shipment.to_owners()
            clock.lap("encode")
            handle = collectives.distribute(message, shipment.sizes, f"{name} to owners")
            received = collectives.wait(handle)
            clock.lap("transfer")
            averages = shipment.average(received)
            clock.lap("decode")
            gather = collectives.gather_alike if shipment.alike else collectives.gather
            gathered = collectives.wait(gather(averages, f"{name} from owners"))
            clock.lap("transfer")
            shipment.take(gathered)
            if shots.error is not None:
                raise shots.error
            shots.write(1.0)
            clock.lap("decode")
            return result

        return work

    def wire_bytes(self, elements: int, ranks: int) -> float:
        """See :meth:`Exchange.wire_bytes`; the mean over the ranks, whose parts differ a little."""
        sizes = Shards(elements, ranks, 0).payload_bytes(self._codec)
        return 2 * (ranks - 1) / ranks * sum(sizes)

    def answer(self, gradients: list[np.ndarray]) -> Answer:
        """See :meth:`Exchange.answer`: the oracle's bits, and no others."""
        size = len(gradients)
        total = np.empty_like(gradients[0])
        shards = Shards(len(total), size, 0)
        for owner in range(size):
            begin, end = shards.of(owner)
            if begin < end:
                parts = [gradient[begin:end] for gradient in gradients]
                streams = [two_shot.first_stream(rank, owner, size) for rank in range(size)]
                average = self._sum(parts, streams, 1 / size)
                again = [two_shot.second_stream(owner, size)]
                total[begin:end] = self._sum([average], again, float(size))
        return total, 0.0

    def _sum(self, parts: list[np.ndarray], streams: list[int], scale: float) -> np.ndarray:
        """``scale`` times the sum of what is left of the parts after encoding and decoding."""
        oracle = OracleKernels()
        shape = parts[0].shape
        payloads = np.empty((len(parts), self._codec.payload_bytes(shape)), np.uint8)
        for part, stream, payload in zip(parts, streams, payloads, strict=True):
            oracle.encode(
                self._codec,
                shape,
                part,
                payload,
                feedback=self._feedback,
                residual=np.zeros_like(part) if self._feedback.enabled else None,
                noise=NoiseKey(rank=stream),
            )
        total = np.empty_like(parts[0])
        oracle.decode_sum(self._codec, shape, payloads, total, step=0, scale=scale)
        return total
