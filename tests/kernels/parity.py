"""A batch of one tensor beside the reference: its bytes, its residual and its sums.

Payloads and residuals are compared bit for bit. In decoded sums all NaNs are alike: which of two NaNs a
sum keeps is the processor's choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b

import numpy as np
import torch
from hypothesis import strategies as st

from hvd_compress.codecs import ECQ, Codec, ErrorFeedback, Int8, NoiseKey, OneBit, Ternary
from hvd_compress.codecs.int8 import Kind, magnitudes
from hvd_compress.codecs.payload import assemble
from hvd_compress.kernels.batch import Batch, Entry
from hvd_compress.kernels.reference import ReferenceBatch
from tests.codecs.cases import OFF, encode, floats, normal, shapes, special_values, tensors
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

Make = Callable[[Sequence[Entry]], Batch]
"""Makes the batch whose bytes are compared."""

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
    h = widened(kept(residual, feedback)).copy() if feedback.enabled else None
    given = widened(gradient)
    return Encoded(encode(row.codec, shape, given, feedback=feedback, residual=h, noise=noise), h)


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
        ReferenceBatch([Entry(row.codec, shape)]).decode_sum([total], [step], payloads, scale)
        _decoded[key] = bits(torch.from_numpy(total).to(before.dtype))
    return _decoded[key]


TABLES = ("dynamic", "static", "mantissa", "e4m3", "e5m2")
"""The kinds of int8 that look their magnitudes up."""

SPECIAL = (5, 77)


@cache
def special(row: Row, name: str) -> tuple[Encoded, torch.Tensor, np.ndarray]:
    """The reference on one of the special tensors, with one half of it as the residual."""
    values = special_values(math.prod(SPECIAL))[name]
    gradient, residual = torch.from_numpy(values), values * np.float32(0.5)
    want = reference_encode(row, SPECIAL, gradient, MODES[1], residual, NoiseKey())
    return want, gradient, residual


@dataclass(frozen=True)
class Parity:
    """Compares batches of one tensor with the reference, between guards and byte by byte.

    Attributes:
        makes: the functions that make the batches, all of which are compared.
        device: the device of the tensors.
        alignment: payloads start at multiples of so many bytes.
    """

    makes: Sequence[Make]
    device: str = "cpu"
    alignment: int = 4

    def encode(
        self,
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
        """Encodes; the residual is changed in place."""
        case = f"{row}, {shape}, {gradient.dtype}, {feedback}"
        before = kept(residual, feedback)
        after = residual if want.residual is None else want.residual
        for make in self.makes:
            g = Guarded(gradient, offset, self.device)
            h = Guarded(before, offset * before.element_size(), self.device)
            payload = empty_payload(want.payload.size, self._aligned(offset), self.device)

            residuals = [h.array if feedback.enabled else None]
            batch = make([Entry(row.codec, shape, feedback, noise)])
            batch.encode([g.array], residuals, residuals, [noise.step], payload.array)

            assert_same(payload.array.cpu().numpy(), want.payload, f"payload: {case}")
            assert_same(bits(g.array), bits(gradient), f"the gradient was changed: {case}")
            assert_same(bits(h.array), bits(kept(after, feedback)), f"residual: {case}")
            assert g.intact() and h.intact() and payload.intact(), f"out of bounds: {case}"

    def encode_expected(
        self,
        row: Row,
        shape: tuple[int, ...],
        dtype: str,
        feedback: ErrorFeedback,
        step: int = 1,
        offset: int = 0,
    ) -> None:
        """Encodes the gradient of :func:`expected`."""
        gradient, residual, want = expected(row, shape, dtype, feedback, step)
        noise = NoiseKey(seed=3, rank=step, tensor=9, step=step)
        self.encode(row, shape, gradient, feedback, residual, noise, want, offset=offset)

    def decode(
        self,
        row: Row,
        shape: tuple[int, ...],
        payloads: np.ndarray | Sequence[np.ndarray],
        before: torch.Tensor,
        *,
        step: int = 0,
        scale: float = 1.0,
        offset: int = 0,
    ) -> None:
        """Decodes and adds payloads; the output begins as ``before``."""
        payloads = np.reshape(payloads, (len(payloads), row.codec.payload_bytes(shape)))
        payloads = payloads.astype(np.uint8)
        case = f"{row}, {shape}, {before.dtype}, {len(payloads)} x {scale}"
        want = decoded(row, shape, payloads, before, step, scale)
        for make in self.makes:
            out = Guarded(before, offset, self.device)
            flat = torch.from_numpy(payloads.reshape(-1))
            sent = Guarded(flat, self._aligned(offset), self.device)
            rows = sent.array.view(payloads.shape)
            make([Entry(row.codec, shape)]).decode_sum([out.array], [step], rows, scale)
            assert_same(bits(out.array), want, case)
            assert out.intact() and sent.intact(), f"out of bounds: {case}"

    def tables(self, kind: Kind) -> None:
        """Every magnitude and every threshold of a kind."""
        row = Row(kind, Int8(kind, "tensor", offset=0), 0, OFF)
        everything = np.arange(256, dtype=np.uint8)
        payload = assemble(row.codec, (256,), 0, np.ones(1, np.float32), everything)
        self.decode(row, (256,), payload[None], torch.zeros(256))
        values = np.unique(magnitudes(kind)[np.isfinite(magnitudes(kind))]).astype(np.float64)
        thresholds = ((values[:-1] + values[1:]) / 2).astype(np.float32)
        # The next number below a threshold, and numbers around it, near and farther away: kernels may
        # estimate codes, and must know where that is not exact.
        below = np.nextafter(thresholds, np.float32(0))
        distances = np.outer([-1, 1], 2.0 ** -np.arange(8, 24)).reshape(-1, 1)
        around = (thresholds * (1 + distances)).reshape(-1)
        top = max(1, values[-1])  # kinds without an offset divide by the largest
        small = np.geomspace(1e-12, 1, 50_000)
        magnitude = np.concatenate([[top], thresholds, below, around, small])
        sides = np.concatenate([magnitude, -magnitude]).clip(-top, top).astype(np.float32)
        self._encode_plain(row, sides.shape, torch.from_numpy(sides))

    def largest_floats(self) -> None:
        """Numbers whose scales are rounded down so that they do not overflow."""
        shape = (131,)
        values = normal(shape)
        values[[0, 70]] = np.finfo(np.float32).max * np.array([1, -1], np.float32)
        codecs: list[Codec] = [Ternary(64, None), OneBit(64), Int8("dynamic", 64)]
        for group in (64, 128, "tensor"):
            codecs.append(Int8("linear", group))  # type: ignore[arg-type]
            for levels in (3, 7, 11, 100, 127):
                codecs += [ECQ(levels, norm, group) for norm in ("l2", "linf")]  # type: ignore[arg-type]
        for codec in codecs:
            row = Row(str(codec), codec, 0, OFF)
            want = self._encode_plain(row, shape, torch.from_numpy(values))
            self.decode(row, shape, want.payload[None], torch.zeros(shape))

    def special_values(self, row: Row) -> None:
        """Each of the special tensors; its payload is decoded into every dtype."""
        for name in special_values(0):
            want, gradient, residual = special(row, name)
            self.encode(row, SPECIAL, gradient, MODES[1], residual, NoiseKey(), want)
            for dtype in DTYPES:
                before = as_dtype(normal(SPECIAL), dtype)
                self.decode(row, SPECIAL, want.payload[None], before, scale=0.75)

    def nonfinite(self, row: Row, bad: float) -> None:
        """Tensors with three numbers that are not finite."""
        for shape in ((1,), (151, 17), (6, 700)):
            for dtype in DTYPES:
                count = math.prod(shape)
                values = normal(shape)
                values[[0, count // 2, count - 1]] = bad
                gradient, residual = as_dtype(values, dtype), normal(shape, seed=2)
                for feedback in (OFF, MODES[2], ROUNDED[0]):
                    want = reference_encode(row, shape, gradient, feedback, residual, NoiseKey())
                    self.encode(row, shape, gradient, feedback, residual, NoiseKey(), want)
                    self.decode(row, shape, want.payload[None], torch.zeros(count))

    def sums(self, row: Row, dtype: str) -> None:
        """Sums of no payload, of one, and of three, with several scales."""
        for shape in SHAPES:
            sent = [expected(row, shape, "float32", OFF, 0)[2].payload]
            for seed in (1, 2):
                values = normal(shape, seed=seed, scale=2.0)
                sent.append(encode(row.codec, shape, values, noise=NoiseKey(rank=seed)))
            before = as_dtype(normal(shape, seed=7), dtype)
            for payloads in (sent[:0], sent[:1], sent):
                for scale in (1.0, 1 / 3, -0.7):
                    self.decode(row, shape, payloads, before, scale=scale)

    def anything(self, rows: Sequence[Row], data: st.DataObject) -> None:
        """A tensor of any kind, encoded and decoded."""
        row, shape = data.draw(st.sampled_from(rows)), data.draw(shapes())
        feedback = data.draw(st.sampled_from(EVERY_MODE))
        dtype = data.draw(st.sampled_from(tuple(DTYPES)))
        bad = st.sampled_from((math.nan, math.inf, -math.inf))
        values = data.draw(tensors(math.prod(shape), st.one_of(floats(), floats(1.0), bad)))
        residual = data.draw(tensors(math.prod(shape), floats()))
        key = [data.draw(st.integers(0, 2**32 - 1)) for _ in range(3)]
        noise = NoiseKey(*key, data.draw(st.integers(0, 2**64 - 1)))
        gradient = as_dtype(values, dtype)
        want = reference_encode(row, shape, gradient, feedback, residual, noise)
        self.encode(row, shape, gradient, feedback, residual, noise, want)
        sent, scale = want.payload[None], data.draw(floats())
        self.decode(row, shape, sent, gradient, step=noise.step, scale=scale)

    def _encode_plain(self, row: Row, shape: tuple[int, ...], gradient: torch.Tensor) -> Encoded:
        residual = np.zeros(math.prod(shape), np.float32)
        want = reference_encode(row, shape, gradient, OFF, residual, NoiseKey())
        self.encode(row, shape, gradient, OFF, residual, NoiseKey(), want)
        return want

    def _aligned(self, offset: int) -> int:
        return offset - offset % self.alignment
