"""An executor's bytes beside the reference's, one call at a time.

Payloads and residuals are compared bit for bit. In decoded sums all NaNs are alike: which of two NaNs a
sum keeps is the processor's choice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b

import numpy as np
import torch

from hvd_compress.codecs import ECQ, Codec, ErrorFeedback, Int8, NoiseKey, OneBit, Ternary
from hvd_compress.codecs.int8 import Kind, magnitudes
from hvd_compress.codecs.payload import assemble
from hvd_compress.kernels.interface import Kernels
from hvd_compress.kernels.reference import ReferenceKernels
from tests.codecs.cases import normal, special_values
from tests.codecs.rows import Row
from tests.kernels.arrays import (
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
    payload_offset: int = 0,
    device: str = "cpu",
) -> None:
    """Encodes and takes it back, between guards, and compares every byte."""
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
    payload_offset: int = 0,
    device: str = "cpu",
) -> None:
    """Decodes, between guards, and compares with the reference."""
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


TABLES = ("dynamic", "static", "mantissa", "e4m3", "e5m2")
"""The kinds of int8 that look their magnitudes up."""


def check_tables(kernels: Kernels, kind: Kind, *, device: str = "cpu") -> None:
    """Compares every magnitude and every threshold of a kind with the reference's."""
    row = Row(kind, Int8(kind, "tensor", offset=0), 0, OFF)
    everything = np.arange(256, dtype=np.uint8)
    payload = assemble(row.codec, (256,), 0, np.ones(1, np.float32), everything)
    check_decode(
        kernels,
        row,
        (256,),
        payload[None],
        torch.zeros(256),
        step=0,
        scale=1.0,
        device=device,
    )
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
    want = reference_encode(row, sides.shape, gradient, OFF, residual, NoiseKey())
    arguments = (gradient, OFF, residual, NoiseKey(), want)
    check_encode(kernels, row, sides.shape, *arguments, device=device)


def check_largest_floats(kernels: Kernels, *, device: str = "cpu") -> None:
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
        want = reference_encode(row, shape, gradient, OFF, residual, NoiseKey())
        arguments = (gradient, OFF, residual, NoiseKey(), want)
        check_encode(kernels, row, shape, *arguments, device=device)
        before = torch.zeros(shape)
        check_decode(
            kernels,
            row,
            shape,
            want.payload[None],
            before,
            step=0,
            scale=1.0,
            device=device,
        )


SPECIAL = (5, 77)


@cache
def special(row: Row, name: str) -> tuple[Encoded, torch.Tensor, np.ndarray]:
    """The reference on one of the special tensors, with one half of it as the residual."""
    values = special_values(math.prod(SPECIAL))[name]
    gradient, residual = torch.from_numpy(values), values * np.float32(0.5)
    want = reference_encode(row, SPECIAL, gradient, MODES[1], residual, NoiseKey())
    return want, gradient, residual
