"""The contract of the counters."""

from __future__ import annotations

import math

import numpy as np

from hvd_compress.codecs import Int8, LevelCodec, OneBit
from hvd_compress.exchanges import integer_sum
from hvd_compress.exchanges.routing import Route
from hvd_compress.exchanges.shards import Shards
from hvd_compress.planner.cost import wire_bytes
from hvd_compress.planner.machines import Cluster, Link
from tests.contract.beside import Beside
from tests.contract.cases import FULL, SHAPES, USUAL, Row
from tests.contract.frontend import Frontend


def counters_follow_the_formulas(frontend: Frontend, exchange: str) -> None:
    """Counters agree with docs/exchanges.md and, on average over the ranks, with the performance model."""
    rows: list[Row] = [USUAL[exchange]]
    if exchange == "hierarchical":
        rows.append((OneBit(), FULL, Int8()))
    encodes = USUAL[exchange][0].encodes
    chosen = {name: shape for name, shape in SHAPES.items() if encodes(shape)}
    for row in rows:
        _check(Beside(frontend, exchange, row, shapes=chosen, **frontend.one_bucket), exchange)


def _check(beside: Beside, exchange: str) -> None:
    frontend, chosen = beside.frontend, beside.shapes
    beside.steps(0, 1)
    size, local, rank, codec = frontend.size, frontend.local, frontend.rank, beside.codec
    shapes, count = chosen.values(), len(chosen)
    elements = encoded = sum(map(math.prod, shapes))
    flags = math.ceil(frontend.flag_bytes * count / 16) * 16
    padding = within = 0.0
    if exchange == "allgather":
        message = sum(map(codec.payload_bytes, shapes)) + flags
        wire, padding = (size - 1) * message, (size - 1) * flags
    elif exchange == "integer_sum":
        assert isinstance(codec, LevelCodec)
        bits, ring = integer_sum.bits_of(codec, size), 2 * (size - 1) / size
        levels = sum(4 * (codec.layout(s).scales + codec.level_words(s, bits)) for s in shapes)
        beside_levels = 4 * (count + integer_sum.EXTRA_WORDS)  # The flags come first.
        message = levels + beside_levels
        wire, padding = ring * message, ring * beside_levels
    elif exchange == "low_rank":
        numbers = count + 1  # The flags, and the number of senders.
        message = 4 * numbers + sum(map(codec.payload_bytes, shapes))
        ring = 2 * (size - 1) / size
        wire, padding = ring * message, ring * 4 * numbers
    else:
        owners = size if exchange == "two_shot" else local
        parts = [Shards(math.prod(shape), owners, i) for i, shape in enumerate(shapes)]
        sizes = [sum(one.payload_bytes(codec)[o] for one in parts) for o in range(owners)]
        own = (max(sizes) if frontend.alike else sizes[rank % owners]) + flags
        mean = own if frontend.alike else sum(sizes) / owners
        if exchange == "two_shot":
            message = sum(sizes) + own
            wire = sum(sizes) - sizes[rank] + (size - 1) * own
            padding = (size - 1) * (mean - sum(sizes) / size)
        else:
            hosts = size // local
            encoded = sum(one.length(rank % local) for one in parts)
            sent, kept = 4 * elements, 4 * encoded
            if beside.inner is not None:
                inner = [one.payload_bytes(beside.inner) for one in parts]
                sent, kept = sum(map(sum, inner)), sum(one[rank % local] for one in inner)
                encoded = elements
            within = sent - kept + (local - 1) * hosts * own
            message = sent + own + hosts * own
            wire = within + (hosts - 1) * own
            padding = (hosts - 1 + (local - 1) * hosts) * (mean - sum(sizes) / owners)
    tokens = frontend.token_bytes * count
    wire_of_tokens = 2 * (size - 1) / size * tokens
    counters = beside.job.counters
    assert counters.steps == 2
    assert counters.encoded_elements == 2 * encoded
    assert counters.uncompressed_bytes == 2 * 4 * elements
    assert counters.message_bytes == 2 * (message + tokens)
    assert counters.local_bytes == 2 * within
    assert math.isclose(counters.wire_bytes, 2 * (wire + wire_of_tokens))
    assert counters.encode_seconds > 0 and counters.decode_seconds > 0
    route, cluster = (
        Route(codec, beside.feedback, exchange, beside.inner),
        Cluster(size // local, local, Link(1e8)),
    )
    predicted = sum(wire_bytes(shape, route, cluster) for shape in shapes)
    everybodys = frontend.gather(counters.wire_bytes)
    assert math.isclose(sum(everybodys) / size, 2 * (predicted + padding + wire_of_tokens))
    squares = [np.sum(h.astype(float) ** 2) for kept in beside.job.kept() for h in kept.values()]
    assert math.isclose(beside.job.compressor.residual_norm(), sum(squares) ** 0.5, rel_tol=1e-6)
    beside.job.compressor.reset_counters()
    assert beside.job.counters.steps == beside.job.counters.message_bytes == 0
