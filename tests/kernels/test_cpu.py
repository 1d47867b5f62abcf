"""The CPU's library: its version and instruction sets, arrays of NumPy, and altered payloads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hvd_compress.codecs import (
    BF16,
    ECQ,
    Codec,
    ErrorFeedback,
    Int8,
    NoiseKey,
    OneBit,
    PayloadError,
    Ternary,
    payload_length,
)
from hvd_compress.kernels import cpu_library
from hvd_compress.kernels.batch import Entry
from hvd_compress.kernels.cpu_batch import CpuBatch
from hvd_compress.kernels.cpu_library import isa as used_isa
from hvd_compress.kernels.cpu_library import set_isa
from hvd_compress.kernels.native import KernelError
from hvd_compress.kernels.reference import ReferenceBatch
from tests.codecs.cases import any_change, encode, normal
from tests.kernels.arrays import INSTRUCTION_SETS, available

SHAPE = (70,)
CODEC = ECQ(4, "l2", 64)
FULL = ErrorFeedback(1.0, 1.0)


# The library


def test_a_library_that_was_not_built_is_an_error_that_says_how(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_library, "_LIBRARY", Path("/nowhere/libhvdc_cpu.so"))
    cpu_library.load.cache_clear()
    try:
        with pytest.raises(KernelError, match=r"expected the native library .*, found none: .*pip"):
            CpuBatch([])
    finally:
        cpu_library.load.cache_clear()


def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_library, "ABI_VERSION", 99)
    cpu_library.load.cache_clear()
    try:
        with pytest.raises(KernelError, match="expected interface version 99, got 10"):
            CpuBatch([])
    finally:
        cpu_library.load.cache_clear()


def test_the_best_instruction_set_of_the_machine_is_used() -> None:
    assert available("plain")
    info = Path("/proc/cpuinfo")
    flags = set(info.read_text().split()) if info.exists() else set()
    if {"avx2", "f16c", "fma", "bmi2"} <= flags:
        assert available("avx2")
    if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags:
        assert available("avx512")
    assert used_isa() == [isa for isa in INSTRUCTION_SETS if available(isa)][-1]


@pytest.mark.parametrize("name", ("", "AVX2", "neon", "avx512 "))
def test_unknown_instruction_sets(name: str) -> None:
    before = used_isa()
    with pytest.raises(KernelError, match=f"expected an instruction set .*, got {name!r}"):
        set_isa(name)
    assert used_isa() == before


@pytest.mark.parametrize("name", ("avx1", "AVX2", "plain "))
def test_the_environment_names_no_instruction_set(name: str) -> None:
    done = _print_isa(name)
    assert done.returncode
    assert (
        f"KernelError: HVDC_ISA: expected one of 'avx512', 'avx2' and 'plain' that this machine has, "
        f"got {name!r}" in done.stderr
    )


@pytest.mark.parametrize("name", ("", "plain"))
def test_the_environment_names_an_instruction_set(name: str) -> None:
    done = _print_isa(name)
    assert done.stdout == f"{name or used_isa()}\n", done.stderr


def _print_isa(wanted: str) -> subprocess.CompletedProcess[str]:
    code = "from hvd_compress.kernels.cpu_library import isa; print(isa())"
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HVDC_ISA": wanted},
        capture_output=True,
        text=True,
    )


# Arrays


def test_arrays_of_numpy_are_taken_as_well() -> None:
    gradient, residual = normal(SHAPE), normal(SHAPE, seed=2)
    before, payload = residual.copy(), np.zeros(CODEC.payload_bytes(SHAPE), np.uint8)
    batch = CpuBatch([Entry(CODEC, SHAPE, FULL)])
    batch.encode([gradient], [residual], [residual], [4], payload)
    noise = NoiseKey(step=4)
    expected = encode(CODEC, SHAPE, gradient, feedback=FULL, residual=before, noise=noise)
    assert np.array_equal(payload, expected)
    assert np.array_equal(residual, before)
    got, want = np.ones((2, 70), np.float32)
    apart = np.pad(np.stack([payload] * 3), ((0, 0), (32, 16)), constant_values=7)[:, 32:-16]
    batch.decode_sum([got], [4], apart)
    ReferenceBatch(batch.entries).decode_sum([want], [4], apart)
    assert np.array_equal(got, want)


def test_equal_configurations_encode_alike_however_they_are_written() -> None:
    """The library's specification is cached by equality."""
    for clip in (2, 2.0):
        codec = Ternary(clip=clip)
        payload = np.zeros(codec.payload_bytes(SHAPE), np.uint8)
        CpuBatch([Entry(codec, SHAPE)]).encode([normal(SHAPE)], [None], [None], [0], payload)
        assert np.array_equal(payload, encode(codec, SHAPE, normal(SHAPE)))


# Altered payloads


ENTROPY = ECQ(4, "l2", 64, "entropy")
ALTERED = (CODEC, OneBit(64), OneBit("column"), Ternary(64), Int8("linear", 64), BF16(), ENTROPY)


@pytest.mark.parametrize("codec", ALTERED, ids=str)
def test_every_flipped_bit_is_found(codec: Codec, isa: str) -> None:
    sent = encode(codec, SHAPE, normal(SHAPE), noise=NoiseKey(step=3))
    payloads = np.stack([sent, sent])
    outs, batch = [np.zeros(SHAPE, np.float32)], CpuBatch([Entry(codec, SHAPE)])
    batch.decode_sum(outs, [3], payloads)
    for bit in range(8 * payload_length(sent, sent.size)):
        payloads[1, bit // 8] ^= 1 << bit % 8
        with pytest.raises(PayloadError, match=r"rank 1's payload: expected .*, got "):
            batch.decode_sum(outs, [3], payloads)
        payloads[1, bit // 8] ^= 1 << bit % 8
    batch.decode_sum(outs, [3], payloads)


@pytest.mark.parametrize("codec", (ENTROPY, ECQ(127, "linf", "tensor", "entropy")), ids=str)
def test_any_change_under_a_fitting_checksum(codec: ECQ, isa: str) -> None:
    """Library and reference refuse the same payloads, and decode the others to the same numbers."""
    shape = (70_001,) if codec is ENTROPY else (5_000,)
    sent = encode(codec, shape, normal(shape), noise=NoiseKey(step=3))
    random = np.random.default_rng(1)
    batch, reference = CpuBatch([Entry(codec, shape)], 2), ReferenceBatch([Entry(codec, shape)])
    outcomes = {True: 0, False: 0}
    for number in range(40):
        changed = any_change(codec, shape, sent, number, random)
        want, got = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        try:
            reference.decode_sum([want], [3], changed[None])
        except PayloadError:
            with pytest.raises(PayloadError, match="rank 0's payload"):
                batch.decode_sum([got], [3], changed[None])
            outcomes[False] += 1
        else:
            batch.decode_sum([got], [3], changed[None])
            assert np.array_equal(want, got), number
            outcomes[True] += 1
    assert min(outcomes.values()) > 5


@pytest.mark.parametrize(
    ("codec", "shape", "step", "field"),
    (
        (ECQ(4, "linf", 64), SHAPE, 3, "configuration hash"),
        (CODEC, (71,), 3, "element count 71, got 70"),
        (CODEC, SHAPE, 4, "step 4, got 3"),
        (CODEC, SHAPE, 2**32 + 2, "step 2, got 3"),
    ),
    ids=str,
)
@pytest.mark.parametrize("bad", (0, 1, 2))
def test_the_rank_and_what_differs_are_named(
    codec: Codec, shape: tuple[int, ...], step: int, field: str, bad: int, isa: str
) -> None:
    right = encode(codec, shape, normal(shape), noise=NoiseKey(step=step))
    payloads = np.stack([right] * 3)
    payloads[bad] = encode(CODEC, SHAPE, normal(SHAPE), noise=NoiseKey(step=3))
    out = np.zeros(shape, np.float32)
    with pytest.raises(PayloadError, match=f"rank {bad}'s payload: expected {field}"):
        CpuBatch([Entry(codec, shape)]).decode_sum([out], [step], payloads)
