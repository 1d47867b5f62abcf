"""A job whose middle rank dies between the two shots of a step: ``horovodrun -np 3``."""

from __future__ import annotations

import os
import time

import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError

import hvd_compress.torch as hvdc
from tests.torch.probes import Probe, distributed, exchange, targets

SHAPES = {"a": (40, 170), "b": (3000,)}


def _main() -> None:
    hvd.init()
    model = Probe(SHAPES)
    compressor = hvdc.OneBit(model.named_parameters(), exchange="two_shot")
    optimizer = distributed(model, compressor)
    exchange(model, optimizer, targets(SHAPES, hvd.rank(), 0))
    gather = compressor._collectives.gather

    def die(message: object, name: str) -> int:
        if name == "a from owners":
            # As by SIGKILL, without a word to Horovod; with status 0, or horovodrun would end the others.
            os._exit(0)
        return gather(message, name)

    if hvd.rank() == 1:
        compressor._collectives.gather = die
    start = time.monotonic()
    try:
        exchange(model, optimizer, targets(SHAPES, hvd.rank(), 1))
    except HorovodInternalError as error:
        seconds = time.monotonic() - start
        print(
            f"rank {hvd.rank()} stopped after {seconds:.1f} s by {type(error).__name__}", flush=True
        )
    os._exit(0)


if __name__ == "__main__":
    _main()
