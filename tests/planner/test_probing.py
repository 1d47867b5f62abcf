"""One rank's burst of measurements: what is run, and how much it sends."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from hvd_compress.codecs import ECQ, FP16, ErrorFeedback, LevelCodec, OneBit
from hvd_compress.codecs.lengths import normal_bits
from hvd_compress.kernels.batch import Entry
from hvd_compress.kernels.cpu_batch import CpuBatch
from hvd_compress.planner.measured import KINDS
from hvd_compress.planner.probing import BARRIER, SMALL, SMALL_BYTES, Prober

CODING = (FP16(), ErrorFeedback(alpha=0.0))


class _Batch:
    """Work that takes no time, and is noted."""

    def __init__(self, runs: list[str], codec, shape, feedback) -> None:
        self.runs, self.feedback = runs, feedback
        self.shape, self.size = shape, codec.payload_bytes(shape)

    def encode(self, values, residuals, next_residuals, steps, message) -> None:
        self.runs.append(f"encode {self.shape}")
        assert values[0].size == np.prod(self.shape) and message.size == self.size
        assert (residuals[0] is None) == (not self.feedback.enabled)
        assert next_residuals[0] is residuals[0]

    def decode_sum(self, values, steps, rows) -> None:
        self.runs.append("decode")
        assert rows.shape == (1, self.size) and values[0].size == np.prod(self.shape)


def _prober(size: int, largest: int) -> Prober:
    """Collectives that take no time, and whose names are noted, as encoders and decoders are."""
    runs: list[str] = []
    made = Prober(
        size,
        [largest],
        array=lambda count, dtype: np.ones(count, dtype),
        batch=partial(_Batch, runs),
        collective=lambda kind, message, name: runs.append(f"{kind} {message.nbytes} {name}"),
    )
    made.runs = runs  # type: ignore[attr-defined]
    return made


def test_a_burst_is_a_barrier_links_and_codecs():
    prober = _prober(3, 10_000)
    numbers = prober.measure(KINDS, [CODING])
    collectives = [f"{kind.split()[0]} {prober.message_bytes(kind)} probe {kind}" for kind in KINDS]
    small = [f"all_reduce {SMALL_BYTES} {what}" for what in (BARRIER, SMALL)]
    assert prober.runs == [
        *small,
        *collectives,
        *[f"encode {(prober.elements,)}"] * 2,
        *["decode"] * 2,
    ]
    assert len(numbers) == 1 + len(KINDS) + 3 + 1
    bits = numbers.pop(-2)
    assert all(number >= 0 for number in numbers) and sum(numbers[:-1]) <= numbers[-1] and not bits

    prober.runs.clear()
    assert len(prober.measure(KINDS[:1], [])) == 3
    assert prober.runs == [*small, collectives[0]]


def _bits(codec: LevelCodec, **options: Any) -> float:
    """Returns the bits of an element's code, as a prober counts them."""
    random = np.random.default_rng(0)
    prober = Prober(
        2,
        [10**5],
        array=lambda count, dtype: random.standard_normal(count).astype(dtype),
        batch=lambda *tensor: CpuBatch([Entry(*tensor)]),
        collective=lambda kind, message, name: None,
        **options,
    )
    *_, encode, decode, bits, _ = prober.measure(KINDS[:1], [(codec, ErrorFeedback(0.0))])
    assert encode and decode
    return bits


def test_bits_are_those_of_the_payload_that_was_encoded():
    codec = ECQ(4, "l2", coding="entropy")
    assert _bits(codec) == pytest.approx(normal_bits(codec, 10**5), rel=0.03)


def test_messages_have_the_same_bytes_on_the_wire():
    for ranks in (2, 3, 7):
        prober = _prober(ranks, 10**6)
        allreduce, gather, alltoall = (
            prober.message_bytes(kind) for kind in ("all_reduce", "all_gather", "all_to_all")
        )
        assert 2 * (ranks - 1) / ranks * allreduce == prober.sent
        assert (ranks - 1) * gather == prober.sent
        assert (ranks - 1) * alltoall == ranks * prober.sent
        assert gather % 16 == allreduce // ranks % 16 == 0
        assert prober.message_bytes(BARRIER) == prober.message_bytes(SMALL) == SMALL_BYTES


def test_probes_are_no_larger_than_the_largest_gradient():
    assert _prober(2, 100).sent < _prober(2, 10**6).sent == _prober(2, 10**9).sent
    assert _prober(2, 1000).elements == 768 and _prober(2, 10**9).elements == 2**20


def test_codecs_are_measured_on_as_many_elements_as_one_bucket_has():
    """So that a model of small tensors does not pay the start of a call for each of them."""
    run = {"array": None, "batch": None, "collective": None}
    one, many = (Prober(2, counts, **run) for counts in ([8192], [8192] * 100))
    assert (one.elements, many.elements) == (8192, 819_200) and one.sent == many.sent
    assert Prober(2, [8192] * 1000, **run).elements == 2**20


def test_codecs_that_look_at_columns_get_a_matrix():
    prober = _prober(2, 10_000)
    prober.measure(KINDS[:1], [CODING, (OneBit(group="column"), ErrorFeedback())])
    shapes = {run for run in prober.runs if run.startswith("encode")}
    expected = (prober.elements,), (prober.elements // 256, 256)
    assert shapes == {f"encode {shape}" for shape in expected}
