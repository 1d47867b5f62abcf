"""The two-shot exchange's sizes, its noise, and what cannot take it."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_compress.codecs import Int8, NoiseKey, OneBit
from hvd_compress.codecs.base import HEADER_BYTES, Codec
from hvd_compress.codecs.registry import CODECS
from hvd_compress.exchanges import two_shot
from hvd_compress.exchanges.comm import Group
from hvd_compress.exchanges.shards import Shards, tells_of_a_failure
from tests.codecs.cases import encode


@pytest.mark.parametrize("codec", [make() for make in CODECS.values()], ids=str)
def test_traffic_does_not_grow_with_the_number_of_ranks(codec: Codec) -> None:
    count = 2**24
    whole = codec.payload_bytes((count,))
    for size in (2, 16, 256):
        sizes = Shards(count, size, 3).payload_bytes(codec)
        largest = max(sizes)
        # To the owners what is theirs, to all (the ring's share) what is one's own.
        sent = sum(sizes) - min(sizes) + (size - 1) * largest
        # One percent, or what each part's header and padding take where codes take less than that.
        assert sent <= 2 * (whole + max(1e-2 * whole, 64 * size)), size


def test_who_owns_nothing_gets_nothing() -> None:
    sizes = Shards(2000, 4).payload_bytes(OneBit())
    assert sizes == [0, OneBit().payload_bytes((1024,)), 0, OneBit().payload_bytes((976,))]


@pytest.mark.parametrize("size", (1, 2, 3, 8))
def test_every_message_has_noise_of_its_own(size: int) -> None:
    streams = [two_shot.first_stream(r, o, size) for r in range(size) for o in range(size)]
    streams += [two_shot.second_stream(o, size) for o in range(size)]
    assert len(set(streams)) == len(streams)


def test_streams_of_the_largest_job_fit_into_the_noise_key() -> None:
    size = two_shot.MAX_RANKS
    NoiseKey(rank=two_shot.first_stream(size - 1, size - 1, size))
    NoiseKey(rank=two_shot.second_stream(size - 1, size))
    with pytest.raises(ValueError, match=r"NoiseKey\.rank"):
        NoiseKey(rank=two_shot.second_stream(size, size + 1))


def test_messages_that_overflow_horovods_counters() -> None:
    two_shot.check("w", (2**30,), Int8(), 4, Group(0, 64))
    with pytest.raises(ValueError, match="w: expected at most 2147483647 bytes in one message"):
        two_shot.check("w", (2**31,), Int8(), 4, Group(0, 64))
    with pytest.raises(ValueError, match="w: expected at most 65535 ranks"):
        two_shot.check("w", (10,), OneBit(), 4, Group(0, 65536))


def test_no_payload_looks_like_a_failure() -> None:
    for codec in (make() for make in CODECS.values()):
        payload = encode(codec, (0,), np.zeros(0, np.float32))
        assert not tells_of_a_failure(payload[:HEADER_BYTES].tobytes())
    assert tells_of_a_failure(bytes(HEADER_BYTES))
