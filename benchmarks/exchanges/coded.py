"""The compressors' exchanges, run to the end in the calling thread."""

from __future__ import annotations

import horovod.torch as hvd
import numpy as np
import torch

from benchmarks.compressions import Compression
from benchmarks.exchanges.base import Answer, Clock, Exchange, Work
from hvd_compress.codecs import CODECS, Codec, ErrorFeedback, codec_class
from hvd_compress.engine.batches import Batches
from hvd_compress.engine.executors import Executors
from hvd_compress.engine.parameters import Slot
from hvd_compress.engine.plan import Common
from hvd_compress.engine.run import Run
from hvd_compress.exchanges.comm import Group
from hvd_compress.exchanges.hosts import Hosts
from hvd_compress.exchanges.reference import Simulation
from hvd_compress.exchanges.registry import EXCHANGES
from hvd_compress.exchanges.routing import Route
from hvd_compress.exchanges.steps import FLOAT_BYTES, Gradient
from hvd_compress.torch.collectives import HorovodCollectives


class Coded(Exchange):
    """An exchange of one codec's payloads, by the compressors' own code.

    A rank's work before the first collective counts as encoding, that after the last one as decoding. For a
    hierarchical exchange, which needs ``HOROVOD_DYNAMIC_PROCESS_SETS=1``, only the bytes that leave a host
    are counted.

    Args:
        name: the exchange's name in :data:`hvd_compress.exchanges.registry.EXCHANGES`.
        codec: the codec of the gradients.
        feedback: the error feedback.
    """

    parts = ("encode", "transfer", "between", "decode")

    def __init__(self, name: str, codec: Codec, feedback: ErrorFeedback) -> None:
        self.config = codec.to_config()
        self.name = name
        self._codec, self._feedback = codec, feedback

    @classmethod
    def of(cls, name: str, compression: Compression) -> Exchange:
        """The exchange of that name with a compression.

        Raises:
            ValueError, TypeError: the exchange does not take the compression.
        """
        known = [scheme for scheme, one in CODECS.items() if _carries(name, one())]
        if compression.name not in known:
            raise ValueError(f"expected one of {', '.join(known)}, got {compression.text!r}")
        codec = codec_class("compression", "codec", compression.name)(**compression.options)
        if codec.varies:
            raise ValueError(
                f"expected coding='plain', got {compression.text!r}: bytes are counted before they are sent"
            )
        return cls(name, codec, codec.feedback)

    def wire_bytes(self, elements: int, ranks: int) -> float:
        exchange = EXCHANGES[self.name]
        hosts = Hosts(ranks, hvd.local_size() if "local" in exchange.stages else 1)
        sizes = {"all": ranks, "local": 1, "cross": hosts.count}
        sends = exchange.sends(Gradient((elements,), self._codec, FLOAT_BYTES, hosts))
        return sum(message.sent(sizes[scope]) for scope, message in sends)

    def answer(self, gradients: list[np.ndarray]) -> Answer:
        """The sum of the reference, which the result must equal bit for bit."""
        simulation = Simulation(
            self.name,
            self._codec,
            self._feedback,
            {"gradient": gradients[0].shape},
            len(gradients),
            local=hvd.local_size(),
        )
        return simulation.average([{"gradient": one} for one in gradients], 1.0)["gradient"], 0.0

    def prepare(self, collectives: HorovodCollectives, threads: int, elements: int) -> Work:
        hosts = Hosts(collectives.size, hvd.local_size())
        group = Group(collectives.rank, collectives.size, hosts)
        batches = Batches(Common(Executors(threads), group))
        exchange = EXCHANGES[self.name]
        if "local" in exchange.stages:
            collectives.register(hosts)
        slot = Slot("gradient", 0, torch.empty(elements, device="meta"))
        slot.route = Route(self._codec, self._feedback, self.name)
        exchange.check(slot.name, slot.shape, self._codec, FLOAT_BYTES, group)
        result = torch.empty(elements)

        def work(gradient: torch.Tensor, clock: Clock) -> torch.Tensor:
            result.copy_(gradient)  # The exchange overwrites it with the sum.
            slot.step = 0
            clock.skip()
            batch, exchanging = batches.make([slot], [result])
            run = Run(exchanging, batch, name=f"{self.name}.{self._codec!r}.{elements}")
            clock.lap("encode")
            while run.request is not None:
                rows = collectives.start(run.request, run.label).wait()
                clock.lap("transfer")
                run.resume(rows)
                clock.lap("between")
            if run.error is not None:
                raise run.error
            batch.write(1.0)
            clock.lap("decode")
            batch.settle(False)
            return result

        return work


def _carries(name: str, codec: Codec) -> bool:
    """Whether an exchange takes a codec."""
    try:
        EXCHANGES[name].check("gradient", (1,), codec, FLOAT_BYTES, Group(0, 1, Hosts(1, 1)))
    except ValueError:
        return False
    return True
