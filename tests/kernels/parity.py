"""An executor's bytes beside the reference's, one call at a time.

Payloads and residuals are compared bit for bit. In decoded sums all NaNs are alike: which of two NaNs a
sum keeps is the processor's choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b

import numpy as np
import torch
from hypothesis import strategies as st

from hvd_compress.codecs import ECQ, Codec, ErrorFeedback, Int8, NoiseKey, OneBit, Ternary
from hvd_compress.codecs.int8 import Kind, magnitudes
from hvd_compress.codecs.payload import assemble
from hvd_compress.kernels.cpu import CpuKernels
from hvd_compress.kernels.interface import Kernels
from hvd_compress.kernels.reference import ReferenceKernels
from tests.codecs.cases import floats, normal, shapes, special_values, tensors
from tests.codecs.rows import Row
from tests.kernels.arrays import (
    DTYPES,
    Guarded,
    as_dtype,
    assert_same,
    bits,
    empty_payload,
    widened,
)

REFERENCE = ReferenceKernels()
OFF = ErrorFeedback(alpha=0.0)
MODES = (OFF, ErrorFeedback(1.0, 1.0), ErrorFeedback(0.37, 0.83))
"""No residual; equal alpha and beta; and different ones."""

ROUNDED = (ErrorFeedback(1.0, 1.0, "bfloat16"), ErrorFeedback(0.37, 0.83, "bfloat16"))
EVERY_MODE = (*MODES, *ROUNDED)
"""With residuals in float32 and in bfloat16."""

SHAPES: tuple[tuple[int, ...], ...] = (
    (),
    (0,),
    (3, 0),
    (1,),
    (1, 77),
    (77, 1),
    (63,),
    (64,),
    (65,),
    (5, 3, 2, 7),
    (151, 17),
    (2560,),
    (2561,),
    (3, 1377),
)
LARGE = ((70_001,), (71, 1009), (5003, 14))
"""Enough work for every thread, with edges that no thread's share falls on."""


@dataclass(frozen=True)
class Encoded:
    """A gradient's payload and residual by the reference."""

    payload: np.ndarray
    residual: np.ndarray | None


def reference_encode(
    row: Row,
    shape: tuple[int, ...],
    gradient: torch.Tensor,
    feedback: ErrorFeedback,
    residual: np.ndarray,
    noise: NoiseKey,
) -> Encoded:
    """The reference's payload and residual, which begins as :func:`kept`; its inputs are left alone."""
    g = widened(gradient)
    payload = np.zeros(row.codec.payload_bytes(shape), np.uint8)
    h = widened(kept(residual, feedback)).copy() if feedback.enabled else None
    REFERENCE.encode(row.codec, shape, g, payload, feedback=feedback, residual=h, noise=noise)
    return Encoded(payload, h)


def kept(residual: np.ndarray, feedback: ErrorFeedback) -> torch.Tensor:
    """A residual in the dtype in which it is kept, rounded to nearest."""
    return as_dtype(residual, feedback.residual_dtype)


@cache
def expected(
    row: Row, shape: tuple[int, ...], dtype: str, feedback: ErrorFeedback, step: int
) -> tuple[torch.Tensor, np.ndarray, Encoded]:
    """A Gaussian gradient, a residual, and what the reference makes of them: once for all kernels."""
    gradient = as_dtype(normal(shape, seed=step), dtype)
    residual = normal(shape, seed=50 + step, scale=0.3)
    noise = NoiseKey(seed=3, rank=step, tensor=9, step=step)
    return gradient, residual, reference_encode(row, shape, gradient, feedback, residual, noise)


_decoded: dict[tuple[object, ...], np.ndarray] = {}


def decoded(
    row: Row,
    shape: tuple[int, ...],
    payloads: np.ndarray,
    before: torch.Tensor,
    step: int,
    scale: float,
) -> np.ndarray:
    """Returns the reference's result as :func:`bits`; kernels, threads and places in memory share it."""
    memory = before.reshape(-1).view(torch.uint8).numpy().tobytes() if before.numel() else b""
    digest = blake2b(payloads.tobytes() + memory).digest()
    # As text: 0.0 and -0.0 are equal, and do not give the same sums.
    key = (row, shape, payloads.shape, before.dtype, digest, step, repr(scale))
    if key not in _decoded:
        total = widened(before).copy()
        REFERENCE.decode_sum(row.codec, shape, payloads, total, step=step, scale=scale)
        _decoded[key] = bits(torch.from_numpy(total).to(before.dtype))
    return _decoded[key]


def _place(kernels: Kernels, offset: int) -> tuple[str, int]:
    """The device of the kernels, and where payloads start: on the CPU, at any multiple of 4."""
    cpu = isinstance(kernels, CpuKernels)
    return getattr(kernels, "device", "cpu"), offset - offset % 4 if cpu else 0


def check_encode(
    kernels: Kernels,
    row: Row,
    shape: tuple[int, ...],
    gradient: torch.Tensor,
    feedback: ErrorFeedback,
    residual: np.ndarray,
    noise: NoiseKey,
    want: Encoded,
    *,
    offset: int = 0,
) -> None:
    """Encodes and takes it back, between guards, and compares every byte."""
    device, payload_offset = _place(kernels, offset)
    case = f"{row}, {shape}, {gradient.dtype}, {feedback}, {kernels.name}"
    g = Guarded(gradient, offset, device)
    before = kept(residual, feedback)
    h = Guarded(before, offset * before.element_size(), device)
    payload = empty_payload(want.payload.size, payload_offset, device)

    kernels.encode(
        row.codec,
        shape,
        g.array,
        payload.array,
        feedback=feedback,
        residual=h.array if feedback.enabled else None,
        noise=noise,
    )

    assert_same(payload.array.cpu().numpy(), want.payload, f"payload: {case}")
    assert_same(bits(g.array), bits(gradient), f"the gradient was changed: {case}")
    after = residual if want.residual is None else want.residual
    assert_same(bits(h.array), bits(kept(after, feedback)), f"residual: {case}")
    assert g.intact() and h.intact() and payload.intact(), f"out of bounds: {case}"


def check_decode(
    kernels: Kernels,
    row: Row,
    shape: tuple[int, ...],
    payloads: np.ndarray,
    before: torch.Tensor,
    *,
    step: int,
    scale: float,
    offset: int = 0,
) -> None:
    """Decodes, between guards, and compares with the reference."""
    device, payload_offset = _place(kernels, offset)
    dtype = before.dtype
    case = f"{row}, {shape}, {dtype}, {len(payloads)} x {scale}, {kernels.name}"
    want = decoded(row, shape, payloads, before, step, scale)
    out = Guarded(before, offset, device)
    sent = Guarded(torch.from_numpy(payloads.reshape(-1)), payload_offset, device)
    kernels.decode_sum(
        row.codec,
        shape,
        sent.array.view(payloads.shape),
        out.array,
        step=step,
        scale=scale,
    )
    assert_same(bits(out.array), want, case)
    assert out.intact() and sent.intact(), f"out of bounds: {case}"


def compare(
    kernels: Kernels,
    row: Row,
    shape: tuple[int, ...],
    gradient: torch.Tensor,
    feedback: ErrorFeedback,
    residual: np.ndarray,
    noise: NoiseKey,
) -> Encoded:
    """Encodes; returns what the reference makes of it, too."""
    want = reference_encode(row, shape, gradient, feedback, residual, noise)
    check_encode(kernels, row, shape, gradient, feedback, residual, noise, want)
    return want


def check_gaussian(
    kernels: Kernels,
    row: Row,
    shape: tuple[int, ...],
    dtype: str,
    feedback: ErrorFeedback,
    step: int = 1,
    *,
    offset: int = 0,
) -> None:
    """Encodes Gaussian numbers."""
    gradient, residual, want = expected(row, shape, dtype, feedback, step)
    noise = NoiseKey(seed=3, rank=step, tensor=9, step=step)
    check_encode(kernels, row, shape, gradient, feedback, residual, noise, want, offset=offset)


def check_sum(
    kernels: Kernels, row: Row, shape: tuple[int, ...], dtype: str, ranks: int, *, offset: int = 0
) -> None:
    """Decodes a payload of Gaussian numbers once for each rank."""
    payload = expected(row, shape, "float32", MODES[2], 1)[2].payload
    before = as_dtype(normal(shape, seed=7), dtype)
    payloads = np.stack([payload] * ranks)
    check_decode(kernels, row, shape, payloads, before, step=1, scale=1 / 3, offset=offset)


UNALIGNED = (("float32", 4), ("float32", 12), ("float16", 2), ("bfloat16", 6))
"""Dtypes of arrays, and the bytes by which they are off 64."""


def check_unaligned(kernels: Kernels, row: Row) -> None:
    """Gradients start wherever their elements may."""
    for dtype, offset in UNALIGNED:
        for feedback in (MODES[2], ROUNDED[1]):
            check_gaussian(kernels, row, (3, 1377), dtype, feedback, offset=offset)
        check_sum(kernels, row, (3, 1377), dtype, 3, offset=offset)


def check_special_values(kernels: Kernels, row: Row) -> None:
    """Encodes and decodes numbers that are rare among Gaussian ones."""
    for name in special_values(0):
        want, gradient, residual = special(row, name)
        arguments = (gradient, MODES[1], residual, NoiseKey(), want)
        check_encode(kernels, row, SPECIAL, *arguments)
        for dtype in DTYPES:
            before = as_dtype(normal(SPECIAL), dtype)
            check_decode(kernels, row, SPECIAL, want.payload[None], before, step=0, scale=0.75)


def check_not_finite(kernels: Kernels, row: Row, bad: float) -> None:
    """An Inf or a NaN at both ends and in the middle."""
    for shape in ((1,), (151, 17), (6, 700)):
        for dtype in DTYPES:
            values = normal(shape)
            values[[0, values.size // 2, values.size - 1]] = bad
            gradient, residual = as_dtype(values, dtype), normal(shape, seed=2)
            for feedback in (OFF, MODES[2], ROUNDED[0]):
                want = compare(kernels, row, shape, gradient, feedback, residual, NoiseKey())
                for before in (torch.zeros(values.size), gradient):
                    payloads = want.payload[None]
                    check_decode(kernels, row, shape, payloads, before, step=0, scale=1.0)


def check_sums(kernels: Kernels, row: Row, dtype: str, scales: Sequence[float]) -> None:
    """Decodes no payload, one, and those of three ranks."""
    for shape in SHAPES:
        sent = [expected(row, shape, "float32", OFF, 0)[2].payload]
        for seed in (1, 2):
            gradient = torch.from_numpy(normal(shape, seed=seed, scale=2.0))
            arguments = (OFF, np.zeros(0, np.float32), NoiseKey(rank=seed))
            sent.append(reference_encode(row, shape, gradient, *arguments).payload)
        before = as_dtype(normal(shape, seed=7), dtype)
        for payloads in (sent[:0], sent[:1], sent):
            stacked = np.array(payloads, np.uint8).reshape(len(payloads), sent[0].size)
            for scale in scales:
                check_decode(kernels, row, shape, stacked, before, step=0, scale=scale)


def check_anything(kernels: Kernels, data: st.DataObject, rows: Sequence[Row]) -> None:
    """Encodes and decodes a tensor that Hypothesis draws."""
    row = data.draw(st.sampled_from(rows))
    shape = data.draw(shapes())
    feedback = data.draw(st.sampled_from(EVERY_MODE))
    dtype = data.draw(st.sampled_from(tuple(DTYPES)))
    anything = st.one_of(floats(), floats(1.0), st.sampled_from((math.nan, math.inf, -math.inf)))
    gradient = as_dtype(data.draw(tensors(math.prod(shape), anything)), dtype)
    residual = data.draw(tensors(math.prod(shape), floats()))
    words = st.integers(0, 2**32 - 1)
    noise = NoiseKey(*(data.draw(words) for _ in range(3)), data.draw(st.integers(0, 2**64 - 1)))
    want = compare(kernels, row, shape, gradient, feedback, residual, noise)
    arguments = {"step": noise.step, "scale": data.draw(floats())}
    check_decode(kernels, row, shape, want.payload[None], gradient, **arguments)


TABLES = ("dynamic", "static", "mantissa", "e4m3", "e5m2")
"""The kinds of int8 that look their magnitudes up."""


def check_tables(kernels: Kernels, kind: Kind) -> None:
    """Compares every magnitude and every threshold of a kind with the reference's."""
    row = Row(kind, Int8(kind, "tensor", offset=0), 0, OFF)
    everything = np.arange(256, dtype=np.uint8)
    payload = assemble(row.codec, (256,), 0, np.ones(1, np.float32), everything)
    check_decode(kernels, row, (256,), payload[None], torch.zeros(256), step=0, scale=1.0)
    values = np.unique(magnitudes(kind)[np.isfinite(magnitudes(kind))]).astype(np.float64)
    thresholds = ((values[:-1] + values[1:]) / 2).astype(np.float32)
    # The next number below a threshold, and numbers around it, near and farther away: kernels may
    # estimate codes, and must know where that is not exact.
    below = np.nextafter(thresholds, np.float32(0))
    distances = np.outer([-1, 1], 2.0 ** -np.arange(8, 24)).reshape(-1, 1)
    around = (thresholds * (1 + distances)).reshape(-1)
    top = max(1, values[-1])  # kinds without an offset divide by the largest
    magnitude = np.concatenate([[top], thresholds, below, around, np.geomspace(1e-12, 1, 50_000)])
    sides = np.concatenate([magnitude, -magnitude]).clip(-top, top).astype(np.float32)
    gradient, residual = torch.from_numpy(sides), np.zeros(sides.size, np.float32)
    compare(kernels, row, sides.shape, gradient, OFF, residual, NoiseKey())


def check_largest_floats(kernels: Kernels) -> None:
    """Compares numbers whose scales are rounded down so that they do not overflow."""
    shape = (131,)
    values = normal(shape)
    values[[0, 70]] = np.finfo(np.float32).max * np.array([1, -1], np.float32)
    gradient, residual = torch.from_numpy(values), np.zeros(131, np.float32)
    codecs: list[Codec] = [Ternary(64, None), OneBit(64), Int8("dynamic", 64)]
    for group in (64, 128, "tensor"):
        codecs.append(Int8("linear", group))  # type: ignore[arg-type]
        for levels in (3, 7, 11, 100, 127):
            codecs += [ECQ(levels, norm, group) for norm in ("l2", "linf")]  # type: ignore[arg-type]
    for codec in codecs:
        row = Row(str(codec), codec, 0, OFF)
        want = compare(kernels, row, shape, gradient, OFF, residual, NoiseKey())
        zeros = torch.zeros(shape)
        check_decode(kernels, row, shape, want.payload[None], zeros, step=0, scale=1.0)


SPECIAL = (5, 77)


@cache
def special(row: Row, name: str) -> tuple[Encoded, torch.Tensor, np.ndarray]:
    """The reference on one of the special tensors, with one half of it as the residual."""
    values = special_values(math.prod(SPECIAL))[name]
    gradient, residual = torch.from_numpy(values), values * np.float32(0.5)
    want = reference_encode(row, SPECIAL, gradient, MODES[1], residual, NoiseKey())
    return want, gradient, residual
