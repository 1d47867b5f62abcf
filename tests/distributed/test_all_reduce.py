"""``all_reduce``: any tensors, keys, and calls in progress."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hvd_compress.distributed as hvdc
from hvd_compress import PowerSGD, Route
from hvd_compress.codecs import ECQ, ErrorFeedback, Int8, OneBit
from hvd_compress.distributed.keys import pairs
from tests.contract.cases import FLAT, SHAPES, USUAL
from tests.distributed.all_reduce import LATE, make
from tests.ranks import on_ranks
from tests.torch_models import Simulation, assert_same, assert_same_bits, targets


@on_ranks(2, launcher="torchrun", alone=True)
def test_calls_in_progress_beside_other_collectives() -> None:
    """The comparison of a call that waits for its turn does not get between the script's collectives."""
    rank = dist.get_rank()
    made = [hvdc.Compressor(Int8(), threshold=0) for _ in range(2)]
    for compressor in made:
        for key in "ab":
            hvdc.all_reduce(torch.ones(100), compressor, key=key)
    time.sleep(0.5 * rank)
    works = []
    for key in "ab":
        for compressor in made:
            mine = torch.full((100,), float(rank))
            works.append((mine, hvdc.all_reduce(mine, compressor, key=key, async_op=True)))
            time.sleep(0.1 * rank)
    own = torch.full((1,), float(rank))
    dist.all_reduce(own)
    assert own.item() == 1
    for mine, work in works:
        work.wait()
        torch.testing.assert_close(mine, torch.full((100,), 0.5))


@on_ranks(2, launcher="torchrun")
def test_calls_that_overlap() -> None:
    """Each key's residual is its own, whatever is waited for first."""
    for exchange in FLAT:
        compressor = make(exchange)
        simulation = Simulation(exchange, *USUAL[exchange], SHAPES, 2)
        for step in range(5):
            everybodys = [targets(SHAPES, rank, step) for rank in range(2)]
            mine = targets(SHAPES, dist.get_rank(), step)
            works = [
                hvdc.all_reduce(tensor, compressor, key=name, async_op=True)
                for name, tensor in mine.items()
            ]
            for work in works if step % 2 else works[::-1]:
                assert work is not None and work.wait() and work.is_completed()
                assert work.wait()
            assert_same(exchange, mine, simulation.average(everybodys))


@pytest.mark.skipif(LATE, reason="only CPUs have kernels for the entropy code")
@on_ranks(3, launcher="torchrun")
def test_payloads_of_any_length_in_calls_that_overlap() -> None:
    """Some calls need a second collective, and others do not."""
    codec, feedback = ECQ(coding="entropy"), ErrorFeedback(0.01, 1.0)
    for exchange in ("allgather", "two_shot"):
        compressor = hvdc.Compressor(Route(codec, feedback), exchange=exchange, threshold=0)
        simulation = Simulation(exchange, codec, feedback, SHAPES, 3)
        for step in range(6):
            everybodys = [targets(SHAPES, rank, step) for rank in range(3)]
            for rank, one in enumerate(everybodys):
                for number, name in enumerate(("a", "b", "c")):
                    if (step + rank + number) % 3 or step < 2:
                        one[name].view(-1)[::8] *= 100  # Most levels are 0 then.
            mine = {name: one.clone() for name, one in everybodys[dist.get_rank()].items()}
            works = [
                hvdc.all_reduce(tensor, compressor, key=name, async_op=True)
                for name, tensor in mine.items()
            ]
            for work in works if step % 2 else works[::-1]:
                assert work is not None and work.wait()
            assert_same_bits(mine, simulation.average(everybodys))


@on_ranks(2, launcher="torchrun")
def test_tensors_in_any_order_of_memory_and_of_several_dtypes() -> None:
    shapes = {"turned": (70, 40), "strided": (50, 30), "half": (3000,), "brain": (2000,)}
    dtypes = {"half": torch.float16, "brain": torch.bfloat16}
    compressor = hvdc.Compressor(OneBit())
    simulation = Simulation("allgather", OneBit(), ErrorFeedback(), shapes, 2)
    for step in range(3):
        everybodys = [
            {name: one.to(dtypes.get(name)) for name, one in targets(shapes, rank, step).items()}
            for rank in range(2)
        ]
        mine = everybodys[dist.get_rank()]
        turned = torch.empty(40, 70).t()
        strided = torch.zeros(50, 60)[:, ::2]
        given = {
            "turned": turned.copy_(mine["turned"]),
            "strided": strided.copy_(mine["strided"]),
            "half": mine["half"].clone(),
            "brain": mine["brain"].clone(),
        }
        hvdc.all_reduce(list(given.values()), compressor, key=list(given))
        assert not turned.is_contiguous() and not strided.is_contiguous()
        expected = simulation.average(everybodys)
        assert_same_bits(given, {n: e.to(dtypes.get(n)) for n, e in expected.items()})


@on_ranks(2, launcher="torchrun")
def test_single_columns_and_rows_in_any_order_of_memory() -> None:
    """PyTorch takes the strides of some of them for those of contiguous tensors."""
    wide = torch.zeros(2000, 3)
    for form in (
        lambda: wide.clone()[:, 1:2],
        lambda: wide.clone()[:, 1],
        lambda: wide.clone().t()[1:2],
        lambda: torch.zeros(1, 4001)[:, 1::2],
        lambda: torch.zeros(1, 2000).t(),
        lambda: torch.zeros(2000, 1).t(),
    ):
        for codec in (OneBit("column"), OneBit("row")):
            tensor = form()
            tensor.copy_(targets({"a": tensor.shape}, dist.get_rank(), 0)["a"])
            plain = torch.empty(tensor.shape).copy_(tensor)
            for one in (tensor, plain):
                compressor = hvdc.Compressor(codec, exchange="two_shot", threshold=0)
                hvdc.all_reduce(one, compressor)
            assert_same_bits({"a": tensor.clone()}, {"a": plain})


@on_ranks(2, launcher="torchrun")
def test_tensors_of_inference_mode() -> None:
    shapes = {"matrix": (64, 80), "turned": (80, 64), "small": (10,), "double": (8, 8)}

    def averages(codec: Any, exchange: str, modes: tuple[bool, ...]) -> dict[str, torch.Tensor]:
        compressor = hvdc.Compressor(codec, exchange=exchange, threshold=100)
        for step, mode in enumerate(modes):
            with torch.inference_mode(mode):
                given = targets(shapes, dist.get_rank(), step)
                given["turned"], given["double"] = given["turned"].t(), given["double"].double()
                work = hvdc.all_reduce(
                    list(given.values()), compressor, key=list(given), async_op=step > 0
                )
                if work:
                    work.wait()
        return given

    for way in ((OneBit(), "allgather"), (Int8(), "two_shot"), (PowerSGD(2), "auto")):
        expected = averages(*way, (False, False, False, False))
        for modes in ((True, False, True, False), (False, True, False, True)):
            assert_same_bits(averages(*way, modes), expected)


@on_ranks(2, launcher="torchrun")
def test_small_tensors_and_sums_go_as_they_are() -> None:
    compressor = hvdc.Compressor(OneBit(), exclude=["left.*"], layers={"eight": Int8()})
    rank = dist.get_rank()
    for op, divisor in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, 2)):
        for dtype in (torch.float32, torch.float64):
            small = torch.tensor([1.0, 2.0, 4.0], dtype=dtype) * (rank + 1)
            hvdc.all_reduce(small, compressor, op=op, key=f"small {dtype}")
            assert small.dtype == dtype and small.tolist() == [
                3 / divisor,
                6 / divisor,
                12 / divisor,
            ]
        left = [torch.full((5000,), float(rank + 1)), torch.full((3, 1000), 2.0)]
        hvdc.all_reduce(left, compressor, op=op, key="left")
        assert left[0].eq(3 / divisor).all() and left[1].eq(4 / divisor).all()
    hvdc.all_reduce(torch.ones(4000), compressor, key="eight")
    empty = torch.zeros(0, 7)
    hvdc.all_reduce(empty, compressor, key="empty")
    routes = compressor.routes()
    assert {name for name, route in routes.items() if not route.uncompressed} == {"eight"}
    assert routes["eight"].codec == Int8()


@on_ranks(2, launcher="torchrun")
def test_tensors_of_float64_go_as_they_are() -> None:
    compressor = hvdc.Compressor(OneBit(), threshold=100)
    tensor = torch.arange(300.0).double() / 3 + dist.get_rank()
    with pytest.warns(UserWarning, match=r"uncompressed in their own dtype: wide \(float64\)$"):
        hvdc.all_reduce(tensor, compressor, key="wide")
    torch.testing.assert_close(tensor, torch.arange(300.0).double() / 3 + 0.5)
    fresh = hvdc.Compressor(OneBit(), threshold=100)
    fresh.load_state_dict(compressor.state_dict())
    assert fresh.routes()["wide"].uncompressed


def test_many_keys_are_compared_by_their_hashes() -> None:
    """Work for each key must not grow with the number of keys."""
    compared = 0

    class Key(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    tensors = [torch.zeros(1, dtype=torch.float32) for _ in range(300)]
    pairs(tensors, [Key(number) for number in range(300)])
    assert compared <= 300
