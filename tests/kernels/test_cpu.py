"""The CPU executor's own duties: arguments, altered payloads, and codecs that it has no kernel for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch

from hvd_compress.codecs import (
    BF16,
    ECQ,
    Codec,
    ErrorFeedback,
    Int8,
    NoiseKey,
    OneBit,
    PayloadError,
    PayloadLayout,
    Ternary,
    payload_length,
)
from hvd_compress.kernels import cpu_library
from hvd_compress.kernels.cpu import CpuKernels, KernelError
from hvd_compress.kernels.reference import ReferenceKernels
from tests.codecs.cases import OFF, any_change, encode, normal
from tests.kernels.arrays import DTYPES, INSTRUCTION_SETS, as_dtype, available, bits, widened

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
            CpuKernels()
    finally:
        cpu_library.load.cache_clear()


def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_library, "ABI_VERSION", 99)
    cpu_library.load.cache_clear()
    try:
        with pytest.raises(KernelError, match="expected interface version 99, got 10"):
            CpuKernels()
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
    assert CpuKernels().isa == [isa for isa in INSTRUCTION_SETS if available(isa)][-1]


@pytest.mark.parametrize("name", ("", "AVX2", "neon", "avx512 "))
def test_unknown_instruction_sets(name: str) -> None:
    before = CpuKernels().isa
    with pytest.raises(KernelError, match=f"expected an instruction set .*, got {name!r}"):
        CpuKernels().set_isa(name)
    assert CpuKernels().isa == before


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
    assert done.stdout == f"{name or CpuKernels().isa}\n", done.stderr


def _print_isa(wanted: str) -> subprocess.CompletedProcess[str]:
    code = "from hvd_compress.kernels.cpu import CpuKernels; print(CpuKernels().isa)"
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HVDC_ISA": wanted},
        capture_output=True,
        text=True,
    )


# Arguments


def call_encode(codec: Codec = CODEC, **changed: Any) -> None:
    arguments: dict[str, Any] = {
        "gradient": torch.zeros(SHAPE),
        "payload": torch.zeros(codec.payload_bytes(SHAPE), dtype=torch.uint8),
        "feedback": FULL,
        "residual": torch.zeros(SHAPE),
        "noise": NoiseKey(),
    }
    CpuKernels().encode(codec, SHAPE, **{**arguments, **changed})


def call_decode(codec: Codec = CODEC, **changed: Any) -> None:
    payload = torch.from_numpy(encode(codec, SHAPE, normal(SHAPE)))
    arguments: dict[str, Any] = {"payloads": payload[None], "out": torch.zeros(SHAPE), "step": 0}
    CpuKernels().decode_sum(codec, SHAPE, **{**arguments, **changed})


SIZE = CODEC.payload_bytes(SHAPE)
BYTES = torch.zeros(SIZE, dtype=torch.uint8)
ODD = torch.zeros(2 * SIZE + 4, dtype=torch.uint8)
"""Holds two payloads with two bytes behind each: the second starts at no multiple of 4."""

FLOATS = torch.zeros(70)

WRONG_GRADIENTS = (
    (torch.zeros(71), ValueError, "expected 70 elements, got 71"),
    (FLOATS.double(), TypeError, "expected dtype float32, float16 or bfloat16, got float64"),
    (np.zeros(70, ">f4"), TypeError, "expected dtype float32, float16 or bfloat16, got >f4"),
    (np.zeros(70, np.int32), TypeError, "expected dtype float32, float16 or bfloat16, got int32"),
    (torch.zeros(140)[::2], ValueError, "expected a contiguous array"),
    (np.zeros(140, np.float32)[::2], ValueError, "expected a contiguous array"),
    (torch.zeros(70, device="meta"), ValueError, "expected a CPU tensor, got one on meta"),
)
WRONG_RESIDUALS = (
    (torch.zeros(69), ValueError, "expected 70 elements, got 69"),
    (FLOATS.half(), TypeError, "expected dtype float32, got torch.float16"),
    (torch.zeros(140)[::2], ValueError, "expected a contiguous array"),
)
WRONG_PAYLOADS = (
    (BYTES[:-1], ValueError, f"expected {SIZE} elements, got {SIZE - 1}"),
    (BYTES.to(torch.int8), TypeError, "expected dtype uint8, got torch.int8"),
    (torch.stack([BYTES, BYTES], 1)[:, 0], ValueError, "expected a contiguous array"),
    (ODD[1 : SIZE + 1], ValueError, "expected bytes that start at a multiple of 4, got 0x"),
)
WRONG: tuple[tuple[Callable[..., None], str, Any, type[Exception], str], ...] = (
    *((call_encode, "gradient", *wrong) for wrong in WRONG_GRADIENTS),
    *((call_encode, "residual", *wrong) for wrong in WRONG_RESIDUALS),
    *((call_encode, "payload", *wrong) for wrong in WRONG_PAYLOADS),
    *((call_decode, "out", *wrong) for wrong in WRONG_GRADIENTS),
    (call_decode, "payloads", BYTES[None].to(torch.int8), TypeError, "expected dtype uint8"),
    (call_decode, "payloads", torch.stack([BYTES] * 3, 1).t(), ValueError, "expected a contiguous"),
    (call_decode, "payloads", ODD[None, 1 : SIZE + 1], ValueError, "expected bytes that start"),
    (
        call_decode,
        "payloads",
        ODD[: 2 * SIZE + 4].view(2, -1)[:, :SIZE],
        ValueError,
        "expected bytes that start",
    ),
)


@pytest.mark.parametrize(("call", "name", "value", "error", "message"), WRONG)
def test_wrong_arguments(
    call: Callable[..., None], name: str, value: Any, error: type[Exception], message: str
) -> None:
    call()
    with pytest.raises(error) as raised:
        call(**{name: value})
    assert str(raised.value).startswith(f"{name}: {message}")


def test_feedback_and_residual_come_together() -> None:
    for changed in ({"residual": None}, {"feedback": OFF}):
        with pytest.raises(ValueError, match="expected a residual exactly where error feedback"):
            call_encode(**changed)


def test_payloads_of_another_size_and_step() -> None:
    with pytest.raises(PayloadError, match=f"expected size in bytes {SIZE}, got {SIZE - 16}"):
        call_decode(payloads=BYTES[None, :-16])
    with pytest.raises(PayloadError, match="expected step 1, got 0"):
        call_decode(step=1)


@pytest.mark.parametrize(
    ("threads", "error"), ((0, ValueError), (-1, ValueError), (1.5, TypeError))
)
def test_wrong_numbers_of_threads(threads: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"CpuKernels\.threads: expected .*, got "):
        CpuKernels(threads)


def test_arrays_of_numpy_are_taken_as_well() -> None:
    gradient, residual = normal(SHAPE), normal(SHAPE, seed=2)
    before = residual.copy()
    payload = np.zeros(SIZE, np.uint8)
    noise = NoiseKey(step=4)
    CpuKernels().encode(
        CODEC, SHAPE, gradient, payload, feedback=FULL, residual=residual, noise=noise
    )
    expected = encode(CODEC, SHAPE, gradient, feedback=FULL, residual=before, noise=noise)
    assert np.array_equal(payload, expected)
    assert np.array_equal(residual, before)


def test_equal_configurations_encode_alike_however_they_are_written() -> None:
    """The library's specification is cached by equality."""
    for clip in (2, 2.0):
        codec = Ternary(clip=clip)
        payload = torch.zeros(codec.payload_bytes(SHAPE), dtype=torch.uint8)
        gradient = torch.from_numpy(normal(SHAPE))
        noise = NoiseKey()
        CpuKernels().encode(
            codec, SHAPE, gradient, payload, feedback=OFF, residual=None, noise=noise
        )
        assert np.array_equal(payload.numpy(), encode(codec, SHAPE, gradient.numpy()))


# Altered payloads


ENTROPY = ECQ(4, "l2", 64, "entropy")
ALTERED = (CODEC, OneBit(64), OneBit("column"), Ternary(64), Int8("linear", 64), BF16(), ENTROPY)


@pytest.mark.parametrize("codec", ALTERED, ids=str)
def test_every_flipped_bit_is_found(codec: Codec, isa: str) -> None:
    sent = encode(codec, SHAPE, normal(SHAPE), noise=NoiseKey(step=3))
    payloads = np.stack([sent, sent])
    out, kernels = np.zeros(SHAPE, np.float32), CpuKernels()
    kernels.decode_sum(codec, SHAPE, payloads, out, step=3)
    for bit in range(8 * payload_length(sent, sent.size)):
        payloads[1, bit // 8] ^= 1 << bit % 8
        with pytest.raises(PayloadError, match=r"rank 1's payload: expected .*, got "):
            kernels.decode_sum(codec, SHAPE, payloads, out, step=3)
        payloads[1, bit // 8] ^= 1 << bit % 8
    kernels.decode_sum(codec, SHAPE, payloads, out, step=3)


@pytest.mark.parametrize("codec", (ENTROPY, ECQ(127, "linf", "tensor", "entropy")), ids=str)
def test_any_change_under_a_fitting_checksum(codec: ECQ, isa: str) -> None:
    """Library and reference refuse the same payloads, and decode the others to the same numbers."""
    shape = (70_001,) if codec is ENTROPY else (5_000,)
    sent = encode(codec, shape, normal(shape), noise=NoiseKey(step=3))
    random = np.random.default_rng(1)
    kernels, reference = CpuKernels(2), ReferenceKernels()
    outcomes = {True: 0, False: 0}
    for number in range(40):
        changed = any_change(codec, shape, sent, number, random)
        want, got = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        try:
            reference.decode_sum(codec, shape, changed[None], want, step=3)
        except PayloadError:
            with pytest.raises(PayloadError, match="rank 0's payload"):
                kernels.decode_sum(codec, shape, changed[None], got, step=3)
            outcomes[False] += 1
        else:
            kernels.decode_sum(codec, shape, changed[None], got, step=3)
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
        CpuKernels().decode_sum(codec, shape, payloads, out, step=step)


# A codec that only the reference knows


@dataclass(frozen=True)
class Truncated(Codec):
    """The upper half of every float32, cut off without rounding."""

    codec_id: ClassVar[int] = 200
    name: ClassVar[str] = "truncated"
    error: ClassVar[Literal["unbiased", "contractive"]] = "contractive"

    def layout(self, shape: tuple[int, ...]) -> PayloadLayout:
        count = int(np.prod(shape))
        return PayloadLayout(count, 0, 64, 128, 2 * (count % 64 or 64))

    def quantize(
        self, x: np.ndarray, shape: tuple[int, ...], noise: NoiseKey
    ) -> tuple[np.ndarray, np.ndarray]:
        upper = (x.view(np.uint32) >> np.uint32(16)).astype("<u2")
        return np.empty(0, np.float32), upper.view(np.uint8)

    def dequantize(
        self, scales: np.ndarray, codes: np.ndarray, shape: tuple[int, ...]
    ) -> np.ndarray:
        return (codes.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


@pytest.mark.parametrize("shape", ((), (0,), (70,), (3, 50)), ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_codec_without_a_kernel_runs_in_the_reference(dtype: str, shape: tuple[int, ...]) -> None:
    codec, kernels, reference = Truncated(), CpuKernels(), ReferenceKernels()
    gradient = as_dtype(normal(shape), dtype)
    residual = torch.from_numpy(normal(shape, seed=2))
    before = residual.numpy().copy()
    payload = torch.zeros(codec.payload_bytes(shape), dtype=torch.uint8)
    noise = NoiseKey(step=7)

    kernels.encode(codec, shape, gradient, payload, feedback=FULL, residual=residual, noise=noise)

    expected = before.copy()
    g = widened(gradient)
    want = encode(codec, shape, g, feedback=FULL, residual=expected, noise=noise)
    assert np.array_equal(payload.numpy(), want)
    assert np.array_equal(residual.numpy(), expected)

    out = as_dtype(normal(shape, seed=3), dtype)
    total = widened(out).copy()
    payloads = torch.stack([payload, payload])
    kernels.decode_sum(codec, shape, payloads, out, step=7, scale=0.3)
    reference.decode_sum(codec, shape, payloads.numpy(), total, step=7, scale=0.3)
    assert np.array_equal(bits(out), bits(torch.from_numpy(total).to(out.dtype)))


@pytest.mark.parametrize("codec", (CODEC, Truncated()), ids=str)
def test_payloads_that_stand_apart(codec: Codec) -> None:
    """Payloads need not be adjacent, as in a message that has several tensors' payloads."""
    payloads = np.stack([encode(codec, SHAPE, normal(SHAPE, seed=seed)) for seed in (0, 1, 2)])
    want, got, by_numpy = torch.zeros(SHAPE), torch.ones(SHAPE), np.ones(70, np.float32)
    call_decode(codec, payloads=torch.from_numpy(payloads), out=want)
    message = np.pad(payloads, ((0, 0), (32, 16)), constant_values=7)[:, 32:-16]
    call_decode(codec, payloads=torch.from_numpy(message), out=got)
    call_decode(codec, payloads=message, out=by_numpy)
    assert torch.equal(got, want) and torch.equal(torch.from_numpy(by_numpy), want)
