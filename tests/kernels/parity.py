"""An executor's bytes beside the oracle's, one call at a time.

Payloads and residuals are compared bit for bit. In decoded sums all NaNs are alike: which of two NaNs a
sum keeps is the processor's choice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from hvd_compress.codecs import ErrorFeedback, NoiseKey
from hvd_compress.kernels.interface import Kernels
from hvd_compress.kernels.oracle import OracleKernels
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

ORACLE = OracleKernels()
OFF = ErrorFeedback(alpha=0.0)
MODES = (OFF, ErrorFeedback(1.0, 1.0), ErrorFeedback(0.37, 0.83))
"""Without a residual, with alpha and beta alike, and with both."""

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
    """What the oracle makes of a gradient."""

    payload: np.ndarray
    residual: np.ndarray | None
    taken_back: np.ndarray | None


def oracle_encode(
    row: Row,
    shape: tuple[int, ...],
    gradient: torch.Tensor,
    feedback: ErrorFeedback,
    residual: np.ndarray,
    noise: NoiseKey,
) -> Encoded:
    """The oracle's payload, residual, and residual after take_back; its inputs are left alone."""
    g = widened(gradient)
    payload = np.zeros(row.codec.payload_bytes(shape), np.uint8)
    h = residual.copy() if feedback.enabled else None
    ORACLE.encode(row.codec, shape, g, payload, feedback=feedback, residual=h, noise=noise)
    if h is None:
        return Encoded(payload, None, None)
    back = h.copy()
    ORACLE.take_back(row.codec, shape, g, back, payload, feedback=feedback, step=noise.step)
    return Encoded(payload, h, back)


@cache
def expected(
    row: Row, shape: tuple[int, ...], dtype: str, feedback: ErrorFeedback, step: int
) -> tuple[torch.Tensor, np.ndarray, Encoded]:
    """A Gaussian gradient, a residual, and what the oracle makes of them: once for all kernels."""
    gradient = as_dtype(normal(shape, seed=step), dtype)
    residual = normal(shape, seed=50 + step, scale=0.3)
    noise = NoiseKey(seed=3, rank=step, tensor=9, step=step)
    return gradient, residual, oracle_encode(row, shape, gradient, feedback, residual, noise)


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
    h = Guarded(torch.from_numpy(residual), 4 * offset, device)
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
    if want.residual is None or want.taken_back is None:
        after = residual
    else:
        after = want.taken_back
        assert_same(bits(h.array), bits(want.residual), f"residual: {case}")
        kernels.take_back(
            row.codec,
            shape,
            g.array,
            h.array,
            payload.array,
            feedback=feedback,
            step=noise.step,
        )
    assert_same(bits(h.array), bits(after), f"taken back: {case}")
    assert_same(payload.array.cpu().numpy(), want.payload, f"the payload was changed: {case}")
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
    accumulate: bool,
    offset: int = 0,
    payload_offset: int = 0,
    device: str = "cpu",
) -> None:
    """Decodes, between guards, and compares with the oracle."""
    dtype = before.dtype
    case = f"{row}, {shape}, {dtype}, {len(payloads)} x {scale}, {accumulate=}, {kernels.name}"
    total = widened(before).copy()
    ORACLE.decode_sum(
        row.codec, shape, payloads, total, step=step, scale=scale, accumulate=accumulate
    )
    want = torch.from_numpy(total).to(dtype)
    out = Guarded(before, offset, device)
    sent = Guarded(torch.from_numpy(payloads.reshape(-1)), payload_offset, device)
    kernels.decode_sum(
        row.codec,
        shape,
        sent.array.view(payloads.shape),
        out.array,
        step=step,
        scale=scale,
        accumulate=accumulate,
    )
    assert_same(bits(out.array), bits(want), case)
    assert out.intact() and sent.intact(), f"out of bounds: {case}"


SPECIAL = (5, 77)


@cache
def special(row: Row, name: str) -> tuple[Encoded, torch.Tensor, np.ndarray]:
    """The oracle on one of the special tensors, with one half of it as the residual."""
    values = special_values(math.prod(SPECIAL))[name]
    gradient, residual = torch.from_numpy(values), values * np.float32(0.5)
    want = oracle_encode(row, SPECIAL, gradient, MODES[1], residual, NoiseKey())
    return want, gradient, residual
