"""The payload's header and what it detects."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from hvd_compress.codecs import (
    BF16,
    ECQ,
    FP16,
    HEADER_BYTES,
    Codec,
    NoiseKey,
    OneBit,
    PayloadError,
    Ternary,
    read_header,
)
from hvd_compress.codecs.payload import checksum, open_payload
from tests.codecs.cases import encode, normal

SHAPE = (70,)
CODEC = ECQ(4, "l2", 64)


def payload(codec: Codec = CODEC, step: int = 3) -> np.ndarray:
    return encode(codec, SHAPE, normal(SHAPE), noise=NoiseKey(step=step))


def sealed(changed: np.ndarray) -> np.ndarray:
    """The same bytes under a checksum that fits them."""
    changed[24:32] = np.frombuffer(struct.pack("<Q", checksum(changed)), np.uint8)
    return changed


def test_bytes_of_a_header() -> None:
    """The format page's table, spelled out."""
    raw = payload(step=(1 << 32) + 3).tobytes()
    assert raw[0:2] == b"HC"
    assert raw[2] == 1
    assert raw[3] == ECQ.codec_id
    assert raw[4:8] == CODEC.config_hash().to_bytes(4, "little")
    assert raw[8:16] == (70).to_bytes(8, "little")
    assert raw[16:20] == bytes(4)
    assert raw[20:24] == (3).to_bytes(4, "little")
    words = struct.unpack(f"<{len(raw) // 4}I", raw)
    weighted = sum(word * (2 * i + 1) for i, word in enumerate(words) if i not in (6, 7))
    assert raw[24:32] == (weighted % 2**64).to_bytes(8, "little")


@pytest.mark.parametrize("codec", (CODEC, OneBit(64), Ternary(64), BF16()), ids=str)
def test_every_flipped_bit_is_found(codec: Codec) -> None:
    sent = payload(codec)
    open_payload(codec, SHAPE, 3, sent)
    for bit in range(8 * sent.size):
        sent[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PayloadError):
            open_payload(codec, SHAPE, 3, sent)
        sent[bit // 8] ^= 1 << bit % 8
    open_payload(codec, SHAPE, 3, sent)


def test_swapped_words_are_found() -> None:
    sent = payload()
    words = sent.view(np.uint32)
    assert words[8] != words[13]
    words[[8, 13]] = words[[13, 8]]
    with pytest.raises(PayloadError, match="checksum"):
        open_payload(CODEC, SHAPE, 3, sent)


@pytest.mark.parametrize("size", (-16, -4, -1, 1, 4, 16))
def test_truncated_and_padded_payloads(size: int) -> None:
    sent = payload()
    changed = sent[:size] if size < 0 else np.concatenate([sent, np.zeros(size, np.uint8)])
    with pytest.raises(PayloadError, match=f"size in bytes {sent.size}, got {sent.size + size}"):
        open_payload(CODEC, SHAPE, 3, changed)


@pytest.mark.parametrize("size", (0, 1, HEADER_BYTES - 1))
def test_less_than_a_header(size: int) -> None:
    with pytest.raises(PayloadError, match=f"at least 32 bytes, got {size}"):
        open_payload(CODEC, SHAPE, 3, payload()[:size])


@pytest.mark.parametrize(
    ("codec", "shape", "step", "field"),
    (
        (OneBit(64), SHAPE, 3, "codec 1, got 4"),
        (ECQ(4, "linf", 64), SHAPE, 3, "configuration hash"),
        (ECQ(4, "l2", 128), SHAPE, 3, "configuration hash"),
        (CODEC, (71,), 3, "element count 71, got 70"),
        (CODEC, (2, 3), 3, "element count 6, got 70"),
        (CODEC, SHAPE, 4, "step 4, got 3"),
    ),
    ids=str,
)
def test_what_differs_is_named(codec: Codec, shape: tuple[int, ...], step: int, field: str) -> None:
    with pytest.raises(PayloadError, match=f"payload: expected {field}"):
        open_payload(codec, shape, step, payload())


@pytest.mark.parametrize(
    ("offset", "field"), ((0, "magic"), (1, "magic"), (2, "format version"), (24, "checksum"))
)
def test_other_header_fields_are_named(offset: int, field: str) -> None:
    sent = payload()
    sent[offset] ^= 0x55
    with pytest.raises(PayloadError, match=f"expected {field} .*, got "):
        open_payload(CODEC, SHAPE, 3, sent)


def test_a_body_is_checked_even_where_the_header_is_right() -> None:
    sent = payload()
    sent[40] ^= 1
    with pytest.raises(PayloadError, match="checksum"):
        open_payload(CODEC, SHAPE, 3, sent)
    open_payload(CODEC, SHAPE, 3, sealed(sent))


def test_casts_do_not_pass_for_each_other() -> None:
    with pytest.raises(PayloadError, match="codec"):
        open_payload(FP16(), SHAPE, 3, payload(BF16()))


def test_the_step_is_stamped_modulo_32_bits() -> None:
    sent = payload(step=(9 << 32) + 1)
    open_payload(CODEC, SHAPE, (9 << 32) + 1, sent)
    assert read_header(sent).step == 1


def test_a_payload_error_is_a_value_error() -> None:
    assert issubclass(PayloadError, ValueError)
