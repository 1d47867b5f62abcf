"""``all_reduce``: any tensors, keys, calls in progress, and calls that differ between ranks."""

from __future__ import annotations

import copy
import io
import math
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hvd_compress.distributed as hvdc
from hvd_compress import FP16, PowerSGD, Route
from hvd_compress.codecs import ECQ, ErrorFeedback, Int8, OneBit
from hvd_compress.distributed.keys import pairs
from hvd_compress.engine.batch import Batch
from hvd_compress.engine.comm import Collective, Pending
from hvd_compress.process_group.collectives import Collectives
from hvd_compress.process_group.launcher import Launcher
from tests.contract.cases import FLAT, ROWS, SHAPES, USUAL
from tests.elsewhere import elsewhere
from tests.ranks import on_ranks
from tests.torch_models import DEVICE, Simulation, assert_same, assert_same_bits, targets

LATE = DEVICE.type != "cpu"
"""Whether averages become NaN, and the next call raises the error, where the host does not wait."""

GONE = r"peer|Broken pipe|timed out|first error"
"""The error of a call in which another rank does not take part."""


def _compressor(exchange: str, **options: Any) -> hvdc.Compressor:
    return hvdc.Compressor(
        Route(*USUAL[exchange]), exchange=exchange, **{"threshold": 0, **options}
    )


def _reduce(
    compressor: hvdc.Compressor, tensors: dict[str, torch.Tensor], **options: Any
) -> dict[str, torch.Tensor]:
    got = {name: tensor.clone() for name, tensor in tensors.items()}
    hvdc.all_reduce(list(got.values()), compressor, key=list(got), **options)
    return got


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
        assert _reduce(compressor, tensors)["a"].isnan().all()
    with pytest.raises(kind, match=message):
        _reduce(compressor, tensors)


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
def test_residuals_that_are_moved_in_memory() -> None:
    """Handing a state to another process moves it to shared memory, and frees the memory it was in."""

    def move(state: Any) -> None:
        if isinstance(state, torch.Tensor):
            state.share_memory_() if state.is_cpu else setattr(state, "data", state.data.clone())
        elif isinstance(state, dict):
            for one in state.values():
                move(one)

    for exchange in FLAT:
        moved, left = _compressor(exchange), _compressor(exchange)
        for step in range(6):
            tensors = targets(SHAPES, dist.get_rank(), step)
            assert_same_bits(_reduce(moved, tensors), _reduce(left, tensors))
            if step in (1, 2, 4):
                move(moved.state_dict())


@on_ranks(4, launcher="torchrun")
def test_every_codec_on_four_ranks() -> None:
    """The contract tries up to three ranks, and four on two hosts."""
    for exchange in FLAT:
        for codec, feedback in ROWS[exchange]:
            compressor = hvdc.Compressor(
                Route(codec, feedback), exchange=exchange, threshold=0, seed=5
            )
            simulation = Simulation(exchange, codec, feedback, SHAPES, 4, seed=5)
            for step in range(3):
                everybodys = [targets(SHAPES, rank, step) for rank in range(4)]
                got = _reduce(compressor, everybodys[dist.get_rank()])
                assert_same(exchange, got, simulation.average(everybodys))


@on_ranks(2, launcher="torchrun")
def test_calls_that_overlap() -> None:
    """Each key's residual is its own, whatever is waited for first."""
    for exchange in FLAT:
        compressor = _compressor(exchange)
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
def test_residuals_are_settled_when_a_call_is_over() -> None:
    """Also where a collective is over before the thread that has started it goes on."""
    submit = Launcher.submit

    def slowly(launcher: Launcher, *arguments: Any, **options: Any) -> None:
        submit(launcher, *arguments, **options)
        time.sleep(0.05)

    compressor = _compressor("allgather")
    simulation = Simulation("allgather", *USUAL["allgather"], SHAPES, 2)
    with mock.patch.object(Launcher, "submit", slowly):
        for step in range(6):
            everybodys = [targets(SHAPES, rank, step) for rank in range(2)]
            got = _reduce(compressor, everybodys[dist.get_rank()])
            assert_same_bits(got, simulation.average(everybodys))


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
def test_infinity_is_seen_on_every_rank_and_leaves_no_trace() -> None:
    """Residuals of that call's tensors stay as they were; those of other calls change."""
    compressor = hvdc.Compressor(OneBit(), threshold=0)
    rank = dist.get_rank()
    for step in range(2):
        _reduce(compressor, targets(SHAPES, rank, step))
    before = _residuals(compressor)
    bad = targets(SHAPES, rank, 2)
    if rank == 1:
        bad["a"].view(-1)[17] = math.inf
    other = torch.randn(3000)
    work = hvdc.all_reduce(other, compressor, key="other", async_op=True)
    got = _reduce(compressor, bad)
    assert work is not None and work.wait()
    assert not torch.isfinite(got["a"].view(-1)[17])
    after = _residuals(compressor)
    assert after.pop("other").any()
    assert_same_bits(after, before)


def _residuals(compressor: hvdc.Compressor) -> dict[str, torch.Tensor]:
    tensors = compressor.state_dict()["tensors"]
    return {name: one["residual"].clone() for name, one in tensors.items()}


@on_ranks(2, launcher="torchrun")
def test_another_number_of_ranks() -> None:
    """By the rule of all frontends: what was not sent keeps its part in the average."""
    rank, shape = dist.get_rank(), {"a": (3000,)}
    for exchange in ("allgather", "two_shot"):
        compressor = _compressor(exchange)
        for step in range(2):
            _reduce(compressor, targets(shape, rank, step))
        states: list[Any] = [None, None]
        dist.all_gather_object(states, compressor.state_dict())
        alone = _compressor(exchange, process_group=_alone())
        alone.load_resized(states)
        unsent = sum(state["tensors"]["a"]["residual"] for state in states) / 2
        for state in states:
            if (owned := state["tensors"]["a"]["owned"]) is not None:
                unsent[owned["begin"] : owned["end"]] += owned["residual"]
        kept = alone.state_dict()["tensors"]["a"]
        total = kept["residual"] + (kept["owned"]["residual"] if kept["owned"] else 0)
        torch.testing.assert_close(total.cpu(), unsent.cpu())
        assert alone.state_dict()["keys"] == {"a": {"dtype": "float32", "shape": [3000]}}
        got = _reduce(alone, targets(shape, rank, 2))
        assert torch.isfinite(got["a"]).all()


@on_ranks(2, launcher="torchrun")
def test_states_of_another_device() -> None:
    """They are loaded into the memory in which the parameters are; the states may be anywhere."""
    rank, group = dist.get_rank(), _alone()
    options = {"owner_step": hvdc.AdaGrad()}
    compressor = _compressor("two_shot", **options)
    for step in range(2):
        _reduce(compressor, targets(SHAPES, rank, step))
    states: list[Any] = [None, None]
    dist.all_gather_object(states, compressor.state_dict())
    resized = []
    for given in (states, elsewhere(states)):
        alone = _compressor("two_shot", process_group=group, **options)
        alone.load_resized(given)
        resized.append(alone.state_dict())
        assert torch.isfinite(_reduce(alone, targets(SHAPES, rank, 2))["a"]).all()
    torch.testing.assert_close(*(one["tensors"] for one in resized), rtol=0, atol=0)
    same = _compressor("two_shot", **options)
    same.load_state_dict(elsewhere(states[rank]))
    gradients = targets(SHAPES, rank, 2)
    assert_same_bits(_reduce(same, gradients), _reduce(compressor, gradients))


def _alone() -> Any:
    return [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]


@on_ranks(2, launcher="torchrun")
def test_a_state_is_loaded_before_the_first_call_and_not_where_it_does_not_fit() -> None:
    rank = dist.get_rank()
    compressor = hvdc.Compressor(OneBit(), threshold=0)
    for step in range(2):
        _reduce(compressor, targets(SHAPES, rank, step))
    file = io.BytesIO()
    torch.save(compressor.state_dict(), file)
    state = torch.load(io.BytesIO(file.getvalue()))
    other = hvdc.Compressor(OneBit(), threshold=0)
    with pytest.raises(ValueError, match=f"expected rank {rank}, got {1 - rank}"):
        other.load_state_dict({**state, "rank": 1 - rank})
    assert not other.routes()
    with pytest.raises(ValueError, match="expected states of a compressor of hvd_compr"):
        other.load_state_dict({key: state[key] for key in state if key != "keys"})
    other.load_state_dict(state)
    assert_same_bits(_residuals(other), _residuals(compressor))
    assert other.routes() == compressor.routes()
    gradients = targets(SHAPES, rank, 2)
    assert_same_bits(_reduce(other, gradients), _reduce(compressor, gradients))
    third = hvdc.Compressor(OneBit(), threshold=0)
    _reduce(third, {"b": targets(SHAPES, rank, 0)["b"]})
    with pytest.raises(ValueError, match="load a state before the first call"):
        third.load_state_dict(state)


@on_ranks(2, launcher="torchrun")
def test_the_codec_changes_for_later_keys_too() -> None:
    compressor = hvdc.Compressor(OneBit(), threshold=0)
    with pytest.raises(hvdc.ExchangeError, match="expected a call of all_reduce before"):
        compressor.set_codec(Int8())
    hvdc.all_reduce(torch.randn(3000), compressor, key="first")
    compressor.set_codec(Int8())
    hvdc.all_reduce(torch.randn(3000), compressor, key="second")
    assert {route.codec for route in compressor.routes().values()} == {Int8()}
    with pytest.raises(ValueError, match="expected a pattern that matches"):
        compressor.set_codec(Int8(), layers="third")


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
        (torch.ones(300, dtype=torch.int64), {}, TypeError, "floating-point numbers, got int64"),
        (torch.ones(300, dtype=torch.complex64), {}, TypeError, "numbers, got complex64"),
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
    ):
        with pytest.raises(hvdc.ExchangeError, match="no exchange in progress"):
            call()
    work.wait()
    hvdc.all_reduce(good, compressor, key="good")
    with pytest.raises(ValueError, match="expected the process group of the compressor, got anoth"):
        hvdc.all_reduce(good, compressor, key="good", group=dist.new_group([0, 1]))


@on_ranks(2, launcher="torchrun")
def test_the_last_call_can_be_dropped() -> None:
    """By all ranks, with all of its tensors, and no other call that was under way with it."""
    compressor = hvdc.Compressor(OneBit(), threshold=0)
    simulations = [
        Simulation("allgather", OneBit(), ErrorFeedback(), {n: SHAPES[n] for n in names}, 2)
        for names in ("ab", "c")
    ]
    for step in range(4):
        everybodys = [targets(SHAPES, rank, step) for rank in range(2)]
        sent = copy.deepcopy(everybodys)
        mine, works = everybodys[dist.get_rank()], []
        for names in ("ab", "c"):
            tensors = [mine[name] for name in names]
            works.append(hvdc.all_reduce(tensors, compressor, key=list(names), async_op=True))
        for work, names, simulation in zip(works, ("ab", "c"), simulations, strict=True):
            work.wait()
            assert_same_bits({name: mine[name] for name in names}, simulation.average(sent))
        if step == 1:
            compressor.drop_step()
            simulations[1].drop_step()
    if dist.get_rank() == 1:
        compressor.drop_step()
    with pytest.raises(hvdc.ExchangeError, match="calls of drop_step: 1 on rank 0, 2 on rank 1"):
        hvdc.all_reduce(torch.zeros(SHAPES["c"]), compressor, key="c")


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
    dist.barrier()


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
    dist.barrier()


@on_ranks(2, launcher="torchrun")
def test_a_rank_that_fails_while_others_send() -> None:
    for exchange in sorted(ROWS.keys() & {"two_shot", "integer_sum", "low_rank"}):
        compressor = _compressor(exchange)
        _reduce(compressor, targets(SHAPES, dist.get_rank(), 0))
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
    pack = hvdc.Compressor._pack
    with (
        mock.patch.object(hvdc.Compressor, "_pack", _out_of_memory if rank == 1 else pack),
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
    _reduce(compressor, mine)
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
    compressor = _compressor("two_shot")
    mine = targets(SHAPES, dist.get_rank(), 0)
    _reduce(compressor, mine)
    if dist.get_rank() == 1:
        with (
            mock.patch.object(Pending, "resume", side_effect=MemoryError("on purpose")),
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
    _reduce(compressor, targets(SHAPES, dist.get_rank(), 0))
    start = Collectives.start

    def altered(self: Collectives, collective: Collective) -> tuple[torch.Tensor, dist.Work]:
        if dist.get_rank() == 1:
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
