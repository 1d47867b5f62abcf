"""``all_reduce``: what is wrong, calls that differ between ranks, and ranks that fail."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hvd_compress.distributed as hvdc
from hvd_compress import FP16
from hvd_compress.codecs import Int8, OneBit
from hvd_compress.engine.batch import Batch
from hvd_compress.engine.run import Run
from hvd_compress.exchanges.comm import Collective
from hvd_compress.process_group.collectives import Collectives
from hvd_compress.process_group.packing import Packer
from tests.contract.cases import ROWS, SHAPES
from tests.distributed.all_reduce import LATE, make, reduce, residuals
from tests.ranks import on_ranks
from tests.torch_models import assert_same_bits, targets

GONE = r"peer|Broken pipe|timed out|first error"
"""The error of a call in which another rank does not take part."""


_TOLD = hvdc.ExchangeError, hvdc.PayloadError


def _assert_told(
    compressor: hvdc.Compressor,
    kind: type[Exception] | tuple[type[Exception], ...],
    message: str,
    *,
    late: bool = LATE,
) -> None:
    """Asserts that a call raises an error, or the next one does."""
    tensors = targets(SHAPES, dist.get_rank(), 1)
    if late:
        assert reduce(compressor, tensors)["a"].isnan().all()
    with pytest.raises(kind, match=message):
        reduce(compressor, tensors)


@on_ranks(2, launcher="torchrun")
def test_infinity_is_seen_on_every_rank_and_leaves_no_trace() -> None:
    """Residuals of that call's tensors stay as they were; those of other calls change."""
    compressor = hvdc.Compressor(OneBit(), threshold=0)
    rank = dist.get_rank()
    for step in range(2):
        reduce(compressor, targets(SHAPES, rank, step))
    before = residuals(compressor)
    bad = targets(SHAPES, rank, 2)
    if rank == 1:
        bad["a"].view(-1)[17] = math.inf
    other = torch.randn(3000)
    work = hvdc.all_reduce(other, compressor, key="other", async_op=True)
    got = reduce(compressor, bad)
    assert work is not None and work.wait()
    assert not torch.isfinite(got["a"].view(-1)[17])
    after = residuals(compressor)
    assert after.pop("other").any()
    assert_same_bits(after, before)


@on_ranks(2, launcher="torchrun")
def test_what_is_wrong_on_every_rank() -> None:
    """Each raises its own error, and all can go on."""
    compressor = hvdc.Compressor(OneBit(), threshold=100)
    good = torch.randn(3000)
    hvdc.all_reduce(good, compressor, key="good")
    expanded, twice = torch.randn(1, 300).expand(10, 300), torch.randn(3000)
    wrong: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        ("text", {}, TypeError, "expected a tensor or a list of tensors, got str"),
        ([], {}, TypeError, "expected a tensor or a list of tensors, got an empty one"),
        ([good, 3], {}, TypeError, "tensor.1: expected a tensor, got int"),
        (torch.ones(300, dtype=torch.int64), {}, TypeError, "of 16 bits or more, got int64"),
        (torch.ones(9).to(torch.float8_e4m3fn), {}, TypeError, "more, got float8_e4m3fn"),
        (torch.ones(300, dtype=torch.complex64), {}, TypeError, "more, got complex64"),
        (
            torch.eye(30, device="cpu").to_sparse(),
            {},
            TypeError,
            "expected a dense tensor, got layout torch.spa",
        ),
        (expanded, {}, ValueError, r"an expanded tensor: use contiguous\(\)"),
        ([twice, twice], {}, ValueError, "expected each tensor once"),
        ([good, twice], {"key": ["a", "a"]}, ValueError, "expected distinct keys, got twice: a"),
        ([good, twice], {"key": ["a"]}, TypeError, "expected a string, or one for each tensor"),
        (good, {"key": 3}, TypeError, "expected a string, or one for each tensor, got 3"),
        (good, {"op": dist.ReduceOp.MAX}, ValueError, "expected ReduceOp.AVG or ReduceOp.SUM"),
        (torch.randn(30, 100), {"key": "good"}, ValueError, r"good: .*\[3000\], .* another key="),
        (good.half(), {"key": "good"}, ValueError, r"of float32, .* got float16"),
    ]
    for tensor, options, kind, message in wrong:
        with pytest.raises(kind, match=message):
            hvdc.all_reduce(tensor, compressor, **options)
    with pytest.raises(TypeError, match=r"write all_reduce\(tensor, Compressor\(Int8\(\)\)\)"):
        hvdc.all_reduce(good, hvdc.Compressor)  # type: ignore[arg-type]
    assert list(compressor.routes()) == ["good"]
    work = hvdc.all_reduce(good, compressor, key="good", async_op=True)
    assert work is not None
    for call in (
        lambda: hvdc.all_reduce(good.clone(), compressor, key="good"),
        compressor.state_dict,
        lambda: compressor.load_state_dict({}),
        lambda: compressor.set_codec(Int8()),
        compressor.drop_step,
        compressor.reset,
    ):
        with pytest.raises(hvdc.ExchangeError, match="no exchange in progress"):
            call()
    work.wait()
    hvdc.all_reduce(good, compressor, key="good")
    with pytest.raises(ValueError, match="expected the process group of the compressor, got anoth"):
        hvdc.all_reduce(good, compressor, key="good", group=dist.new_group([0, 1]))


@on_ranks(3, launcher="torchrun")
def test_calls_that_differ() -> None:
    """An error on every rank that says who does what; before the first message, and in later calls."""
    odd = dist.get_rank() == 2
    one = {"key": "t"}
    cases: list[tuple[Any, dict[str, Any], Any, dict[str, Any], str]] = [
        (
            [3000],
            one,
            [40, 70],
            one,
            r"of t: float32 \[3000\] .* on rank 0, 1.*\[40, 70\] .* rank 2",
        ),
        ([3000], one, [3000], {"key": "u"}, "of t: .* on rank 0, 1, absent on rank 2"),
        ([3000], one, [3000], {**one, "op": dist.ReduceOp.SUM}, "AVG.* on rank 0, 1.*SUM.* rank 2"),
        ([3000], one, ["list"], one, r"of t.0: .*absent on rank 0, 1.* on rank 2"),
        (
            [3000],
            one,
            ["integers"],
            one,
            "error: absent on rank 0, 1, TypeError: t: expected float",
        ),
    ]
    for shape, options, odd_shape, odd_options, message in cases:
        for overlap in (False, True):
            compressor = hvdc.Compressor(OneBit())
            if overlap:
                hvdc.all_reduce(torch.randn(3000), compressor, key="before")
            kind: tuple[type[Exception], str] = (hvdc.ExchangeError, f"(?s){message}")
            if odd and odd_shape == ["integers"]:
                kind = TypeError, "floating-point numbers"
            tensor, chosen = _make(odd_shape if odd else shape), odd_options if odd else options
            with pytest.raises(kind[0], match=kind[1]):
                work = hvdc.all_reduce(tensor, compressor, async_op=overlap, **chosen)
                if work is not None:
                    work.wait()
            dist.barrier()  # All of them are still there.


def _make(what: Any) -> Any:
    if what == ["list"]:
        return [torch.randn(3000)]
    return torch.ones(3000, dtype=torch.int32) if what == ["integers"] else torch.randn(what)


@on_ranks(2, launcher="torchrun")
def test_a_compressor_that_one_rank_has_made_anew() -> None:
    compressor = hvdc.Compressor(FP16(), threshold=0)
    hvdc.all_reduce(torch.randn(3000), compressor)
    if dist.get_rank() == 1:
        compressor = hvdc.Compressor(FP16(), threshold=0)
    with pytest.raises(hvdc.ExchangeError, match="calls before: 1 on rank 0, 0 on rank 1"):
        hvdc.all_reduce(torch.randn(3000), compressor)


@on_ranks(3, launcher="torchrun")
def test_a_rank_outside_of_the_group() -> None:
    group = dist.new_group([0, 2])
    tensor = torch.full((3000,), float(dist.get_rank()))
    if dist.get_rank() == 1:
        with pytest.raises(hvdc.ExchangeError, match="expected a process group with this rank in"):
            hvdc.all_reduce(tensor, hvdc.Compressor(OneBit()), group=group)
    else:
        hvdc.all_reduce(tensor, hvdc.Compressor(OneBit()), group=group)
        assert tensor.eq(1.0).all()


@on_ranks(2, launcher="torchrun")
def test_threads_that_make_groups_in_another_order_on_another_rank() -> None:
    """One thread's group does not depend on the other's."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    tensors = [torch.full((3000,), dist.get_rank() + 10.0 * number) for number in range(2)]
    begun, among = threading.Event(), Collectives.among

    def in_turn(collectives: Collectives, ranks: Sequence[int]) -> Collectives:
        if collectives.group is groups[dist.get_rank()]:
            begun.set()
        else:
            begun.wait()
            time.sleep(0.2)
        return among(collectives, ranks)

    def call(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        hvdc.all_reduce(tensor, hvdc.Compressor(FP16(), process_group=group))

    with mock.patch.object(Collectives, "among", in_turn):
        threads = [
            threading.Thread(target=call, args=each) for each in zip(tensors, groups, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [tensor.unique().tolist() for tensor in tensors] == [[0.5], [10.5]]


@on_ranks(2, launcher="torchrun")
def test_a_rank_that_fails_while_others_send() -> None:
    for exchange in sorted(ROWS.keys() & {"two_shot", "integer_sum", "low_rank"}):
        compressor = make(exchange)
        reduce(compressor, targets(SHAPES, dist.get_rank(), 0))
        failing = dist.get_rank() == 1
        if failing:
            with mock.patch.object(Batch, "guard", _fail):
                _assert_told(compressor, ArithmeticError, "on purpose", late=False)
        if LATE or not failing:
            told = "own errors? .*says? why" + (
                "|rank 1's payload: expected the header" if LATE else ""
            )
            _assert_told(compressor, _TOLD, told, late=LATE and not failing)
        dist.barrier()


@on_ranks(2, launcher="torchrun")
def test_a_key_whose_first_call_failed_on_one_rank() -> None:
    compressor = hvdc.Compressor(OneBit(), threshold=0)
    hvdc.all_reduce(torch.randn(3000), compressor, key="before")
    rank = dist.get_rank()
    pack = Packer.pack
    with (
        mock.patch.object(Packer, "pack", _out_of_memory if rank == 1 else pack),
        pytest.raises(MemoryError if rank == 1 else hvdc.ExchangeError, match="on purpose"),
    ):
        hvdc.all_reduce(torch.randn(3000), compressor, key="t")
    hvdc.all_reduce(torch.randn(3000), compressor, key="t")
    tensors = compressor.state_dict()["tensors"]
    assert list(tensors) == ["before", "t"]
    assert all(one["residual"] is not None and one["step"] == 1 for one in tensors.values())


@on_ranks(4, launcher="torchrun", alone=True)
def test_keys_that_only_some_ranks_have_counted() -> None:
    """Owners of parts depend on the numbers of keys: with others, averages would be of different parts."""
    compressor = hvdc.Compressor(Int8(), threshold=0)
    with pytest.raises((TypeError, hvdc.ExchangeError)):
        hvdc.all_reduce(None if dist.get_rank() == 1 else torch.ones(4096), compressor, key="a")  # type: ignore[arg-type]
    with pytest.raises(hvdc.ExchangeError, match="numbers of keys"):
        hvdc.all_reduce(torch.ones(4096), compressor, key="b")


def _out_of_memory(*arguments: Any) -> None:
    raise MemoryError("on purpose")


def _fail(batch: Batch, work: Any, size: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    batch.error = ArithmeticError("on purpose")
    return torch.zeros(size, dtype=dtype)


@on_ranks(2, launcher="torchrun", alone=True)
def test_calls_under_way_when_a_rank_leaves() -> None:
    """Calls behind the one that notices it do not wait for ever."""
    compressor = hvdc.Compressor(OneBit(), threshold=0)
    mine = targets(SHAPES, dist.get_rank(), 0)
    reduce(compressor, mine)
    if dist.get_rank() == 1:
        compressor.close()
        return
    works = [
        hvdc.all_reduce(tensor, compressor, key=name, async_op=True)
        for name, tensor in mine.items()
    ]
    for work in works:
        assert work is not None
        with pytest.raises((RuntimeError, hvdc.ExchangeError), match=GONE):
            work.wait()


@pytest.mark.skipif(
    LATE, reason="a rank that closes its connections does not end what devices exchange"
)
@on_ranks(2, launcher="torchrun", alone=True)
def test_calls_behind_one_that_fails_on_one_rank_only() -> None:
    compressor = make("two_shot")
    mine = targets(SHAPES, dist.get_rank(), 0)
    reduce(compressor, mine)
    if dist.get_rank() == 1:
        with (
            mock.patch.object(Run, "resume", side_effect=MemoryError("on purpose")),
            pytest.raises(MemoryError),
        ):
            hvdc.all_reduce(mine["a"], compressor, key="a")
        with pytest.raises(hvdc.ExchangeError, match="first error: MemoryError: on purpose"):
            hvdc.all_reduce(mine["b"], compressor, key="b")
        compressor.close()  # The other rank waits for it.
        return
    works = [hvdc.all_reduce(mine[key], compressor, key=key, async_op=True) for key in ("a", "b")]
    for work in works:
        assert work is not None
        with pytest.raises((RuntimeError, hvdc.ExchangeError), match=GONE):
            work.wait()


@on_ranks(2, launcher="torchrun")
def test_an_altered_payload() -> None:
    compressor = hvdc.Compressor(OneBit(), threshold=0)
    reduce(compressor, targets(SHAPES, dist.get_rank(), 0))
    start = Collectives.start

    def altered(self: Collectives, collective: Collective) -> tuple[torch.Tensor, dist.Work]:
        if dist.get_rank() == 1 and collective.message.numel() > 40:  # Not a comparison.
            collective.message[40] ^= 16
        return start(self, collective)

    Collectives.start = altered  # type: ignore[method-assign]
    try:
        _assert_told(compressor, hvdc.PayloadError, "a: rank 1's payload: expected .*checksum")
    finally:
        Collectives.start = start  # type: ignore[method-assign]


@on_ranks(2, launcher="torchrun")
def test_a_first_call_that_is_wrong() -> None:
    compressor = hvdc.Compressor(OneBit())
    with pytest.raises(TypeError, match="expected a tensor or a list of tensors, got int"):
        hvdc.all_reduce(3, compressor)  # type: ignore[arg-type]
    tensor = torch.full((3000,), float(dist.get_rank()))
    hvdc.all_reduce(tensor, compressor)
    assert tensor.eq(0.5).all()


def test_without_a_process_group() -> None:
    with pytest.raises(
        hvdc.ExchangeError, match=r"torch.distributed.init_process_group\(\) before"
    ):
        hvdc.all_reduce(torch.ones(3000), hvdc.Compressor(OneBit()))
