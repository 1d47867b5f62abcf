"""A batch's bytes, residuals and sums are the reference's, whatever stands in it and next to it."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvd_compress.codecs import ECQ, Codec, ErrorFeedback, NoiseKey, OneBit, PayloadError
from hvd_compress.codecs.payload import FLAG_NONFINITE, payload_length, read_header
from hvd_compress.kernels.batch import Arrays, Batch, BatchPayloadError, Entry
from hvd_compress.kernels.copies import CopiedBatch
from hvd_compress.kernels.cpu_arrays import FixedArrays, addresses_of
from hvd_compress.kernels.cpu_batch import CpuBatch
from hvd_compress.kernels.cpu_library import load
from hvd_compress.kernels.native import KernelError, Tensor, spec_of
from hvd_compress.kernels.reference import ReferenceBatch
from tests.codecs.cases import Truncated, floats, normal, shapes, tensors
from tests.codecs.rows import ROWS, Row
from tests.kernels.arrays import DTYPES, Guarded, as_dtype, assert_same, bits
from tests.kernels.parity import EVERY_MODE, LARGE, decoded, kept, reference_encode

FILL = 0x5A
THREADS = (1, 2, 3)


@dataclass(frozen=True, eq=False)
class Case:
    """A tensor of a batch, and the bytes before its payload."""

    codec: Codec
    shape: tuple[int, ...]
    gradient: torch.Tensor
    feedback: ErrorFeedback
    residual: np.ndarray
    noise: NoiseKey
    gap: int = 0


def entries_of(cases: Sequence[Case]) -> list[Entry]:
    """Their places in a message, one behind the other."""
    entries, end = [], 0
    for case in cases:
        noise = replace(case.noise, step=0)
        entries.append(Entry(case.codec, case.shape, case.feedback, noise, end + case.gap))
        end = entries[-1].end
    return entries


def message_of(entries: Sequence[Entry], count: int = 1) -> torch.Tensor:
    """Messages with room behind the last payload, filled with something."""
    size = max((entry.end for entry in entries), default=0) + 20
    return torch.full((count, size), FILL, dtype=torch.uint8)


def row_of(case: Case) -> Row:
    return Row("", case.codec, 0, case.feedback)


@lru_cache(1000)
def reference_row(case: Case) -> tuple[np.ndarray, np.ndarray | None]:
    """The reference's payload and residual: once for all executors, threads and places."""
    want = reference_encode(
        row_of(case), case.shape, case.gradient, case.feedback, case.residual, case.noise
    )
    return want.payload, want.residual


@lru_cache(1000)
def on_rank(case: Case, rank: int) -> Case:
    """The case with another gradient."""
    return replace(case, gradient=case.gradient * (1 - 0.5 * rank))


def check_encode(batch: Batch, cases: Sequence[Case], *, in_place: bool) -> torch.Tensor:
    """Encodes between guards, compares with the reference, and returns the message."""
    entries = entries_of(cases)
    values = [Guarded(case.gradient, case.gradient.element_size()) for case in cases]
    before = [
        Guarded(kept(case.residual, case.feedback), 4) if case.feedback.enabled else None
        for case in cases
    ]
    garbage = [None if one is None else torch.full_like(one.array, 1e20) for one in before]
    after = before if in_place else [None if one is None else Guarded(one, 8) for one in garbage]
    message = Guarded(message_of(entries)[0], 12)
    want = message.array.numpy().copy()

    batch.encode(
        [one.array for one in values],
        [one and one.array for one in before],
        [one and one.array for one in after],
        [case.noise.step for case in cases],
        message.array,
    )

    for place, (case, entry) in enumerate(zip(cases, entries, strict=True)):
        what = f"{place}: {case.codec}, {case.shape}, {case.gradient.dtype}, {case.feedback}"
        want[entry.offset : entry.end], residual = reference_row(case)
        got = message.array.numpy()[entry.offset : entry.end]
        assert_same(got, want[entry.offset : entry.end], f"payload {what}")
        assert_same(bits(values[place].array), bits(case.gradient), f"gradient {what}")
        old, new = before[place], after[place]
        if residual is None or old is None or new is None:
            continue
        assert_same(bits(new.array), bits(kept(residual, case.feedback)), f"residual {what}")
        if not in_place:
            unchanged = bits(kept(case.residual, case.feedback))
            assert_same(bits(old.array), unchanged, f"residual before {what}")
        assert old.intact() and new.intact() and values[place].intact(), f"out of bounds: {what}"
    assert_same(message.array.numpy(), want, "bytes between payloads")
    assert message.intact()
    return message.array.clone()


def check_decode(batch: Batch, cases: Sequence[Case], rows: torch.Tensor, scale: float) -> None:
    """Decodes between guards, and compares with the reference."""
    entries = entries_of(cases)
    kept = rows.clone()
    outs = [Guarded(torch.full_like(case.gradient, 3.0), 8) for case in cases]
    steps = [case.noise.step for case in cases]
    nonfinite = batch.decode_sum([out.array for out in outs], steps, rows, scale)
    flags = 0
    for case, entry, out in zip(cases, entries, outs, strict=True):
        payloads = kept[:, entry.offset : entry.end].numpy()
        for payload in payloads:
            flags |= read_header(payload).flags
        zeros = torch.zeros_like(out.array)
        want = decoded(row_of(case), case.shape, payloads, zeros, case.noise.step, scale)
        assert_same(bits(out.array), want, f"{case.codec}, {case.shape}, {case.gradient.dtype}")
        assert out.intact()
    assert nonfinite == bool(flags & FLAG_NONFINITE)
    assert torch.equal(rows, kept)


def messages(cases: Sequence[Case], ranks: int) -> torch.Tensor:
    """Messages of several ranks, by the reference, as rows that do not adjoin."""
    entries = entries_of(cases)
    rows = message_of(entries, ranks)
    rows = torch.nn.functional.pad(rows, (0, 4 + -rows.shape[1] % 4), value=FILL)
    for rank, row in enumerate(rows):
        for case, entry in zip(cases, entries, strict=True):
            payload, _ = reference_row(on_rank(case, rank))
            row[entry.offset : entry.end] = torch.from_numpy(payload)
    return rows[:, :-4]


def check(cases: Sequence[Case], threads: int, ranks: int, scale: float) -> None:
    """Encodes and decodes, in place and not, with every batch that takes tensors on the CPU."""
    entries = entries_of(cases)
    rows = messages(cases, ranks)
    batches: list[Batch] = [CpuBatch(entries, threads)]
    if threads == 1:  # The reference has no more.
        batches += [CopiedBatch(entries), ReferenceBatch(entries)]
    for batch in batches:
        for in_place in (True, False):
            message = check_encode(batch, cases, in_place=in_place)
            check_decode(batch, cases, message[None], scale)
        check_decode(batch, cases, rows, scale)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A tensor of any kind."""
    codec = draw(st.sampled_from(ROWS)).codec
    shape = draw(shapes())
    anything = st.one_of(floats(), floats(1.0), st.sampled_from((math.nan, math.inf, -math.inf)))
    values = draw(tensors(math.prod(shape), draw(st.sampled_from((floats(), anything)))))
    words = st.integers(0, 2**32 - 1)
    return Case(
        codec,
        shape,
        as_dtype(values, draw(st.sampled_from(tuple(DTYPES)))),
        draw(st.sampled_from(EVERY_MODE)),
        draw(tensors(math.prod(shape), floats())),
        NoiseKey(draw(words), draw(words), draw(words), draw(st.integers(0, 2**64 - 1))),
        4 * draw(st.integers(0, 5)),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    tensors=st.lists(cases(), max_size=5),
    threads=st.sampled_from(THREADS),
    ranks=st.integers(0, 3),
    scale=floats(),
)
def test_any_batch(isa: str, tensors: list[Case], threads: int, ranks: int, scale: float) -> None:
    check(tensors, threads, ranks, scale)


@cache
def every_row(shape: tuple[int, ...], bad: float | None = None) -> tuple[Case, ...]:
    """A tensor for each row of the table, of all dtypes and modes."""
    made = []
    for number, row in enumerate(ROWS):
        values = normal(shape, seed=number)
        if bad is not None and values.size:
            values[[0, values.size // 2]] = bad
        made.append(
            Case(
                row.codec,
                shape,
                as_dtype(values, tuple(DTYPES)[number % 3]),
                EVERY_MODE[number // 3 % 5],
                normal(shape, seed=100 + number, scale=0.3),
                NoiseKey(seed=3, rank=1, tensor=number, step=number),
                4 * (number % 4),
            )
        )
    return tuple(made)


@pytest.mark.parametrize("shape", ((), (0,), (65,), (151, 17), (3, 1377)), ids=str)
def test_every_codec_in_one_batch(shape: tuple[int, ...], isa: str) -> None:
    for threads in THREADS:
        check(every_row(shape), threads, 2, 0.5)


@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_tensors_of_many_tasks(shape: tuple[int, ...]) -> None:
    many = every_row(shape)
    small = every_row((151, 17))
    mixed = [case for pair in zip(many[::3], small[::3], strict=True) for case in pair]
    entries = entries_of(mixed)
    rows = messages(mixed, 2)
    for threads in (1, 3):
        batch = CpuBatch(entries, threads)
        check_encode(batch, mixed, in_place=threads == 1)
        check_decode(batch, mixed, rows, 1 / 3)


@pytest.mark.parametrize("bad", (math.nan, math.inf), ids=str)
def test_groups_that_are_not_finite_keep_their_residual(bad: float, isa: str) -> None:
    check(every_row((6, 700), bad), 2, 2, 1.0)


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.name in ("onebit", "ecq", "fp16")], ids=str
)
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_many_residuals_go_past_the_caches(row: Row, isa: str, dtype: str) -> None:
    """Long, aligned residuals bypass the caches; the results are the reference's in place and elsewhere."""
    shape = (530_001,)
    values = normal(shape)
    values[[7, 400_000]] = math.inf
    feedback = replace(row.feedback, residual_dtype=dtype)
    entry = Entry(row.codec, shape, feedback, NoiseKey(), 0)
    batch, gradient = CpuBatch([entry], 2), torch.from_numpy(values)
    before = as_dtype(normal(shape, seed=2, scale=0.3), dtype)
    want, expected = before.clone(), torch.zeros(entry.end, dtype=torch.uint8)
    batch.encode([gradient], [want], [want], [0], expected)
    for offset in (0, 4):
        after = Guarded(torch.zeros_like(before), offset)
        message = torch.zeros_like(expected)
        former = before.clone()
        batch.encode([gradient], [former], [after.array], [0], message)
        assert torch.equal(message, expected) and torch.equal(former, before)
        assert np.array_equal(bits(after.array), bits(want))
        assert after.intact()


# Altered payloads


@pytest.mark.parametrize("threads", (1, 3))
def test_the_entry_and_the_rank_of_an_altered_payload_are_named(threads: int, isa: str) -> None:
    some = list(every_row((5, 77)))
    some[2], some[9] = (replace(some[n], codec=Truncated()) for n in (2, 9))
    entries, rows = entries_of(some), messages(some, 3)
    steps = [case.noise.step for case in some]
    outs = [torch.zeros(385) for _ in some]
    random = np.random.default_rng(threads)
    for batch in (CpuBatch(entries, threads), ReferenceBatch(entries)):
        for number, entry in enumerate(entries):
            rank, bit = number % 3, int(random.integers(8))
            payload = rows[rank, entry.offset : entry.end].numpy()
            byte = entry.offset + int(random.integers(payload_length(payload, payload.size)))
            rows[rank, byte] ^= 1 << bit
            with pytest.raises(
                BatchPayloadError, match=r"^rank \d's payload: expected .*, got "
            ) as e:
                batch.decode_sum(outs, steps, rows)
            assert (e.value.entry, e.value.rank) == (number, rank)
            assert str(e.value).startswith(f"rank {rank}'s ")
            rows[rank, byte] ^= 1 << bit
        batch.decode_sum(outs, steps, rows)


def test_another_step_is_an_error_of_its_entry() -> None:
    some = every_row((70,))
    entries, rows = entries_of(some), messages(some, 2)
    steps = [case.noise.step for case in some]
    steps[4] += 1
    outs = [torch.zeros(70) for _ in some]
    for batch in (CpuBatch(entries), ReferenceBatch(entries)):
        with pytest.raises(
            BatchPayloadError, match="rank 0's payload: expected step 5, got 4"
        ) as e:
            batch.decode_sum(outs, steps, rows)
        assert e.value.entry == 4


def test_bytes_between_payloads_may_be_anything() -> None:
    some = every_row((70,))
    entries, rows = entries_of(some), messages(some, 2)
    rows[:, : entries[0].offset] ^= 0xFF
    rows[:, entries[-1].end :] ^= 0xFF
    check_decode(CpuBatch(entries), some, rows, 1.0)


# Several entries in one array


@pytest.mark.parametrize("dtype", DTYPES)
def test_entries_may_be_parts_of_arrays(dtype: str, isa: str) -> None:
    """Parts of arrays, in any order and beside elements of no entry, give the same as whole arrays."""
    sizes, places = [300, 5, 1000], [(2, 96), (0, 0), (2, 500), (0, 211)]
    shapes = [(4, 101), (200,), (500,), (89,)]
    feedbacks = {0: FULL, 2: ErrorFeedback(alpha=0.0)}
    codecs = [OneBit(64), ECQ(), Truncated(), OneBit(64)]
    cases = [
        Case(codec, shape, torch.zeros(0), feedbacks[array], np.zeros(0), NoiseKey(tensor=array))
        for codec, shape, (array, _) in zip(codecs, shapes, places, strict=True)
    ]
    entries, arrays = entries_of(cases), Arrays(sizes, places)
    values = [as_dtype(normal((size,), seed=size), dtype) for size in sizes]
    before = [torch.from_numpy(normal((300,), seed=7)), None, None]
    steps = [3, 4, 5]

    def part(array: Any, place: int) -> Any:
        begin = places[place][1]
        return None if array is None else array[begin : begin + math.prod(shapes[place])].clone()

    def own(items: Sequence[Any]) -> list[Any]:
        return [part(items[number], place) for place, (number, _) in enumerate(places)]

    want, alone = message_of(entries)[0], CpuBatch(entries, 2)
    rests = own(before)
    alone.encode(own(values), rests, rests, [steps[number] for number, _ in places], want)
    for make in (CpuBatch, CopiedBatch, ReferenceBatch):
        batch = make(entries, arrays=arrays)
        got, after = message_of(entries)[0], [torch.full((300,), 1e20), None, None]
        batch.encode(values, before, after, steps, got)
        assert torch.equal(got, want)
        for place, rest in enumerate(rests):
            if rest is not None:
                assert_same(bits(part(after[0], place)), bits(rest), f"residual {place}")
        assert (after[0][200:211] == 1e20).all()
        outs = [torch.full((size,), 3.0, dtype=values[0].dtype) for size in sizes]
        assert not batch.decode_sum(outs, steps, got[None], 0.5)
        sums = own(outs)
        alone.decode_sum(sums, [steps[number] for number, _ in places], want[None], 0.5)
        for place, one in enumerate(sums):
            assert_same(bits(part(outs[places[place][0]], place)), bits(one), f"sum {place}")
        assert (outs[1] == 3).all() and (outs[2][:96] == 3).all()


# A codec that only the reference knows


@pytest.mark.parametrize("shape", ((), (0,), (5, 77)), ids=str)
def test_codecs_without_kernels_are_encoded_beside_the_others(shape: tuple[int, ...]) -> None:
    some = list(every_row(shape))
    for number in (0, 4, 5, 26):  # Of every dtype.
        some[number] = replace(some[number], codec=Truncated())
    for threads in THREADS:
        check(some, threads, 2, 0.5)


# Arguments


CODEC, SHAPE = ECQ(4, "l2", 64), (70,)
FULL = ErrorFeedback(1.0, 1.0)
SIZE = CODEC.payload_bytes(SHAPE)
ENTRIES = [
    Entry(CODEC, SHAPE, FULL, NoiseKey(), 0),
    Entry(OneBit(64), SHAPE, ErrorFeedback(alpha=0.0), NoiseKey(tensor=1), SIZE + 4),
]
BYTES = torch.zeros(ENTRIES[1].end, dtype=torch.uint8)
STRIDED = torch.stack([BYTES, BYTES], 1)
ODD = torch.nn.functional.pad(BYTES.repeat(2, 1), (2, 0))[:, 2:]
UNEVEN = torch.nn.functional.pad(BYTES.repeat(2, 1), (0, 2))


def encode(**changed: Any) -> None:
    arguments: dict[str, Any] = {
        "values": [torch.zeros(70), torch.zeros(70).half()],
        "residuals": [torch.zeros(70), None],
        "next_residuals": [torch.zeros(70), None],
        "steps": [0, 2**64 - 1],
        "message": BYTES.clone(),
    }
    CpuBatch(ENTRIES).encode(**{**arguments, **changed})


def decode(**changed: Any) -> None:
    message = BYTES.clone()
    arguments = ([torch.zeros(70)] * 2, [torch.zeros(70), None], [torch.zeros(70), None], [0, 3])
    CpuBatch(ENTRIES).encode(*arguments, message)
    given: dict[str, Any] = {
        "values": [torch.zeros(70), np.zeros(70, np.float16)],
        "steps": [0, 3],
        "rows": message[None],
    }
    CpuBatch(ENTRIES).decode_sum(**{**given, **changed})


WRONG_GRADIENTS = (
    (torch.zeros(71), ValueError, "expected 70 elements, got 71"),
    (
        torch.zeros(70).double(),
        TypeError,
        "expected dtype float32, float16 or bfloat16, got float64",
    ),
    (np.zeros(70, ">f4"), TypeError, "expected dtype float32, float16 or bfloat16, got >f4"),
    (np.zeros(70, np.int32), TypeError, "expected dtype float32, float16 or bfloat16, got int32"),
    (torch.zeros(140)[::2], ValueError, "expected a contiguous array"),
    (np.zeros(140, np.float32)[::2], ValueError, "expected a contiguous array"),
    (torch.zeros(70, device="meta"), ValueError, "expected a CPU tensor, got one on meta"),
)
WRONG_RESIDUALS = (
    (torch.zeros(69), ValueError, "expected 70 elements, got 69"),
    (torch.zeros(70).half(), TypeError, "expected dtype float32, got torch.float16"),
    (torch.zeros(140)[::2], ValueError, "expected a contiguous array"),
)


def at_first(value: Any) -> list[Any]:
    return [value, None]


LISTS = ("values", "residuals", "next_residuals", "steps")
WRONG: tuple[tuple[Callable[..., None], str, Any, type[Exception], str], ...] = (
    *(
        (call, "values", [torch.zeros(70), value], error, rf"values\[1\]: {text}")
        for call in (encode, decode)
        for value, error, text in WRONG_GRADIENTS
    ),
    *(
        (encode, name, at_first(value), error, rf"{name}\[0\]: {text}")
        for name in ("residuals", "next_residuals")
        for value, error, text in WRONG_RESIDUALS
    ),
    *(
        (encode, name, given, ValueError, rf"{name}\[{place}\]: expected a residual exactly where")
        for name in ("residuals", "next_residuals")
        for place, given in ((0, [None, None]), (1, [torch.zeros(70)] * 2))
    ),
    *((encode, name, [], ValueError, f"{name}: expected 2 items, got 0") for name in LISTS),
    *((decode, name, [], ValueError, f"{name}: expected 2 items") for name in ("values", "steps")),
    (encode, "steps", [0, -1], OverflowError, "-1"),
    (encode, "message", BYTES[:-1], PayloadError, "message: expected at least"),
    (encode, "message", BYTES.to(torch.int8), TypeError, "message: expected dtype uint8, got"),
    (encode, "message", STRIDED[:, 0], ValueError, "message: expected a contiguous"),
    (encode, "message", ODD[0], ValueError, "message: expected bytes that start"),
    (decode, "rows", BYTES[None, :-1], PayloadError, "rows: expected at least .* bytes, got"),
    (decode, "rows", BYTES[None].to(torch.int8), TypeError, "rows: expected dtype uint8"),
    (decode, "rows", STRIDED.t(), ValueError, "rows: expected a contiguous"),
    (decode, "rows", ODD[:1], ValueError, "rows: expected bytes that start"),
    (decode, "rows", UNEVEN, ValueError, "rows: expected bytes that start"),
)


@pytest.mark.parametrize(("call", "name", "value", "error", "message"), WRONG)
def test_wrong_arguments(
    call: Callable[..., None], name: str, value: Any, error: type[Exception], message: str
) -> None:
    call()
    with pytest.raises(error, match=message):
        call(**{name: value})


@pytest.mark.parametrize(
    ("offsets", "message"),
    (
        ((0, SIZE - 4), f"Entry.offset: expected nothing before {SIZE} to be used twice"),
        ((SIZE, 0), None),
        ((2, SIZE + 4), "Entry.offset: expected multiples of 4 from 0 on, got 2"),
        ((-4, SIZE), "Entry.offset: expected multiples of 4 from 0 on, got -4"),
    ),
)
def test_places_in_the_message(offsets: tuple[int, int], message: str | None) -> None:
    codecs = (CODEC, CODEC)
    entries = [
        Entry(codec, SHAPE, FULL, NoiseKey(), offset)
        for codec, offset in zip(codecs, offsets, strict=True)
    ]
    for make in (CpuBatch, ReferenceBatch):
        if message is None:
            make(entries)
        else:
            with pytest.raises(ValueError, match=message):
                make(entries)


@pytest.mark.parametrize(
    ("threads", "error"), ((0, ValueError), (-1, ValueError), (1.5, TypeError))
)
def test_wrong_numbers_of_threads(threads: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"CpuBatch\.threads: expected .*, got "):
        CpuBatch([], threads)


def test_arrays_that_stay_where_they_are_are_checked_once() -> None:
    """And again by a batch of other sizes."""
    batch, message = CpuBatch(ENTRIES), BYTES.clone()
    values, rests, steps = [torch.ones(70), torch.ones(70)], [torch.zeros(70), None], [0, 0]
    batch.encode(values, rests, rests, steps, message)
    outs = FixedArrays([torch.zeros(70), torch.zeros(70)])
    for _ in range(2):
        outs[1].zero_()
        batch.decode_sum(outs, steps, message[None])
        assert (outs[1] == 1).all()
    with pytest.raises(ValueError, match=r"values\[0\]: expected 35 elements, got 70"):
        CpuBatch([replace(one, shape=(35,)) for one in ENTRIES]).decode_sum(
            outs, steps, message[None]
        )
    for other, error in ((torch.zeros(71), ValueError), (torch.zeros(70).double(), TypeError)):
        wrong = FixedArrays([outs[0], other])
        for _ in range(2):
            with pytest.raises(error, match=r"values\[1\]: expected"):
                batch.decode_sum(wrong, steps, message[None])


def test_parts_of_one_buffer() -> None:
    sizes = [3, 0, 5]
    cut = FixedArrays.cut(torch.arange(8.0), sizes)
    assert [one.tolist() for one in cut] == [[0, 1, 2], [], [3, 4, 5, 6, 7]]
    found, checked = addresses_of(cut, sizes, None), addresses_of([*cut], sizes, None)
    assert found is not None and checked is not None
    assert [*found.pointers[[0, 2]]] == [*checked.pointers[[0, 2]]]
    assert [*found.dtypes] == [*checked.dtypes] and found.codes == checked.codes
    assert addresses_of(cut, [8], None) is None


# The C interface


def c_tensors(count: int = 3) -> Any:
    """Sound tensors, whose payloads stand one behind the other."""
    made = (Tensor * count)()
    for place, tensor in enumerate(made):
        spec = spec_of(CODEC, SHAPE)
        assert spec is not None
        tensor.spec = spec
        tensor.values = ctypes.addressof(C_NUMBERS[place])
        tensor.residual = tensor.next_residual = ctypes.addressof(C_NUMBERS[3 + place])
        tensor.offset, tensor.payload_bytes = place * SIZE, SIZE
    return made


C_NUMBERS = [(ctypes.c_float * 70)() for _ in range(6)]


def c_encode(tensors: Any, count: int, message: Any) -> tuple[int, int]:
    bad = ctypes.c_int64(-7)
    status = load().hvdc_encode_batch(tensors, count, message, 2, ctypes.byref(bad))
    return status, bad.value


def c_decode(tensors: Any, count: int, message: Any, stride: int = 0, ranks: int = 1) -> Any:
    bad, rank = ctypes.c_int64(-7), ctypes.c_int32(-7)
    places = ctypes.byref(bad), ctypes.byref(rank)
    status = load().hvdc_decode_batch(tensors, count, message, stride, ranks, 1.0, 2, *places)
    return status, bad.value, rank.value


@pytest.mark.parametrize("place", (0, 2))
@pytest.mark.parametrize(
    ("field", "value", "status"),
    (
        ("values", 0, 1),
        ("dtype", 3, 1),
        ("dtype", -1, 1),
        ("residual", 0, 1),
        ("next_residual", 0, 1),
        ("spec", spec_of(CODEC, (200,)), 2),
        ("payload_bytes", SIZE - 16, 2),
        ("offset", -4, 2),
        ("offset", 2, 2),
    ),
)
def test_the_library_names_the_tensor(place: int, field: str, value: Any, status: int) -> None:
    message = (ctypes.c_uint32 * (3 * SIZE // 4))()
    tensors = c_tensors()
    assert c_encode(tensors, 3, message) == (0, -1)
    assert c_decode(tensors, 3, message) == (0, -1, -1)
    setattr(tensors[place], field, value)
    assert c_encode(tensors, 3, message) == (status, place)
    assert c_decode(tensors, 3, message) == (status, place, -1)


def test_the_library_refuses_other_arguments() -> None:
    message = (ctypes.c_uint32 * (3 * SIZE // 4))()
    tensors = c_tensors()
    odd = ctypes.addressof(message) + 2
    assert c_encode(None, 0, None) == (0, -1)
    assert c_decode(None, 0, None) == (0, -1, -1)
    for bad in ((None, 3, message), (tensors, 3, None), (tensors, -1, message), (tensors, 2, odd)):
        assert c_encode(*bad) == (1, -1)
        assert c_decode(*bad) == (1, -1, -1)
    assert c_decode(tensors, 3, message, ranks=-1) == (1, -1, -1)
    assert c_encode(tensors, 3, message) == (0, -1)
    for stride in (0, SIZE - 4, SIZE + 2, -SIZE):
        assert c_decode(tensors, 3, message, stride, ranks=2) == (2, 0, -1)
    assert c_decode(tensors, 3, None, ranks=0) == (0, -1, -1)
    load().hvdc_encode_batch(tensors, 3, message, 1, None)
    message[SIZE // 4 + 12] ^= 1
    assert c_decode(tensors, 3, message) == (4, 1, 0)
    load().hvdc_decode_batch(tensors, 3, message, 0, 1, 1.0, 1, None, None)


def test_an_error_of_the_library_names_codec_and_shape() -> None:
    batch = CpuBatch(ENTRIES)
    batch._encoding._table["dtype"] = 9
    arguments = ([torch.zeros(70)] * 2, [torch.zeros(70), None], [torch.zeros(70), None], [0, 3])
    batch.encode(*arguments, BYTES.clone())
    batch._encoding._table["payload_bytes"] = 0
    with pytest.raises(KernelError, match=r"ECQ.*, shape \(70,\): the native library .* status 2"):
        batch.encode(*arguments, BYTES.clone())
