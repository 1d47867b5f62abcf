"""Parallel layers beside a single process: with the same rounding, and without any."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hvd_compress.codecs import FP16, Int8, NoCompression
from hvd_compress.papers import (
    ColumnParallelLinear,
    ParallelGroup,
    ProcessGroupTransport,
    RowParallelLinear,
)
from tests.ddp.probes import assert_equal_on_all_ranks
from tests.papers.reference import BATCH, samples, whole_layers
from tests.papers.runs import CODECS, check_against_the_reference, run
from tests.ranks import on_ranks
from tests.torch_models import DEVICE


@on_ranks(2, launcher="torchrun")
def test_two_ranks_compute_the_references_numbers() -> None:
    check_against_the_reference(ProcessGroupTransport())


@on_ranks(4, launcher="torchrun")
def test_four_ranks_compute_the_references_numbers() -> None:
    check_against_the_reference(ProcessGroupTransport(), CODECS[1:3])


@on_ranks(2)
def test_ranks_of_horovod_compute_the_references_numbers() -> None:
    from hvd_compress.papers.horovod import HorovodTransport

    check_against_the_reference(HorovodTransport(), (CODECS[0], CODECS[4]), (True,))


@on_ranks(4, launcher="torchrun")
def test_two_groups_of_two_ranks() -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own = pairs[dist.get_rank() // 2]
    check_against_the_reference(ProcessGroupTransport(own), CODECS[:1], (True,))
    assert ParallelGroup(Int8(), process_group=own).rank == dist.get_rank() % 2


@on_ranks(2)
def test_long_messages_by_horovod() -> None:
    """Two ranks gather them by a sum, see hvd_compress.exchanges.sum_as_gather."""
    from hvd_compress.papers.horovod import HorovodTransport

    group = ParallelGroup(FP16(), transport=HorovodTransport())
    parts = [torch.full((512, 600), float(rank + 1)) for rank in range(2)]
    found = group.gather(parts[group.rank], "activations", group.codec)
    assert torch.equal(found, torch.stack(parts))


@on_ranks(4, launcher="torchrun")
def test_without_compression_they_are_the_unsharded_layers() -> None:
    group = ParallelGroup(NoCompression())
    rank, size = group.rank, group.size
    for batch_parallel in (False, True):
        found = run(group, batch_parallel=batch_parallel)

        one, two = whole_layers()
        pairs = [samples(r) for r in (range(size) if batch_parallel else [0])]
        x = torch.cat([x for x, _ in pairs]).requires_grad_()
        output = two(one(x).relu())
        loss = 0.5 * (output - torch.cat([target for _, target in pairs])).square().sum()
        if batch_parallel:
            loss = loss / size  # The mean of the ranks' losses ...
        loss.backward()
        own = slice(rank * BATCH, (rank + 1) * BATCH) if batch_parallel else slice(None)
        expected = {
            "output": output.detach()[own],
            # ... and outside of the layers, each rank's own.
            "inputs": x.grad[own] * (size if batch_parallel else 1),
            "weight1": one.weight.grad.chunk(size)[rank],
            "bias1": one.bias.grad.chunk(size)[rank],
            "weight2": two.weight.grad.chunk(size, 1)[rank],
        }
        if rank == 0:
            expected["bias2"] = two.bias.grad
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            # Sums over features and over ranks have another order.
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


@on_ranks(2, launcher="torchrun")
def test_to_the_unsharded_layer_and_back() -> None:
    group = ParallelGroup(Int8())
    for bias in (True, False):
        torch.manual_seed(7)
        whole = nn.Linear(6, 8, bias)
        for kind in (ColumnParallelLinear, RowParallelLinear):
            torch.manual_seed(7)
            for layer in (kind(6, 8, group, bias=bias), kind.from_linear(whole, group)):
                back = layer.to_linear()
                assert torch.equal(back.weight, whole.weight)
                assert (back.bias is None) == (not bias)
                assert not bias or torch.equal(back.bias, whole.bias)
    assert "in_features=6, out_features=8, rank=" in repr(layer)
    assert copy.deepcopy(layer).group is group


@on_ranks(2, launcher="torchrun")
def test_between_data_parallel_layers() -> None:
    """Krizhevsky's scheme: DDP's convolutions, then dense layers on both ranks, beside one process."""
    torch.manual_seed(2)
    rank, size = dist.get_rank(), dist.get_world_size()
    convolution = nn.Conv2d(1, 3, 3)
    one, two = nn.Linear(3 * 16, 8), nn.Linear(8, 5)
    images, labels = torch.randn(size * 4, 1, 6, 6), torch.randint(5, (size * 4,))
    group = ParallelGroup(NoCompression())
    first = ColumnParallelLinear.from_linear(one, group, gather_output=False, batch_parallel=True)
    second = RowParallelLinear.from_linear(two, group, input_is_parallel=True, batch_parallel=True)
    ddp = nn.parallel.DistributedDataParallel(nn.Sequential(convolution, nn.Flatten()))

    own = slice(4 * rank, 4 * rank + 4)
    logits = second(first(ddp(images[own])).relu())
    nn.functional.cross_entropy(logits, labels[own]).backward()
    found = [convolution.weight.grad.clone(), first.weight.grad, second.weight.grad]

    convolution.zero_grad()
    whole = nn.Sequential(convolution, nn.Flatten(), one, nn.ReLU(), two)
    nn.functional.cross_entropy(whole(images), labels).backward()
    expected = [
        convolution.weight.grad,
        one.weight.grad.chunk(size)[rank],
        two.weight.grad.chunk(size, 1)[rank],
    ]
    for got, value in zip(found, expected, strict=True):
        torch.testing.assert_close(got, value, rtol=1e-4, atol=1e-6)


@on_ranks(2, launcher="torchrun")
def test_half_precision_and_more_dimensions() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        group = ParallelGroup(Int8("linear", 64), exact_own=False)
        torch.manual_seed(4)
        whole = nn.Linear(6, 8, dtype=dtype)
        layer = ColumnParallelLinear.from_linear(whole, group)
        x = torch.randn(2, 3, 6).to(dtype).requires_grad_()
        output = layer(x)
        output.sum().backward()
        assert output.dtype == x.grad.dtype == dtype and output.shape == (2, 3, 8)
        torch.testing.assert_close(output, whole(x.detach()), rtol=0.05, atol=0.02)
        assert_equal_on_all_ranks({"output": output, "gradient": x.grad})


@on_ranks(2, launcher="torchrun")
def test_all_ranks_have_the_same_bits_without_their_own() -> None:
    outputs = {}
    for exact_own in (True, False):
        group = ParallelGroup(Int8(), exact_own=exact_own)
        outputs[exact_own] = run(group, batch_parallel=False)["output"]
    assert_equal_on_all_ranks({"output": outputs[False]})
    other = [torch.empty_like(outputs[True]) for _ in range(2)]
    dist.all_gather(other, outputs[True])
    assert not torch.equal(*other)


def test_one_rank_is_an_ordinary_layer() -> None:
    with DEVICE:  # As on ranks, where it is the default.
        _one_rank_is_an_ordinary_layer()


def _one_rank_is_an_ordinary_layer() -> None:
    transport: Any = SimpleNamespace(rank=0, size=1)
    group = ParallelGroup(Int8(), transport=transport)
    found = run(group, batch_parallel=False)
    one, two = whole_layers()
    x, target = samples(0)
    x.requires_grad_()
    output = two(one(x).relu())
    (0.5 * (output - target).square().sum()).backward()
    assert torch.equal(found["output"], output) and torch.equal(found["inputs"], x.grad)
    assert torch.equal(run(group, batch_parallel=True)["output"], output)
    assert group.counters.wire_bytes == 0


@on_ranks(2, launcher="torchrun")
def test_counters_say_what_was_sent() -> None:
    codec = Int8("linear", "tensor")
    group = ParallelGroup(codec)
    run(group, batch_parallel=False)
    parts = [(8, 16), (8, 12), (8, 16), (8, 20)]
    assert group.counters.message_bytes == sum(codec.payload_bytes(shape) for shape in parts)
    assert group.counters.wire_bytes == group.counters.message_bytes  # To one other rank.
    assert group.counters.uncompressed_bytes == 4 * 8 * (16 + 12 + 16 + 20)
    assert group.counters.encoded_elements == 8 * (16 + 12 + 16 + 20)
