"""Integer sums of a batch are those of the reference's calls, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvd_compress.codecs import ECQ, ErrorFeedback, Int8, LevelCodec, NoiseKey, Ternary
from hvd_compress.codecs.packing import lane_bits
from hvd_compress.kernels.cpu_level_batch import CpuLevelBatch
from hvd_compress.kernels.entries import LevelEntry
from hvd_compress.kernels.native import KernelError
from tests.codecs.cases import floats, normal, shapes, tensors
from tests.codecs.rows import ROWS
from tests.kernels.arrays import DTYPES, Guarded, as_dtype, assert_same, bits, widened
from tests.kernels.parity import EVERY_MODE, LARGE, MODES, OFF, kept
from tests.kernels.reference_levels import ReferenceLevels

REFERENCE = ReferenceLevels()
CODECS = [row.codec for row in ROWS if isinstance(row.codec, LevelCodec)]
RANKS = 3


@dataclass(frozen=True)
class Case:
    """A tensor of a batch, and what stands before its norms and its words."""

    codec: LevelCodec
    gradient: torch.Tensor
    shape: tuple[int, ...]
    feedback: ErrorFeedback
    residual: np.ndarray
    noise: NoiseKey
    gap: int


def entries_of(cases: Sequence[Case]) -> list[LevelEntry]:
    """Their places, one behind the other."""
    entries, norms, words = [], 0, 0
    for case in cases:
        width = lane_bits(RANKS * case.codec.top_level)
        places = norms + case.gap, words + 2 * case.gap
        noise = replace(case.noise, step=0)
        entry = LevelEntry(case.codec, case.shape, case.feedback, noise, width, *places)
        norms, words = entry.norm_end, entry.word_end
        entries.append(entry)
    return entries


def check(cases: Sequence[Case], threads: int, in_place: bool, factors: Sequence[float]) -> None:
    """Makes all three calls between guards, with norms times some factors, and compares the reference."""
    entries = entries_of(cases)
    batch = CpuLevelBatch(entries, threads)
    norms = Guarded(torch.full((batch.norm_count + 3,), 7.0), 4)
    words = Guarded(torch.full((batch.word_count + 3,), 9, dtype=torch.int32), 8)
    values = [Guarded(case.gradient, case.gradient.element_size()) for case in cases]
    before = [
        Guarded(kept(case.residual, case.feedback), 4) if case.feedback.enabled else None
        for case in cases
    ]
    garbage = [None if one is None else torch.full_like(one.array, 1e20) for one in before]
    after = before if in_place else [None if one is None else Guarded(one, 8) for one in garbage]
    gradients = [one.array for one in values]
    old = [one and one.array for one in before]
    new = [one and one.array for one in after]
    want_norms, want_words = norms.array.numpy().copy(), words.array.numpy().copy()
    residuals = [
        widened(kept(case.residual, case.feedback)).copy() if case.feedback.enabled else None
        for case in cases
    ]

    batch.norms(gradients, old, norms.array)
    for case, entry, h in zip(cases, entries, residuals, strict=True):
        own = want_norms[entry.norm_offset : entry.norm_end]
        g = widened(case.gradient)
        REFERENCE.norms(case.codec, case.shape, g, own, feedback=case.feedback, residual=h)
    assert_same(bits(norms.array), bits(want_norms), "norms")
    for place in range(want_norms.size):
        factor = factors[place % len(factors)]
        want_norms[place] = want_norms[place] * factor if math.isfinite(factor) else factor
    norms.array.copy_(torch.from_numpy(want_norms))

    batch.encode(gradients, old, new, [c.noise.step for c in cases], norms.array, words.array)
    for case, entry, h in zip(cases, entries, residuals, strict=True):
        REFERENCE.encode(
            case.codec,
            case.shape,
            widened(case.gradient),
            want_norms[entry.norm_offset : entry.norm_end],
            want_words[entry.word_offset : entry.word_end],
            bits=entry.bits,
            feedback=case.feedback,
            residual=h,
            noise=case.noise,
        )
    assert_same(words.array.numpy(), want_words, "words")
    for place, (case, h) in enumerate(zip(cases, residuals, strict=True)):
        what = f"{case.codec}, {case.shape}, {case.feedback}"
        assert_same(bits(gradients[place]), bits(case.gradient), f"gradient: {what}")
        if h is None:
            continue
        assert_same(bits(new[place]), bits(kept(h, case.feedback)), f"residual: {what}")
        if not in_place:
            unchanged = bits(kept(case.residual, case.feedback))
            assert_same(bits(old[place]), unchanged, f"residual before: {what}")

    total = torch.from_numpy(want_words * RANKS)
    outs = [Guarded(torch.zeros_like(case.gradient), 8) for case in cases]
    batch.decode([out.array for out in outs], norms.array, total, 1 / 3)
    for case, entry, out in zip(cases, entries, outs, strict=True):
        want = np.empty(math.prod(case.shape), np.float32)
        REFERENCE.decode(
            case.codec,
            case.shape,
            want_norms[entry.norm_offset : entry.norm_end],
            total.numpy()[entry.word_offset : entry.word_end],
            want,
            bits=entry.bits,
            scale=1 / 3,
        )
        rounded = torch.from_numpy(want).to(case.gradient.dtype)
        assert_same(bits(out.array), bits(rounded), f"out: {case.codec}, {case.shape}")
    guarded = [norms, words, *values, *outs, *before, *after]
    assert all(one.intact() for one in guarded if one is not None)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A tensor of any kind."""
    shape = draw(shapes())
    anything = st.one_of(floats(1e30), st.sampled_from((math.nan, math.inf)))
    values = draw(tensors(math.prod(shape), draw(st.sampled_from((floats(1.0), anything)))))
    words = st.integers(0, 2**32 - 1)
    return Case(
        draw(st.sampled_from(CODECS)),
        as_dtype(values, draw(st.sampled_from(tuple(DTYPES)))),
        shape,
        draw(st.sampled_from(EVERY_MODE)),
        draw(tensors(math.prod(shape), floats(1e30))),
        NoiseKey(draw(words), draw(words), draw(words), draw(st.integers(0, 2**64 - 1))),
        draw(st.integers(0, 3)),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    tensors=st.lists(cases(), max_size=5),
    threads=st.sampled_from((1, 2, 3)),
    in_place=st.booleans(),
    factors=st.lists(st.sampled_from((1.0, 1.75, math.inf)), min_size=1, max_size=5),
)
def test_any_batch(
    isa: str, tensors: list[Case], threads: int, in_place: bool, factors: list[float]
) -> None:
    check(tensors, threads, in_place, factors)


def every_codec(shape: tuple[int, ...]) -> list[Case]:
    """A tensor for each codec, of all dtypes and modes."""
    return [
        Case(
            codec,
            as_dtype(normal(shape, seed=number), tuple(DTYPES)[number % 3]),
            shape,
            EVERY_MODE[number // 3 % 5],
            normal(shape, seed=100 + number, scale=0.3),
            NoiseKey(3, 2, number, 2**33 + number),
            number % 3,
        )
        for number, codec in enumerate(CODECS)
    ]


@pytest.mark.parametrize("shape", ((3, 1377), *LARGE[:1]), ids=str)
def test_every_codec_in_one_batch(shape: tuple[int, ...]) -> None:
    for threads, in_place in ((1, True), (3, False)):
        check(every_codec(shape), threads, in_place, (1.0, 1.75, math.inf))


def test_wrong_arguments() -> None:
    codec, shape = ECQ(4, "l2", 64), (70,)
    entry = LevelEntry(codec, shape, OFF, NoiseKey(), 4, 0, 0)
    fed = replace(entry, feedback=MODES[1], norm_offset=2, word_offset=9)
    batch = CpuLevelBatch([entry, fed])
    ones, norms, words = torch.ones(70), torch.ones(4), torch.zeros(18, dtype=torch.int32)
    lists: Any = [ones, ones], [None, ones], [None, ones], [0, 0]
    batch.encode(*lists, norms, words)
    with pytest.raises(ValueError, match="message: expected at least 18 elements, got 17"):
        batch.encode(*lists, norms, words[1:])
    with pytest.raises(ValueError, match="norms: expected at least 4 elements, got 3"):
        batch.decode(lists[0], norms[1:], words)
    with pytest.raises(TypeError, match=r"message: expected dtype int32, got torch\.float32"):
        batch.decode(lists[0], norms, torch.ones(18))
    with pytest.raises(ValueError, match=r"residuals\[1\]: expected a residual exactly where"):
        batch.norms(lists[0], [None, None], norms)
    with pytest.raises(ValueError, match="values: expected 2 items, got 1"):
        batch.norms([ones], lists[1], norms)
    with pytest.raises(ValueError, match=r"values\[0\]: expected 70 elements, got 71"):
        batch.decode([torch.ones(71), ones], norms, words)
    with pytest.raises(KernelError, match="no lanes of 3 bits"):
        CpuLevelBatch([replace(entry, bits=3)])
    with pytest.raises(KernelError, match=r"Int8.* has no lanes"):
        CpuLevelBatch([replace(entry, codec=Int8())])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"norm_offset: expected nothing before 2 .*, got 1"):
        CpuLevelBatch([entry, replace(fed, norm_offset=1)])
    with pytest.raises(ValueError, match=r"word_offset: expected nothing before 9 .*, got 8"):
        CpuLevelBatch([entry, replace(fed, word_offset=8)])
    with pytest.raises(ValueError, match=r"CpuLevelBatch\.threads"):
        CpuLevelBatch([], 0)
    assert CpuLevelBatch([replace(entry, codec=Ternary(64), bits=2)]).word_count == 5
    batch._encoding._table["bits"] = 1
    with pytest.raises(KernelError, match=r"ECQ.*, shape \(70,\): .* status 1"):
        batch.encode(*lists, norms, words)
