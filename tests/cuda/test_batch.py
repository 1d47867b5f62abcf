"""A batch on a device has the bytes, residuals, sums and flags of the CPU's, whatever stands in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvd_compress.codecs import ECQ, ErrorFeedback, NoiseKey, OneBit, PayloadError, Ternary
from hvd_compress.engine.executors import Executors
from hvd_compress.kernels.batch import Arrays, BatchPayloadError, Entry
from hvd_compress.kernels.cpu_batch import CpuBatch
from hvd_compress.kernels.cuda_batch import CudaBatch
from hvd_compress.kernels.native import KernelError
from tests.codecs.cases import Truncated, normal
from tests.cuda.executors import Checked, another_stream, configure, deferred_kernels, emulated
from tests.cuda.test_parity import PLAIN, SIZES, SPARSE
from tests.kernels.arrays import DTYPES, Guarded, as_dtype, assert_same, bits
from tests.kernels.parity import EVERY_MODE, LARGE, kept
from tests.kernels.test_batch import Case, cases

OFF = ErrorFeedback(alpha=0.0)
FULL = ErrorFeedback(1.0, 1.0)
ROWS = (*PLAIN, *SIZES, *SPARSE)


def every_row(*shapes: tuple[int, ...], bad: float | None = None) -> list[Case]:
    """A tensor for each row of the table, of all dtypes and modes; the shapes take turns."""
    made = []
    for number, row in enumerate(ROWS):
        shape = shapes[number % len(shapes)]
        values = normal(shape, seed=number)
        if bad is not None and number % 2 and values.size:
            values[[0, values.size // 2]] = bad
        gradient = as_dtype(values, tuple(DTYPES)[number % 3])
        residual = normal(shape, seed=100 + number, scale=0.3)
        noise = NoiseKey(seed=3, rank=1, tensor=number, step=2**33 + number)
        made.append(Case(row.codec, shape, gradient, EVERY_MODE[number // 3 % 5], residual, noise))
    return made


def entries_of(some: Sequence[Case]) -> list[Entry]:
    """Their places in a message, with gaps."""
    entries, end = [], 16
    for case in some:
        noise = replace(case.noise, step=0)
        entries.append(Entry(case.codec, case.shape, case.feedback, noise, end))
        end = entries[-1].end + 16 * (len(entries) % 2)
    return entries


def message_of(entries: Sequence[Entry]) -> torch.Tensor:
    size = max((entry.end for entry in entries), default=0) + 32
    return torch.full((size,), 0x5A, dtype=torch.uint8)


def steps_of(some: Sequence[Case]) -> list[int]:
    return [case.noise.step for case in some]


def residuals_of(some: Sequence[Case]) -> list[torch.Tensor | None]:
    return [kept(c.residual, c.feedback) if c.feedback.enabled else None for c in some]


def expected(some: Sequence[Case]) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The CPU's message and residuals."""
    entries, after = entries_of(some), residuals_of(some)
    message = message_of(entries)
    CpuBatch(entries).encode([c.gradient for c in some], after, after, steps_of(some), message)
    return message, after


def check(
    kernels: Checked, some: Sequence[Case], *, ranks: int = 2, scale: float = 0.5, offset: int = 0
) -> None:
    """Both ways, in place and out of place, between guards."""
    device, entries, steps = kernels.device, entries_of(some), steps_of(some)
    batch = CudaBatch(kernels, entries)
    want, rests = expected(some)
    for in_place in (True, False):
        values = [Guarded(c.gradient, offset * c.gradient.element_size(), device) for c in some]
        given = [
            one if one is None else Guarded(one, offset * one.element_size(), device)
            for one in residuals_of(some)
        ]
        after = (
            given
            if in_place
            else [
                one if one is None else Guarded(torch.full_like(one.array.cpu(), 1e20), 8, device)
                for one in given
            ]
        )
        message = Guarded(message_of(entries), 16, device)
        batch.encode(
            [one.array for one in values],
            [one and one.array for one in given],
            [one and one.array for one in after],
            steps,
            message.array,
        )
        assert_same(message.array.cpu().numpy(), want.numpy(), "message")
        for case, value, old, new, rest in zip(some, values, given, after, rests, strict=True):
            what = f"{case.codec}, {case.shape}, {case.gradient.dtype}, {case.feedback}"
            assert_same(bits(value.array), bits(case.gradient), f"gradient {what}")
            assert value.intact()
            if old is None or new is None or rest is None:
                continue
            assert_same(bits(new.array), bits(rest), f"residual {what}")
            assert old.intact() and new.intact(), what
            if not in_place:
                before = kept(case.residual, case.feedback)
                assert_same(bits(old.array), bits(before), f"residual before {what}")
    assert message.intact()
    rows = (
        torch.stack(
            [
                expected([replace(c, gradient=c.gradient * (1 - 0.5 * rank)) for c in some])[0]
                for rank in range(ranks)
            ]
        )
        if ranks
        else want[None][:0]
    )
    sums = [torch.full_like(case.gradient, 3.0) for case in some]
    nonfinite = CpuBatch(entries).decode_sum(sums, steps, rows, scale)
    outs = [Guarded(torch.full_like(one, 3.0), offset * one.element_size(), device) for one in sums]
    word = torch.zeros(1, dtype=torch.int32, device=device)
    assert not batch.decode_sum([one.array for one in outs], steps, rows.to(device), scale, word)
    kernels.settle()
    assert word.item() == nonfinite
    for case, out, one in zip(some, outs, sums, strict=True):
        assert_same(bits(out.array), bits(one), f"sum {case.codec}, {case.shape}, {one.dtype}")
        assert out.intact()


@pytest.mark.parametrize("ranks", (0, 1, 3))
def test_every_codec_in_one_batch(kernels: Checked, ranks: int) -> None:
    check(kernels, every_row((3, 1377), (65,), (), (0,), (151, 17)), ranks=ranks)


def test_every_codec_at_one_shape(kernels: Checked) -> None:
    for shape in ((), (0,), (65,), (151, 17)):
        check(kernels, every_row(shape))


def test_arrays_that_are_not_aligned(kernels: Checked) -> None:
    for offset in (1, 2):
        check(kernels, every_row((3, 1377)), offset=offset)


@pytest.mark.parametrize("shape", LARGE[1:], ids=str)
def test_tensors_of_many_blocks(kernels: Checked, shape: tuple[int, ...]) -> None:
    """Beside small ones, and together more than a device runs at a time."""
    check(kernels, every_row(shape, (65,)))


@pytest.mark.parametrize("bad", (math.nan, math.inf), ids=str)
def test_groups_that_are_not_finite_keep_their_residual(kernels: Checked, bad: float) -> None:
    check(kernels, every_row((6, 700), (3, 4999), bad=bad))


def test_more_chunks_than_are_added_up_in_one_go(kernels: Checked) -> None:
    shape = (2048 * 2048 + 2049,)
    gradient, residual = torch.from_numpy(normal(shape)), normal(shape, seed=1)
    codecs = (OneBit("tensor"), Ternary("tensor"), ECQ(4, "l2", "tensor"), OneBit(64))
    check(
        kernels, [Case(one, shape, gradient, FULL, residual, NoiseKey()) for one in codecs], ranks=1
    )


def test_more_arrays_than_a_launch_takes(kernels: Checked) -> None:
    """Two kernels take turns, and parts of each array stand apart in the message."""
    count, size = 300, 70
    shapes = [(30,), (40,)]
    places = [(array, begin) for begin in (0, 30) for array in range(count)]
    entries: list[Entry] = []
    for number, (array, begin) in enumerate(places):
        codec = (OneBit(64), ECQ())[array % 2]
        end = entries[-1].end if entries else 0
        entries.append(Entry(codec, shapes[begin > 0], FULL, NoiseKey(tensor=number), end))
    arrays = Arrays([size] * count, places)
    values = [torch.from_numpy(normal((size,), seed=n)) for n in range(count)]
    rests = [torch.from_numpy(normal((size,), seed=n + count)) for n in range(count)]
    steps, want = list(range(count)), message_of(entries)
    device = kernels.device
    after, given = [one.clone() for one in rests], [one.to(device) for one in rests]
    made, message = [torch.empty_like(one) for one in given], want.to(device)
    CpuBatch(entries, 2, arrays).encode(values, rests, after, steps, want)
    batch = CudaBatch(kernels, entries, arrays)
    batch.encode([one.to(device) for one in values], given, made, steps, message)
    assert torch.equal(message.cpu(), want)
    assert all(torch.equal(one.cpu(), rest) for one, rest in zip(made, after, strict=True))
    outs = [torch.zeros(size, device=device) for _ in range(count)]
    batch.decode_sum(outs, steps, message[None])
    kernels.settle()
    CpuBatch(entries, 2, arrays).decode_sum(values, steps, want[None])
    assert all(torch.equal(one.cpu(), sums) for one, sums in zip(outs, values, strict=True))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(some=st.lists(cases(), max_size=5), ranks=st.integers(0, 3))
def test_any_batch(kernels: Checked, some: list[Case], ranks: int) -> None:
    check(kernels, [c for c in some if c.codec.on_device and not c.codec.varies], ranks=ranks)


@pytest.mark.parametrize(("processors", "order"), ((1, 1), (4, 2), (7, 3)))
def test_the_order_in_which_threads_and_blocks_run_does_not_matter(
    processors: int, order: int
) -> None:
    configure(processors, order)
    try:
        check(emulated(), every_row((3, 1377), (40_001,), (151, 170)))
    finally:
        configure(1, 0)


def test_a_batch_may_be_empty(kernels: Checked) -> None:
    check(kernels, [])


def test_a_batch_is_used_again(kernels: Checked) -> None:
    """With other numbers, dtypes, steps and numbers of ranks; what a call leaves is not the next one's."""
    some = every_row((3, 1377), (65,))
    batch, device = CudaBatch(kernels, entries_of(some)), kernels.device
    for turn in range(3):
        now = [
            replace(
                case,
                gradient=torch.roll(case.gradient.to(tuple(DTYPES.values())[turn]), turn),
                noise=replace(case.noise, step=turn),
            )
            for case in some
        ]
        want, rests = expected(now)
        after = [one if one is None else one.to(device) for one in residuals_of(now)]
        message = message_of(batch.entries).to(device)
        batch.encode([c.gradient.to(device) for c in now], after, after, steps_of(now), message)
        assert torch.equal(message.cpu(), want)
        for rest, one in zip(rests, after, strict=True):
            if rest is not None and one is not None:
                assert_same(bits(one), bits(rest), f"residual in turn {turn}")
        outs = [torch.zeros_like(c.gradient, device=device) for c in now]
        batch.decode_sum(outs, steps_of(now), message[None].repeat(1 + turn % 2, 1))
        kernels.settle()


# Altered payloads


def test_the_entry_and_the_rank_of_an_altered_payload_are_named(kernels: Checked) -> None:
    """Only its tensor becomes NaN."""
    some = every_row((5, 77))
    batch, device, steps = CudaBatch(kernels, entries_of(some)), kernels.device, steps_of(some)
    rows = torch.stack([expected(some)[0]] * 3).to(device)
    outs = [torch.zeros_like(c.gradient, device=device) for c in some]
    for number, entry in enumerate(batch.entries):
        byte = entry.offset + (number * 7) % (entry.end - entry.offset)
        rows[number % 3, byte] ^= 1 << number % 8
        batch.decode_sum(outs, steps, rows)
        with pytest.raises(
            BatchPayloadError, match=rf"^rank {number % 3}'s payload: expected"
        ) as e:
            kernels.settle()
        assert (e.value.entry, e.value.rank) == (number, number % 3)
        nan = [bool(out.isnan().all()) for out in outs]
        assert nan == [place == number for place in range(len(some))]
        rows[number % 3, byte] ^= 1 << number % 8
    batch.decode_sum(outs, steps, rows)
    kernels.settle()
    with pytest.raises(BatchPayloadError, match="rank 0's payload: expected the header") as e:
        batch.decode_sum(outs, [*steps[:4], steps[4] + 1, *steps[5:]], rows)
        kernels.settle()
    assert e.value.entry == 4


@pytest.mark.parametrize("order", (0, 1, 2, 3))
def test_of_several_altered_payloads_the_first_tensors_is_named(order: int) -> None:
    """In whatever order the device is done with the tensors, in one launch or in several."""
    configure(2, order)
    try:
        one_of_each = {type(case.codec): case for case in every_row((5, 77))}
        some, kernels = list(one_of_each.values()), emulated()
        batch, steps = CudaBatch(kernels, entries_of(some)), steps_of(some)
        rows = torch.stack([expected(some)[0]] * 2)
        bytes_of = [entry.offset + 40 for entry in batch.entries]
        rows[:, bytes_of] ^= 1
        outs = [torch.zeros_like(c.gradient) for c in some]
        for number, byte in enumerate(bytes_of):
            for rank in range(2):
                batch.decode_sum(outs, steps, rows)
                with pytest.raises(BatchPayloadError) as e:
                    kernels.settle()
                assert (e.value.entry, e.value.rank) == (number, rank)
                rows[rank, byte] ^= 1
    finally:
        configure(1, 0)


def test_errors_of_two_streams_are_both_reported(kernels: Checked) -> None:
    """Each batch names its own tensor and rank."""
    some = every_row((70,))[:2]
    batches, device = [CudaBatch(kernels, entries_of(some)) for _ in range(3)], kernels.device
    rows = torch.stack([expected(some)[0]] * 3).to(device)
    outs = [[torch.zeros_like(c.gradient, device=device) for c in some] for _ in range(3)]
    altered = [rows.clone() for _ in range(3)]
    for number, (entry_number, rank) in enumerate(((0, 1), (1, 2), (0, 0))):
        altered[number][rank, batches[0].entries[entry_number].offset + 40] ^= 1
    kernels.settle()  # Nothing orders the other streams behind this one.
    for batch, out, messages in zip(batches, outs, altered, strict=True):
        with another_stream(kernels):
            batch.decode_sum(out, steps_of(some), messages)
    told = []
    for _ in range(3):
        with pytest.raises(BatchPayloadError) as e:
            kernels.settle()
        told.append((e.value.entry, e.value.rank))
    assert told == [(0, 1), (1, 2), (0, 0)]
    kernels.settle()


def test_an_error_of_a_batch_that_is_gone(kernels: Checked) -> None:
    some = every_row((70,))[:2]
    batch, device = CudaBatch(kernels, entries_of(some)), kernels.device
    rows = torch.zeros(1, message_of(batch.entries).numel(), dtype=torch.uint8, device=device)
    outs = [torch.zeros_like(c.gradient, device=device) for c in some]
    batch.decode_sum(outs, steps_of(some), rows)
    if device == "cuda":
        torch.cuda.synchronize()
    del batch
    with pytest.raises(PayloadError, match="rank 0's payload: expected the header"):
        kernels.settle()


# Codecs without kernels


def test_codecs_without_kernels_are_encoded_beside_the_others() -> None:
    some = every_row((5, 77))[:6]
    for number in (1, 4):
        some[number] = replace(some[number], codec=Truncated())
    some[4].gradient[3] = math.inf
    entries, steps = entries_of(some), steps_of(some)
    arrays = Arrays.whole(case.shape for case in some)
    want, rests = expected(some)
    with deferred_kernels(), pytest.warns(UserWarning, match="Truncated.* has no CUDA kernel"):
        batch = Executors(1).batch(entries, arrays, want)
        message, after = message_of(entries), residuals_of(some)
        batch.encode([c.gradient for c in some], after, after, steps, message)
        assert torch.equal(message, want)
        for rest, one in zip(rests, after, strict=True):
            assert rest is None or one is None or np.array_equal(bits(one), bits(rest))
        outs = [torch.zeros_like(c.gradient) for c in some]
        word = torch.zeros(1, dtype=torch.int32)
        batch.decode_sum(outs, steps, message[None], 1.0, word)
        assert word.item() == 1
        message[entries[4].offset] ^= 1
        with pytest.raises(BatchPayloadError) as e:
            batch.decode_sum(outs, steps, message[None])
        assert e.value.entry == 4


def test_an_altered_payload_of_a_codec_without_kernels_is_named_on_a_device_too() -> None:
    """The copy that was decoded is what tells."""
    some = [replace(case, codec=Truncated()) for case in every_row((70,))[:2]]
    entries, (want, _) = entries_of(some), expected(some)
    rows = want.repeat(3, 1)
    rows[2, entries[1].offset] ^= 1
    outs = [torch.zeros_like(case.gradient) for case in some]
    with deferred_kernels(), pytest.warns(UserWarning, match="Truncated.* has no CUDA kernel"):
        batch = Executors(1).batch(entries, Arrays.whole(case.shape for case in some), want)
        with pytest.raises(BatchPayloadError, match="rank 2's payload: expected") as e:
            batch.decode_sum(outs, steps_of(some), rows)
    assert (e.value.entry, e.value.rank) == (1, 2)


# Arguments


CODEC, SHAPE = ECQ(4, "l2", 64), (70,)
SIZE = CODEC.payload_bytes(SHAPE)
ENTRIES = [
    Entry(CODEC, SHAPE, FULL, NoiseKey(), 0),
    Entry(OneBit(64), SHAPE, OFF, NoiseKey(tensor=1), SIZE),
]
BYTES = torch.zeros(ENTRIES[1].end, dtype=torch.uint8)


def placed(given: Any, device: str) -> Any:
    """Tensors on the device, in whatever list."""
    if isinstance(given, list):
        return [placed(one, device) for one in given]
    there = isinstance(given, torch.Tensor) and given.device.type == "cpu"
    return given.to(device) if there else given


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    (
        ({"values": [torch.zeros(71), torch.zeros(70)]}, ValueError, r"values\[0\]: expected 70"),
        ({"values": [torch.zeros(70)]}, ValueError, "values: expected 2 items, got 1"),
        ({"values": [torch.zeros(140)[::2]] * 2}, ValueError, r"values\[0\]: expected a contig"),
        ({"values": [torch.zeros(70).double()] * 2}, TypeError, r"values\[0\]: expected dtype"),
        ({"values": [torch.zeros(70, device="meta")] * 2}, ValueError, r"values\[0\]: .* on meta"),
        ({"residuals": [None, None]}, ValueError, r"residuals\[0\]: expected a residual exactly"),
        ({"residuals": [torch.zeros(70)] * 2}, ValueError, r"residuals\[1\]: expected a residual"),
        ({"next_residuals": [None, None]}, ValueError, r"next_residuals\[0\]: expected a residual"),
        ({"residuals": [torch.zeros(70).half(), None]}, TypeError, r"residuals\[0\]: .* float32"),
        (
            {"next_residuals": [torch.zeros(70).bfloat16(), None]},
            TypeError,
            r"next_residuals\[0\]: expected dtype float32, got .*bfloat16",
        ),
        ({"message": BYTES[:-16]}, PayloadError, "message: expected at least"),
        ({"steps": [0, -1]}, OverflowError, None),
    ),
)
def test_wrong_arguments(
    kernels: Checked, changed: dict[str, Any], error: type[Exception], message: str | None
) -> None:
    arguments: dict[str, Any] = {
        "values": [torch.zeros(70), torch.zeros(70).half()],
        "residuals": [torch.zeros(70), None],
        "next_residuals": [torch.zeros(70), None],
        "steps": [0, 2**64 - 1],
        "message": BYTES,
    }
    batch = CudaBatch(kernels, ENTRIES)
    batch.encode(**{name: placed(one, kernels.device) for name, one in arguments.items()})
    arguments.update(changed)
    moved = {name: placed(one, kernels.device) for name, one in arguments.items()}
    if "values" in changed and not changed["values"][0].is_contiguous():
        moved["values"] = [torch.zeros(140, device=kernels.device)[::2]] * 2
    with pytest.raises(error, match=message):
        batch.encode(**moved)


def test_rows_that_are_not_aligned_or_too_many(kernels: Checked) -> None:
    batch, device = CudaBatch(kernels, ENTRIES), kernels.device
    outs = [torch.zeros(70, device=device) for _ in range(2)]
    rows = torch.zeros(2, BYTES.numel() + 4, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match="expected payloads aligned to 16 bytes"):
        batch.decode_sum(outs, [0, 0], rows)
    with pytest.raises(ValueError, match="expected payloads aligned to 16 bytes"):
        batch.encode(outs, [outs[0], None], [outs[1], None], [0, 0], rows[0, 4:])
    with pytest.raises(ValueError, match="expected at most 1024 ranks, got 1025"):
        batch.decode_sum(outs, [0, 0], rows[:1].expand(1025, -1))
    with pytest.raises(PayloadError, match="rows: expected at least"):
        batch.decode_sum(outs, [0, 0], rows[:, :-16])
    with pytest.raises(ValueError, match="multiples of 16 from 0 on, got 4"):
        CudaBatch(kernels, [replace(ENTRIES[0], offset=4)])
    with pytest.raises(KernelError, match="has no CUDA kernel"):
        CudaBatch(kernels, [replace(ENTRIES[0], codec=Truncated())])


# Restoring


@pytest.mark.parametrize("bad", (0, 1))
def test_many_residuals_are_restored_together(kernels: Checked, bad: int) -> None:
    sizes = [0, 1, 70_001, *range(2, 450)]
    device = kernels.device
    word = torch.full((1,), bad, dtype=torch.int32, device=device)
    # Of both dtypes, bfloat16 ones at odd places, too, and nothing beside them.
    pairs = [
        tuple(
            Guarded(torch.full((n,), number, dtype=dtype), dtype.itemsize, device)
            for number in (1, 2)
        )
        for n in sizes
        for dtype in ((torch.float32, torch.bfloat16)[n % 2],)
    ]
    columns = tuple(zip(*((before.array, after.array) for before, after in pairs), strict=True))
    kernels.restore([columns], word)
    for before, after in pairs:
        assert bool((before.array == 1).all()) and before.intact()
        assert bool((after.array == (1 if bad else 2)).all()) and after.intact()
    before, after = torch.zeros(3, device=device), torch.zeros(3, device=device)
    for source, destination in ((before, after.bfloat16()), (before.half(), after.half())):
        with pytest.raises(TypeError, match="expected pairs of one dtype, float32 or bfloat16"):
            kernels.restore([([source], [destination])], word)


def test_an_array_has_residuals_of_one_dtype(kernels: Checked) -> None:
    some = [replace(ENTRIES[0], feedback=FULL), replace(ENTRIES[1], feedback=EVERY_MODE[3])]
    with pytest.raises(ValueError, match="expected residuals of one dtype in each array, got two"):
        CudaBatch(kernels, some, Arrays([140], [(0, 0), (0, 70)]))


# CUDA graphs


def test_a_captured_batch_repeats_its_step_on_what_is_there_then(kernels: Checked) -> None:
    if kernels.device != "cuda":
        pytest.skip("the emulated device has no graphs")
    some = every_row((3, 1377), (65,))
    batch, steps = CudaBatch(kernels, entries_of(some)), steps_of(some)
    values = [case.gradient.cuda() for case in some]
    before = [one if one is None else one.cuda() for one in residuals_of(some)]
    after = [one if one is None else torch.empty_like(one) for one in before]
    message, outs = message_of(batch.entries).cuda(), [torch.zeros_like(one) for one in values]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    for capture in (False, True):
        with torch.cuda.graph(graph, stream=stream) if capture else torch.cuda.stream(stream):
            batch.encode(values, before, after, steps, message)
            batch.decode_sum(outs, steps, message[None])
        torch.cuda.synchronize()
    for value in values:
        value.mul_(2)
    now = [replace(case, gradient=case.gradient * 2) for case in some]
    graph.replay()
    kernels.settle()
    want, rests = expected(now)
    assert torch.equal(message.cpu(), want)
    for rest, one in zip(rests, after, strict=True):
        if rest is not None and one is not None:
            assert_same(bits(one), bits(rest), "residual")
    sums = [torch.zeros_like(case.gradient) for case in some]
    CpuBatch(batch.entries).decode_sum(sums, steps, want[None])
    for out, one in zip(outs, sums, strict=True):
        assert_same(bits(out), bits(one), "sum")
