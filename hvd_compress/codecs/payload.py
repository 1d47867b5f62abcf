"""The payload: a fixed header, the scales, the codes (``docs/format.md``).

The codec and the tensor's shape determine the size of a payload with plain codes, which is its capacity.
An entropy-coded payload is at the front of a buffer of that capacity, and its header has its length."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import numpy as np

from hvd_compress.codecs import rans
from hvd_compress.codecs.base import (
    HEADER_BYTES,
    Codec,
    PayloadError,
    PayloadLayout,
    Shape,
    round_up,
)
from hvd_compress.codecs.levels import LevelCodec

FORMAT_VERSION = 1
MAGIC = 0x4348
"""The bytes ``HC``."""

FLAG_NONFINITE = 1
"""The flag for a gradient that holds an Inf or a NaN: some scale is NaN."""

FLAG_CODED = 2
"""The flag for entropy-coded codes: the flags' upper bits are the payload's length."""

_LENGTH_SHIFT = 4
_LENGTH_UNIT = 16
_LENGTH_LIMIT = (1 << (32 - _LENGTH_SHIFT)) * _LENGTH_UNIT

_HEADER = struct.Struct("<HBBIQIIQ")
FLAGS_OFFSET = 16
"""The offset of a payload's flags in bytes."""

_CHECKSUM_OFFSET = 24


@dataclass(frozen=True)
class Header:
    """The fields of a payload's header, in their order."""

    version: int
    codec_id: int
    config_hash: int
    count: int
    flags: int
    step: int
    checksum: int


def checksum(payload: np.ndarray) -> int:
    """The sum of ``word * (2 i + 1)`` over the payload's 32-bit little-endian words, modulo 2**64.

    ``i`` is the word's position; the checksum's own two words count as zero. The sum can be computed in
    any order and by any number of threads; as weights are odd, any change of a single word changes it.

    Args:
        payload: shape=(bytes,), dtype uint8; the number of bytes is a multiple of 4.
    """
    words = payload.view("<u4").astype(np.uint64)
    first = _CHECKSUM_OFFSET // 4
    words[first : first + 2] = 0
    weights = np.arange(words.size, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    return int((words * weights).sum(dtype=np.uint64))


def assemble(
    codec: Codec, shape: Shape, step: int, scales: np.ndarray, codes: np.ndarray
) -> np.ndarray:
    """Writes header, scales and codes into one payload, shape=(payload_bytes,), dtype uint8.

    If entropy coding makes the payload shorter, the bytes behind its end are left over from the plain
    codes, as in the kernels.
    """
    plain = _assemble_plain(codec, shape, step, scales, codes)
    if not isinstance(codec, LevelCodec) or not codec.varies or not math.prod(shape):
        return plain
    layout = codec.layout(shape)
    symbols = codec.unpack(codes, layout.count)
    coded = rans.encode(symbols, layout, codec.alphabet)
    begin = HEADER_BYTES + layout.codes_offset
    length = round_up(begin + coded.size, _LENGTH_UNIT)
    if length < min(plain.size, _LENGTH_LIMIT):
        plain[begin:length] = 0
        plain[begin : begin + coded.size] = coded
        flags = read_header(plain).flags | FLAG_CODED | length // _LENGTH_UNIT << _LENGTH_SHIFT
        plain[FLAGS_OFFSET : FLAGS_OFFSET + 4] = np.frombuffer(struct.pack("<I", flags), np.uint8)
        _seal(plain[:length])
    return plain


def _assemble_plain(
    codec: Codec, shape: Shape, step: int, scales: np.ndarray, codes: np.ndarray
) -> np.ndarray:
    layout = codec.layout(shape)
    payload = np.zeros(HEADER_BYTES + layout.body_bytes, np.uint8)
    body = payload[HEADER_BYTES:]
    body[: 4 * layout.scales] = scales.astype("<f4").view(np.uint8)
    body[layout.codes_offset : layout.codes_offset + codes.size] = codes
    flags = FLAG_NONFINITE if _nonfinite(codec, layout, scales, codes) else 0
    fields = (MAGIC, FORMAT_VERSION, codec.codec_id, codec.config_hash(), layout.count, flags)
    payload[:HEADER_BYTES] = np.frombuffer(_HEADER.pack(*fields, step & 0xFFFFFFFF, 0), np.uint8)
    _seal(payload)
    return payload


def _seal(payload: np.ndarray) -> None:
    total = checksum(payload)
    payload[_CHECKSUM_OFFSET:HEADER_BYTES] = np.frombuffer(struct.pack("<Q", total), np.uint8)


def _nonfinite(codec: Codec, layout: PayloadLayout, scales: np.ndarray, codes: np.ndarray) -> bool:
    if layout.scales or not layout.count:
        return bool(np.isnan(scales).any())
    return not bool(np.isfinite(codec.dequantize(scales, codes, (layout.count,))).all())


def read_header(payload: np.ndarray) -> Header:
    """Reads a header, and checks only its magic.

    Raises:
        PayloadError: fewer bytes than a header, or another magic.
    """
    if payload.size < HEADER_BYTES:
        raise PayloadError(f"payload: expected at least {HEADER_BYTES} bytes, got {payload.size}")
    magic, *fields = _HEADER.unpack(payload[:HEADER_BYTES].tobytes())
    if magic != MAGIC:
        raise PayloadError(f"payload: expected magic {MAGIC:#06x}, got {magic:#06x}")
    return Header(*fields)


def payload_length(payload: bytes | np.ndarray, capacity: int) -> int:
    """The number of bytes that a payload occupies: its capacity, unless its codes are entropy coded.

    Args:
        payload: at least the payload's header, as ``bytes`` or as an array, shape=(bytes,), dtype uint8.
        capacity: the bytes reserved for the payload (:meth:`Codec.payload_bytes`).

    Returns:
        A multiple of 16 where the codes are entropy coded, else ``capacity``.

    Raises:
        PayloadError: fewer bytes than a header, another magic, or a length that no payload can have.
    """
    if not isinstance(payload, np.ndarray):
        payload = np.frombuffer(payload, np.uint8)
    length = length_in(read_header(payload).flags, capacity)
    if not HEADER_BYTES <= length <= capacity:
        raise PayloadError(
            f"payload: expected a length from {HEADER_BYTES} to {capacity} bytes, got {length}"
        )
    return length


def length_in(flags: int, capacity: int) -> int:
    """The payload length that a header's flags state, unchecked: see :func:`payload_length`."""
    return (flags >> _LENGTH_SHIFT) * _LENGTH_UNIT if flags & FLAG_CODED else capacity


def open_payload(
    codec: Codec, shape: Shape, step: int, payload: np.ndarray
) -> tuple[Header, np.ndarray, np.ndarray]:
    """Checks a payload; returns its header, its scales and its codes as in a plain payload.

    Scales and plain codes are views, not copies.

    Args:
        codec: the codec that wrote the payload.
        shape: the tensor's shape.
        step: the number of times that the tensor was encoded before.
        payload: shape=(payload_bytes,), dtype uint8; bytes behind the payload's length are ignored.

    Raises:
        PayloadError: a size, a header, a checksum or an entropy code that this codec does not write for
            this shape and step.
    """
    header = read_header(payload)
    layout = codec.layout(shape)
    expected = {
        "format version": (FORMAT_VERSION, header.version),
        "codec": (codec.codec_id, header.codec_id),
        "configuration hash": (codec.config_hash(), header.config_hash),
        "element count": (layout.count, header.count),
        "step": (step & 0xFFFFFFFF, header.step),
        "size in bytes": (HEADER_BYTES + layout.body_bytes, payload.size),
    }
    for field, (want, got) in expected.items():
        if want != got:
            raise PayloadError(f"payload: expected {field} {want}, got {got}")
    if codec.varies:
        payload = payload[: payload_length(payload, payload.size)]
    total = checksum(payload)
    if total != header.checksum:
        raise PayloadError(f"payload: expected checksum {total:#018x}, got {header.checksum:#018x}")
    body = payload[HEADER_BYTES:]
    scales = body[: 4 * layout.scales].view("<f4")
    codes = body[layout.codes_offset :]
    if isinstance(codec, LevelCodec) and codec.varies and header.flags & FLAG_CODED:
        return header, scales, _decode(codec, layout, codes)
    used = (layout.blocks - 1) * layout.block_bytes + layout.last_bytes if layout.count else 0
    codec.check_codes(codes[:used], shape)
    return header, scales, codes[:used]


def _decode(codec: LevelCodec, layout: PayloadLayout, coded: np.ndarray) -> np.ndarray:
    if not layout.count:
        raise PayloadError("payload: expected no entropy-coded codes of an empty tensor, got some")
    try:
        return codec.pack(rans.decode(coded, layout, codec.alphabet))
    except rans.StreamError as error:
        raise PayloadError(f"payload: {error}") from None
