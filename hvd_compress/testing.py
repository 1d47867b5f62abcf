"""The contract of codecs, for the tests of new codecs: ``check_codec(MyCodec())``.

The checks need only NumPy. They use fixed seeds, so that a codec that passes them once will always pass
them.
"""

from __future__ import annotations

import json
import math
import tracemalloc
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvd_compress.codecs import (
    HEADER_BYTES,
    Codec,
    ErrorFeedback,
    NoiseKey,
    PayloadLayout,
    read_header,
)
from hvd_compress.codecs.base import Shape, round_up
from hvd_compress.codecs.feedback import OFF
from hvd_compress.codecs.payload import FLAG_NONFINITE, open_payload
from hvd_compress.codecs.registry import check_class
from hvd_compress.kernels.batch import Entry
from hvd_compress.kernels.reference import ReferenceBatch, dequantize, quantize

__all__ = ["SHAPES", "check_codec", "special_values"]

SHAPES: tuple[Shape, ...] = (
    (),
    (1,),
    (0,),
    (3, 0, 2),
    (1, 77),
    (77, 1),
    (63,),
    (64,),
    (65,),
    (5, 3, 2, 7),
    (129, 5),
    (151, 17),
    (2559,),
    (2560,),
    (2561,),
    (3, 1377),
)
"""Shapes for tests: empty and 0-dimensional ones, and sizes close to those of tiles, groups, blocks and
chunks of sums."""

_EPS = 2.0**-24
"""Half a unit in the last place of 1: the relative error of one float32 operation."""

_ON = (ErrorFeedback(1.0, 1.0), ErrorFeedback(0.37, 0.83))
_ODDS = math.log(4 / 5.7e-7)
"""The logarithm for a two-sided test at 5 sigma."""


def check_codec(
    codec: Codec,
    *,
    shapes: Sequence[Shape] = SHAPES,
    floor: float = 0.0,
    clipped: Callable[[np.ndarray], np.ndarray] | None = None,
    draws: int = 1000,
) -> None:
    """Checks the properties that every codec of this package has, with the codec's NumPy reference.

    1. The class can be registered; the configuration can be converted to JSON and back.
    2. Scales and codes fill the layout; sizes are computed without memory for the tensor; a payload's
       header is right.
    3. Encoding does not change its input and depends on nothing else. Only unbiased codecs use the noise.
    4. The residual is the part that was not sent.
    5. An Inf or a NaN sets the flag, is received as a number that is not finite, and does not change the
       residual.
    6. Finite numbers up to 6e4 are received as finite numbers. With ``error = "contractive"``, the error is
       no larger than the tensor, for any tensor. With ``"unbiased"``, the mean of the draws is the tensor,
       and the mean squared error is within ``variance_factor``, as far as the number of draws can show
       (the empirical Bernstein bound of Maurer and Pontil, COLT 2009, at 5 sigma).
    7. Error feedback with the codec's default settings and coefficients is stable.

    Args:
        codec: the codec with the settings to check.
        shapes: the shapes of the tensors.
        floor: the largest error of an element that is zero, for codecs that cannot send zero.
        clipped: a function that applies the codec's own clipping to a tensor, shape=(n,), for unbiased
            codecs; None means no clipping.
        draws: the number of times that a tensor is encoded for a mean.

    Raises:
        AssertionError: a property does not hold; the message states the expected and the actual behaviour.
        TypeError, ValueError: the class cannot be registered.
    """
    check_class(codec.name, type(codec))
    _check_configuration(codec)
    for shape in shapes:
        _check_payload(codec, shape)
        _check_feedback(codec, shape)
        _check_nonfinite(codec, shape)
        for name, x in special_values(math.prod(shape)).items():
            _check_finite(codec, shape, x, name, floor)
    _check_noise(codec)
    if codec.error == "unbiased":
        _check_mean(codec, clipped or (lambda x: x), draws)
    plain = type(codec)()
    plain.check_feedback(plain.feedback, (1 << 20,))


def special_values(count: int) -> dict[str, np.ndarray]:
    """Finite tensors that are difficult for codecs, by name, each shape=(count,), dtype float32."""
    base = _normal(count, seed=count)
    one_hot = np.zeros(count)
    one_hot[count // 2 : count // 2 + 1] = -3.0
    named = {
        "zeros": np.zeros(count),
        "negative zeros": -np.zeros(count),
        "zeros of both signs": np.where(base < 0, -0.0, 0.0),
        "smallest subnormals": np.where(base < 0, -(2.0**-149), 2.0**-149),
        "subnormals": base * 2.0**-130,
        "around the smallest normal": base * 2.0**-126,
        "just below the smallest scale": np.clip(base, -0.9, 0.9) * 2.0**-120,
        "around the smallest scale": base * 2.0**-120,
        "large": base * 1e30,
        "huge": np.where(base < 0, -1e38, 1e38),
        "one largest float": one_hot / 3 * float(np.finfo(np.float32).max),
        "constant": np.full(count, 0.1),
        "negative constant": np.full(count, -7.25),
        "one element": one_hot,
        "nearly constant": 1.0 + base * 1e-7,
        "very different magnitudes": base * 10.0 ** np.arange(-20, 20)[np.arange(count) % 40],
        "ties": np.round(base * 8) / 8,
    }
    return {name: values.astype(np.float32) for name, values in named.items()}


def _check_configuration(codec: Codec) -> None:
    config = json.loads(json.dumps(codec.to_config()))
    _expect(config.pop("codec") == codec.name, codec, "its name in to_config()")
    again = type(codec)(**config)
    _expect(
        again == codec and again.config_hash() == codec.config_hash(), codec, "to_config() and back"
    )
    layout = codec.layout((3, 5))
    _expect(isinstance(layout, PayloadLayout), codec, f"a PayloadLayout as layout, got {layout!r}")
    tracemalloc.start()
    try:
        codec.payload_bytes((2**16, 2**30))
        used = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    _expect(used < 100_000, codec, f"a layout without memory for the tensor, got {used} bytes")


def _check_payload(codec: Codec, shape: Shape) -> None:
    count, layout = math.prod(shape), codec.layout(shape)
    x = _normal(count)
    before = x.copy()
    if count:
        with np.errstate(all="ignore"):
            scales, codes = codec.quantize(x, shape, NoiseKey())
        full = (layout.blocks - 1) * layout.block_bytes + layout.last_bytes
        for what, want, got in (
            ("layout's count", count, layout.count),
            ("layout's block modulo 64", 0, layout.block % 64),
            ("dtype of scales", "float32", str(scales.dtype)),
            ("shape of scales", (layout.scales,), scales.shape),
            ("dtype of codes", "uint8", str(codes.dtype)),
            ("bytes of codes", full, codes.size),
        ):
            _expect(got == want, codec, f"{what} {want}, got {got}", shape)
        used = HEADER_BYTES + round_up(4 * scales.size, 16) + codes.size
        spare = codec.payload_bytes(shape) - used
        _expect(0 <= spare < 16, codec, f"0 to 15 bytes of padding, got {spare}", shape)
    first, second = (_encode(codec, shape, x, step=2**32 + 5, filler=f) for f in (0, 255))
    _expect(_same(first, second), codec, "the same payload again", shape)
    _expect(_same(x, before), codec, "quantize to leave its input as it is", shape)
    header = read_header(first)
    fields = (header.codec_id, header.config_hash, header.count, header.step)
    want_fields = (codec.codec_id, codec.config_hash(), count, 5)
    _expect(fields == want_fields, codec, f"the header {want_fields}, got {fields}", shape)
    decoded = _decode(codec, shape, first, 2**32 + 5)
    kind = (str(decoded.dtype), decoded.shape)
    _expect(kind == ("float32", (count,)), codec, f"float32, shape {(count,)}, got {kind}", shape)


def _check_noise(codec: Codec) -> None:
    x = _normal(640)
    first = _encode(codec, (640,), x)
    for field in ("seed", "rank", "tensor", "step"):
        noise = {field: 1}
        scales, codes = codec.quantize(x, (640,), NoiseKey(**noise))
        _, own_scales, own_codes = open_payload(codec, (640,), 0, first)
        alike = _same(scales, own_scales) and _same(codes, own_codes[: codes.size])
        want = codec.error != "unbiased"
        what = "no change with" if want else "other numbers with another"
        _expect(alike == want, codec, f"{what} NoiseKey.{field}, as error = {codec.error!r} says")


def _check_feedback(codec: Codec, shape: Shape) -> None:
    count = math.prod(shape)
    for feedback in _ON:
        residual = _normal(count, seed=9)
        for step in range(2):
            gradient, before = _normal(count, seed=step), residual.copy()
            compensated = gradient + np.float32(feedback.alpha) * residual
            payload = _encode(codec, shape, gradient, feedback, residual, step)
            alone = _encode(codec, shape, compensated, step=step)
            _expect(_same(payload, alone), codec, "the payload of gradient + residual", shape)
            decoded = _decode(codec, shape, payload, step)
            left = np.float32(feedback.beta) * before + gradient - decoded
            _expect(_same(residual, left), codec, "the residual to be what was not sent", shape)


def _check_nonfinite(codec: Codec, shape: Shape) -> None:
    count = math.prod(shape)
    for bad in (np.nan, np.inf, -np.inf):
        for position in {0, count // 2, count - 1} if count else ():
            gradient = _normal(count)
            gradient[position] = bad
            before = _normal(count, seed=2)
            residual = before.copy()
            payload = _encode(codec, shape, gradient, _ON[1], residual)
            decoded = _decode(codec, shape, payload)
            lost = ~np.isfinite(decoded)
            flagged = bool(read_header(payload).flags & FLAG_NONFINITE)
            what = f"{bad} at {position} to"
            _expect(flagged, codec, f"{what} set a scale to NaN", shape)
            _expect(bool(lost[position]), codec, f"{what} arrive as Inf or NaN", shape)
            kept = _same(residual[lost], before[lost]) and np.isfinite(residual).all()
            _expect(bool(kept), codec, f"{what} leave the residual", shape)


def _check_finite(codec: Codec, shape: Shape, x: np.ndarray, name: str, floor: float) -> None:
    payload = _encode(codec, shape, x)
    decoded = _decode(codec, shape, payload)
    finite = np.isfinite(decoded)
    flagged = bool(read_header(payload).flags & FLAG_NONFINITE)
    _expect(flagged == (not finite.all()), codec, f"a NaN scale where {name} overflow", shape)
    if np.abs(x).max(initial=0.0) <= 6e4:
        _expect(bool(finite.all()), codec, f"finite numbers for {name}", shape)
        # The integer that a NaN becomes differs between processors.
        with warnings.catch_warnings(record=True) as caught, np.errstate(all="warn"):
            warnings.simplefilter("always")
            quantize(codec, shape, x, NoiseKey())
        casts = [
            str(one.message)
            for one in caught
            if "invalid value encountered in cast" in str(one.message)
        ]
        _expect(not casts, codec, f"codes for {name} without a NaN cast to them", shape)
    wide, sent = x[finite].astype(np.float64), decoded[finite].astype(np.float64)
    if codec.error == "contractive" and finite.all():
        error, norm = (math.sqrt(np.sum(part**2)) for part in (wide - sent, wide))
        most = norm * (1 + 4 * _EPS) + math.sqrt(wide.size) * (floor + 2.0**-149)
        _expect(error <= most, codec, f"an error of at most {most} for {name}, got {error}", shape)
    if not floor and not wide.any():
        _expect(not sent.any(), codec, f"zeros for {name}", shape)


def _check_mean(codec: Codec, clipped: Callable[[np.ndarray], np.ndarray], draws: int) -> None:
    shape = (3, 67)
    x = _normal(201, seed=6)
    target = clipped(x).astype(np.float64)
    errors = np.empty((draws, x.size))
    for step in range(draws):
        codes = codec.quantize(x, shape, NoiseKey(step=step))
        errors[step] = dequantize(codec, shape, *codes) - target
    directions = {
        "each element": (errors, np.abs(target)),
        "the sum": (errors.sum(axis=1, keepdims=True), np.abs(target).sum(keepdims=True)),
        "the size": (errors @ np.sign(target)[:, None], np.abs(target).sum(keepdims=True)),
    }
    for what, (samples, size) in directions.items():
        tolerance = _bernstein(samples) + 4 * _EPS * (size + np.abs(samples).max())
        worst = float((np.abs(samples.mean(axis=0)) / tolerance).max())
        _expect(worst <= 1, codec, f"no bias of {what}, got {worst:.1f} times the tolerance", shape)
    squares = (errors**2).sum(axis=1, keepdims=True)
    most = codec.variance_factor(x.size) * float(np.sum(x.astype(np.float64) ** 2))
    got = float(squares.mean() - _bernstein(squares).max())
    good = clipped(x) is not x or got <= most * (1 + 1e-5)
    _expect(good, codec, f"a mean squared error of {most} (variance_factor), got {got}", shape)


def _bernstein(samples: np.ndarray) -> np.ndarray:
    """The bound of the difference between the mean of independent samples and their expectation.

    The samples have shape=(n, k), the bound shape=(k,). The range of the samples is that of all k elements,
    because an element may not have drawn its rare values.
    """
    n = len(samples)
    width = float(samples.max() - samples.min())
    return np.sqrt(2 * samples.var(axis=0, ddof=1) * _ODDS / n) + 7 * width * _ODDS / (3 * (n - 1))


def _normal(count: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.0, 1.0, count).astype(np.float32)


def _encode(
    codec: Codec,
    shape: Shape,
    gradient: np.ndarray,
    feedback: ErrorFeedback = OFF,
    residual: np.ndarray | None = None,
    step: int = 0,
    filler: int = 0xAA,
) -> np.ndarray:
    payload = np.full(codec.payload_bytes(shape), filler, np.uint8)
    batch = ReferenceBatch([Entry(codec, shape, feedback)])
    batch.encode([gradient], [residual], [residual], [step], payload)
    return payload


def _decode(codec: Codec, shape: Shape, payload: np.ndarray, step: int = 0) -> np.ndarray:
    _, scales, codes = open_payload(codec, shape, step, payload)
    with np.errstate(all="ignore"):
        return dequantize(codec, shape, scales, codes)


def _same(left: np.ndarray, right: np.ndarray) -> bool:
    """Whether two arrays are equal bit by bit, including the signs of zeros; all NaNs are equal."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    bits = f"u{left.dtype.itemsize}"
    return bool(np.all((left.view(bits) == right.view(bits)) | (np.isnan(left) & np.isnan(right))))


def _expect(good: Any, codec: Codec, what: str, shape: Shape | None = None) -> None:
    if not good:
        where = "" if shape is None else f", shape {shape}"
        raise AssertionError(f"{codec}{where}: expected {what}")
