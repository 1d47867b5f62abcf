"""The phases of an exchange in the traces of torch.profiler."""

from __future__ import annotations

import torch.distributed as dist

from hvd_compress.codecs import ErrorFeedback, OneBit
from tests.ddp.probes import distributed, exchange
from tests.ranks import on_ranks
from tests.torch_models import Probe, phases_of, targets

SHAPES = {"a": (40, 50)}


@on_ranks(2, launcher="torchrun")
def test_phases_are_labelled() -> None:
    ddp, _ = distributed(Probe(SHAPES), OneBit(), ErrorFeedback(), exchange="two_shot")

    def step(number: int) -> None:
        exchange(ddp, targets(SHAPES, dist.get_rank(), number))

    step(0)
    # Each owner decodes the parts that it averages, and each rank the averages.
    found = phases_of(lambda: step(1))
    assert found == {"encode": 2, "send": 2, "average": 1, "decode": 2}, found
