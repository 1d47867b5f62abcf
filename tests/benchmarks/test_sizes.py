"""The bits per element of a whole model, headers and scales included."""

from __future__ import annotations

import math

import torch

from benchmarks.models.torch import build
from hvd_compress.codecs import Codec, ErrorFeedback, OneBit, Ternary
from hvd_compress.exchanges.routing import Route, Router


def _bits_per_encoded_element(codec: Codec) -> float:
    with torch.device("meta"):
        model = build("alexnet")
    router = Router(Route(codec, ErrorFeedback(alpha=0.0)))
    sizes = [
        (8 * codec.payload_bytes(tuple(p.shape)), math.prod(p.shape))
        for name, p in model.named_parameters()
        if not router.choose(name, tuple(p.shape), "float32").uncompressed
    ]
    assert sum(count for _, count in sizes) > 61_000_000
    return sum(bits for bits, _ in sizes) / sum(count for _, count in sizes)


def test_one_bit_on_alexnet() -> None:
    assert _bits_per_encoded_element(OneBit()) < 1.1


def test_ternary_on_alexnet() -> None:
    assert _bits_per_encoded_element(Ternary()) < 1.7
