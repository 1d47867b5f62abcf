"""The phases of an exchange in the traces of torch.profiler."""

from __future__ import annotations

import horovod.torch as hvd

import hvd_compress.torch as hvdc
from tests.ranks import on_ranks
from tests.torch.probes import distributed, exchange
from tests.torch_models import Probe, phases_of, targets

SHAPES = {"a": (40, 50)}


@on_ranks(2)
def test_phases_are_labelled() -> None:
    model = Probe(SHAPES)
    optimizer = distributed(model, hvdc.OneBit(model, exchange="two_shot", threshold=0))

    def step(number: int) -> None:
        exchange(model, optimizer, targets(SHAPES, hvd.rank(), number))

    step(0)
    # Each owner decodes the parts that it averages, and each rank the averages.
    found = phases_of(lambda: step(1))
    assert found == {"encode": 2, "send": 2, "average": 1, "decode": 2}, found
