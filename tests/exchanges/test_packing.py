"""Packed messages, and the lengths that ranks agree on without asking."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_compress.codecs import HEADER_BYTES, Int8, PayloadError
from hvd_compress.codecs.payload import FLAG_CODED, MAGIC
from hvd_compress.exchanges import layout, packing
from hvd_compress.exchanges.packing import HEAD_BYTES, Head, Length

MEMBERS = [
    layout.Member(i, shape, Int8()) for i, shape in enumerate([(40, 60), (3000,), (), (0,), (700,)])
]


def _payload(size: int, length: int, generator: np.random.Generator) -> np.ndarray:
    """Bytes with as much of a header as packing reads; as many of them count as it says."""
    payload = generator.integers(0, 256, size, np.uint8)
    flags = 0 if length == size else FLAG_CODED | length // 16 << 4
    header = struct.pack("<HBBIQIIQ", MAGIC, 1, 4, 0, 0, flags, 0, 0)
    payload[:HEADER_BYTES] = np.frombuffer(header, np.uint8)
    return payload


def _message(found: layout.MessageLayout, seed: int) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """A message of payloads of any length, and where they stand."""
    generator = np.random.default_rng(seed)
    message = generator.integers(0, 256, found.size, np.uint8)
    ranges = []
    for piece in found.pieces:
        length = 16 * int(generator.integers(HEADER_BYTES // 16, piece.size // 16 + 1))
        message[piece.offset : piece.offset + piece.size] = _payload(piece.size, length, generator)
        ranges.append((piece.offset, piece.offset + length))
    return message, ranges


@given(st.integers(0, 2**32 - 1), st.integers(0, 20000))
def test_unpacking_brings_back_every_payload_and_the_flags(seed: int, least: int) -> None:
    found = layout.whole(MEMBERS, 0)
    message, ranges = _message(found, seed)
    places = packing.places(found)
    packed = places.pack(message, least, received=48)
    flags = found.size - found.flags
    needed = HEAD_BYTES + sum(end - begin for begin, end in ranges) + flags
    assert needed <= places.full
    assert len(packed) == max(needed, least) and not packed[needed:].any()
    assert Head.read(packed, places.full) == Head(needed, 48)
    unpacked = np.zeros(found.size, np.uint8)
    places.unpack(packed, unpacked)
    for begin, end in [*ranges, (found.flags, found.size)]:
        assert np.array_equal(unpacked[begin:end], message[begin:end])


@given(st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_sections_and_owners_are_messages_of_their_own(seed: int, size: int) -> None:
    owners = layout.Owners(size, 0, size)
    parts, own = owners.sections(MEMBERS, lambda owner: owner), owners.message(MEMBERS, 0)
    every = owners.gathered(MEMBERS, own.size)
    for found, split in (
        (parts, packing.places_by_section(parts)),
        (every, packing.places_by_owner(every, own)),
    ):
        message, ranges = _message(found, seed)
        unpacked, begin = np.zeros(found.size, np.uint8), 0
        for places in split:
            end = begin + places.size
            if places.size:
                packed = places.pack(message[begin:end], 0)
                places.unpack(packed, unpacked[begin:end])
            begin = end
        assert begin == found.size
        for begin, end in ranges:
            assert np.array_equal(unpacked[begin:end], message[begin:end])


def test_a_rank_that_failed_is_seen_by_who_decodes() -> None:
    places = packing.places(layout.whole(MEMBERS, 0))
    assert Head.read(np.zeros(64, np.uint8), places.full) == Head(0)
    unpacked = np.ones(places.size, np.uint8)
    places.unpack(np.zeros(places.full, np.uint8), unpacked)
    assert not unpacked.any()


@given(st.binary(min_size=1, max_size=6000), st.integers(0, 6000), st.integers(0, 2**32 - 1))
def test_altered_bytes_stay_within_the_message(noise: bytes, at: int, seed: int) -> None:
    found = layout.whole(MEMBERS, 0)
    message, _ = _message(found, seed)
    places = packing.places(found)
    packed = places.pack(message, 6000 + len(noise))
    packed[at : at + len(noise)] = np.frombuffer(noise, np.uint8)
    around = np.full(found.size + 64, 7, np.uint8)
    places.unpack(packed, around[32:-32])
    assert (around[:32] == 7).all() and (around[-32:] == 7).all()


@given(st.integers(0, HEAD_BYTES - 1), st.integers(1, 255), st.integers(1, 2**20))
def test_an_altered_head_is_an_error(byte: int, change: int, units: int) -> None:
    for head in (Head(16 * units), Head(16 * units, 32), Head(0, 48, waiting=True)):
        written = bytearray(head.to_bytes())
        assert Head.read(np.frombuffer(written, np.uint8), 2**24) == head
        written[byte] ^= change
        with pytest.raises(PayloadError, match="expected a head with a valid check"):
            Head.read(np.frombuffer(written, np.uint8), 2**24)
    with pytest.raises(PayloadError, match=f"at most {16 * units - 16} bytes"):
        Head.read(np.frombuffer(Head(16 * units).to_bytes(), np.uint8), 16 * units - 16)


@given(st.lists(st.integers(0, 5000), max_size=60))
def test_lengths_hold_what_was_needed_lately_and_little_more(units: list[int]) -> None:
    full = 16 * 5000
    length = Length(full)
    assert length.bytes == full
    for step, needed in enumerate(units):
        length.see(16 * needed)
        lately = [16 * unit for unit in units[: step + 1] if unit][-16:]
        if lately:
            largest = max(lately)
            assert length.bytes % 16 == 0 and largest <= length.bytes <= full
            assert length.bytes <= largest + largest // 16 + max(15, largest // 7)
        else:
            assert length.bytes == full


def test_classes() -> None:
    assert [packing.class_of(n) for n in (1, 16, 17, 512, 513, 1000, 1025)] == [
        16, 16, 32, 512, 544, 1024, 1088
    ]  # fmt: skip
    assert all(packing.class_of(n) == packing.class_of(packing.class_of(n)) for n in range(1, 5000))


def test_what_ranks_compare() -> None:
    def known(*needed: int, name: str = "all") -> str:
        length = Length(4096)
        for one in needed:
            length.see(one)
        return packing.describe({("bucket",): {name: length}})

    assert known() == packing.describe({}) == "none" == known(64, name="cross")
    assert known(64) == known(64) != known(80)
    assert known(64, 80) != known(80, 64)
