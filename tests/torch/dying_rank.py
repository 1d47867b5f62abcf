"""A job whose rank 1 dies in mid-exchange: ``python -m tests.torch.dying_rank EXCHANGE COLLECTIVE``."""

from __future__ import annotations

import os
import sys
import time

import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError

import hvd_compress.torch as hvdc
from tests.torch.probes import distributed, exchange, watch
from tests.torch_models import Probe, targets

SHAPES = {"a": (40, 170), "b": (3000,)}


def _main(chosen: str, collective: str) -> None:
    hvd.init()
    model = Probe(SHAPES)
    compressor = hvdc.OneBit(model.named_parameters(), exchange=chosen)
    optimizer = distributed(model, compressor)
    exchange(model, optimizer, targets(SHAPES, hvd.rank(), 0))

    def die(name: str) -> None:
        if hvd.rank() == 1 and name == collective:
            # As by SIGKILL, without a word to Horovod; with status 0, or horovodrun would end the others.
            os._exit(0)

    watch(compressor, started=die)
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
    _main(*sys.argv[1:])
