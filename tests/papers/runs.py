"""The network of :mod:`tests.papers.reference` on real ranks."""

from __future__ import annotations

import torch

from hvd_compress.codecs import BF16, ECQ, FP16, Codec, Int8, NoCompression
from hvd_compress.papers import (
    ColumnParallelLinear,
    ParallelGroup,
    RowParallelLinear,
    Transport,
)
from tests.papers.reference import Network, Results, samples, whole_layers
from tests.torch_models import assert_same_bits

CODECS: tuple[tuple[Codec, Codec], ...] = (
    (Int8(), Int8()),
    (Int8("linear", "tensor"), Int8("dynamic", 64)),
    (Int8("static", 64, offset=2), Int8("mantissa", 64)),
    (FP16(), BF16()),
    (NoCompression(), ECQ(7, "linf", 64)),
)
"""The codecs of activations and of error signals."""


def run(group: ParallelGroup, *, batch_parallel: bool) -> Results:
    """One pass forward and backward."""
    one, two = whole_layers()
    first = ColumnParallelLinear.from_linear(
        one, group, gather_output=not batch_parallel, batch_parallel=batch_parallel
    )
    second = RowParallelLinear.from_linear(
        two, group, input_is_parallel=batch_parallel, batch_parallel=batch_parallel
    )
    x, target = samples(group.rank if batch_parallel else 0)
    x.requires_grad_()
    output = second(first(x).relu())
    (0.5 * (output - target).square().sum()).backward()
    found = {
        "output": output.detach(),
        "inputs": x.grad,
        "weight1": first.weight.grad,
        "bias1": first.bias.grad,
        "weight2": second.weight.grad,
    }
    if second.bias is not None:
        found["bias2"] = second.bias.grad
    return found


def check_against_the_reference(
    transport: Transport,
    codecs: tuple[tuple[Codec, Codec], ...] = CODECS,
    exact: tuple[bool, ...] = (True, False),
) -> None:
    """Every number of every rank, bit for bit."""
    for codec, error_codec in codecs:
        for exact_own in exact:
            network = Network(transport.size, codec, error_codec, exact_own)
            for batch_parallel in (False, True):
                group = ParallelGroup(
                    codec, error_codec=error_codec, exact_own=exact_own, transport=transport
                )
                found = run(group, batch_parallel=batch_parallel)
                expected = network.by_samples() if batch_parallel else network.by_features()
                assert_same_bits(found, expected[group.rank])
                assert group.counters.steps == 4
    torch.manual_seed(0)
