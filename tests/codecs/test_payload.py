"""The payload's header and what it detects."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from hvd_compress.codecs import (
    BF16,
    ECQ,
    HEADER_BYTES,
    Codec,
    NoiseKey,
    OneBit,
    PayloadError,
    Ternary,
    payload_length,
    read_header,
)
from hvd_compress.codecs.packing import pack_planes
from hvd_compress.codecs.payload import assemble, checksum, open_payload
from tests.codecs.cases import encode, normal

SHAPE = (70,)
CODEC = ECQ(4, "l2", 64)
ENTROPY = (ECQ(4, "l2", 64, "entropy"), ECQ(4, "linf", 64, "entropy"))


def payload(codec: Codec = CODEC, step: int = 3) -> np.ndarray:
    return encode(codec, SHAPE, normal(SHAPE), noise=NoiseKey(step=step))


def sealed(changed: np.ndarray) -> np.ndarray:
    """The same bytes under a checksum that fits them."""
    changed[24:32] = np.frombuffer(struct.pack("<Q", checksum(changed)), np.uint8)
    return changed


def sealed_front(changed: np.ndarray) -> np.ndarray:
    """The same for a payload that is shorter than its capacity."""
    sealed(changed[: payload_length(changed, changed.size)])
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


@pytest.mark.parametrize("codec", ENTROPY, ids=str)
def test_every_flipped_bit_of_an_entropy_coded_payload_is_found(codec: Codec) -> None:
    """The test leaves out only the bits behind the payload's length, which no decoder reads."""
    sent = payload(codec)
    length = payload_length(sent, sent.size)
    assert 32 < length < sent.size and length % 16 == 0
    _, scales, codes = open_payload(codec, SHAPE, 3, sent)
    for bit in range(8 * length):
        sent[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PayloadError):
            open_payload(codec, SHAPE, 3, sent)
        sent[bit // 8] ^= 1 << bit % 8
    sent[length:] ^= 0xFF
    _, again, same = open_payload(codec, SHAPE, 3, sent)
    assert np.array_equal(scales, again) and np.array_equal(codes, same)


def flagged(flags: int) -> np.ndarray:
    """A payload with other flags, under a checksum that fits what they say."""
    sent = payload(ENTROPY[0])
    sent[16:20] = np.frombuffer(struct.pack("<I", flags), np.uint8)
    sealed(sent[: max(32, min(sent.size, flags >> 4 << 4))])
    return sent


@pytest.mark.parametrize("units", (0, 1, 8, 2**28 - 1))
def test_lengths_that_no_payload_can_have(units: int) -> None:
    sent = flagged(units << 4 | 2)
    for header in (sent, sent.tobytes(), sent[:HEADER_BYTES].tobytes()):
        with pytest.raises(PayloadError, match=f"from 32 to {sent.size} bytes, got {16 * units}"):
            payload_length(header, sent.size)
    with pytest.raises(PayloadError, match="expected a length"):
        open_payload(ENTROPY[0], SHAPE, 3, sent)


def test_the_length_of_a_plain_payload_is_its_capacity() -> None:
    assert payload_length(payload(), 112) == 112
    # Random codes of all levels alike, which no entropy code makes shorter.
    codes = pack_planes(np.arange(70, dtype=np.uint8) % 15, 4)
    codec = ECQ(7, "linf", 64, "entropy")
    sent = assemble(codec, SHAPE, 3, np.ones(2, np.float32), codes)
    assert read_header(sent).flags == 0 and payload_length(sent, sent.size) == sent.size == 112
    assert np.array_equal(open_payload(codec, SHAPE, 3, sent)[2], codes)


@pytest.mark.parametrize("units", (2, 3, 4))
def test_a_payload_that_ends_before_its_chunks(units: int) -> None:
    with pytest.raises(PayloadError, match=r"table and index|chunk 0"):
        open_payload(ENTROPY[0], SHAPE, 3, flagged(units << 4 | 2))


def test_a_table_with_another_sum() -> None:
    sent = payload(ENTROPY[0])
    sent[48] += 1
    with pytest.raises(PayloadError, match="frequencies with the sum 16384, got 16385"):
        open_payload(ENTROPY[0], SHAPE, 3, sealed_front(sent))


def test_chunks_that_do_not_fit() -> None:
    codec, shape = ENTROPY[0], (140_001,)
    sent = encode(codec, shape, normal(shape), noise=NoiseKey(step=3))
    _, _, codes = open_payload(codec, shape, 3, sent)
    index = sent[32 + codec.layout(shape).codes_offset + 20 :][:8].view("<u4")
    first, second = index.tolist()
    for broken in ((15, second), (second, first), (first, 2**32 - 1), (first, first + 15)):
        index[:] = broken
        with pytest.raises(PayloadError, match=r"expected chunk \d to have at least"):
            open_payload(codec, shape, 3, sealed_front(sent))
    # Chunks that begin elsewhere decode to something else.
    index[:] = (16, second)
    assert not np.array_equal(open_payload(codec, shape, 3, sealed_front(sent))[2], codes)
    index[:] = (first, second)
    assert np.array_equal(open_payload(codec, shape, 3, sealed_front(sent))[2], codes)


def test_an_empty_tensor_is_never_entropy_coded() -> None:
    sent = encode(ENTROPY[0], (0,), np.empty(0, np.float32), noise=NoiseKey(step=3))
    assert sent.size == 32 and read_header(sent).flags == 0
    sent[16] = 2 | 2 << 4
    with pytest.raises(PayloadError, match="no entropy-coded codes of an empty tensor"):
        open_payload(ENTROPY[0], (0,), 3, sealed(sent))


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


def test_the_step_is_stamped_modulo_32_bits() -> None:
    sent = payload(step=(9 << 32) + 1)
    open_payload(CODEC, SHAPE, (9 << 32) + 1, sent)
    assert read_header(sent).step == 1
