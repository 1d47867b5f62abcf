"""Top-k on a device: elements that are alike, many payloads, and indices that no encoder writes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hvd_compress.codecs import NoiseKey, PayloadError, TopK
from hvd_compress.kernels.batch import Entry
from tests.codecs.cases import encode, normal
from tests.codecs.rows import Row
from tests.codecs.test_topk import altered_entries, with_checksum
from tests.cuda.executors import Checked
from tests.kernels.arrays import Guarded
from tests.kernels.parity import EVERY_MODE, OFF, reference_encode


@pytest.mark.parametrize("bits", (1, 3, 32))
@pytest.mark.parametrize(("chunk", "keep"), ((64, 7), (4096, 300), (12_288, 4000)))
def test_of_equal_magnitudes_the_first_are_sent(
    kernels: Checked, chunk: int, keep: int, bits: int
) -> None:
    """Also in chunks that are read in tiles; zeros are never sent."""
    row, shape = Row("topk", TopK(chunk, keep, bits), 0, OFF), (30_000,)
    for values in ((-1.0, 1.0), (0.0, -0.0, 2.0, 1.0, -1.0), (0.0,) * 99 + (3.0,), (0.0,)):
        x = np.random.default_rng(bits).choice(np.float32(values), shape)
        gradient, residual = torch.from_numpy(x), np.zeros(shape, np.float32)
        for feedback in EVERY_MODE:
            want = reference_encode(row, shape, gradient, feedback, residual, NoiseKey())
            kernels.parity.encode(row, shape, gradient, feedback, residual, NoiseKey(), want)


@pytest.mark.parametrize("ranks", (40, 600))
@pytest.mark.parametrize("codec", (TopK(64, 5, 3), TopK(8192, 900, 32)), ids=str)
def test_sums_of_many_payloads(kernels: Checked, codec: TopK, ranks: int) -> None:
    """More than are read at a time, and so many that tiles are smaller."""
    row, shape = Row("topk", codec, 0, OFF), (9001,)
    own = [encode(codec, shape, normal(shape, seed=seed)) for seed in range(3)]
    sent = [own[rank % 3] for rank in range(ranks)]
    kernels.parity.decode(row, shape, sent, torch.zeros(shape), scale=0.25)


def check_refusal(kernels: Checked, codec: TopK, payloads: np.ndarray, count: int) -> None:
    """Refuses rank 1's payload: the result is NaN, and nothing beside it changes."""
    out = Guarded(torch.full((count,), 7.0), 4, kernels.device)
    given = torch.from_numpy(payloads).to(kernels.device)
    batch = kernels.batch([Entry(codec, (count,))])
    with pytest.raises(PayloadError, match="rank 1's payload: expected the list of indices"):
        batch.decode_sum([out.array], [0], given)
    assert bool(out.array.isnan().all()) and out.intact()
    batch.decode_sum([out.array], [0], given[:1])
    assert bool(out.array.isfinite().all())


@pytest.mark.parametrize(
    "index", (63, 2, 5, 0), ids=("outside", "descending", "repeated", "unused")
)
def test_indices_that_no_encoder_writes(kernels: Checked, index: int) -> None:
    codec, shape, payload = altered_entries(index)
    good = encode(codec, shape, np.arange(62, 0, -1).astype(np.float32))
    check_refusal(kernels, codec, np.stack([good, payload, good, payload]), shape[0])


@pytest.mark.parametrize("entry", (0, 31, 32, 671, 672, 1343, 65_534, 65_535))
def test_an_index_that_no_encoder_writes_among_many(kernels: Checked, entry: int) -> None:
    """In a chunk whose entries are read 672 at a time; the first has to follow the last one before."""
    codec, shape = TopK(65_536, 65_536, 32), (65_536,)
    good = encode(codec, shape, normal(shape))
    bad = good.copy()
    begin = 32 + codec.layout(shape).codes_offset + 6 * entry
    bad[begin : begin + 2].view("<u2")[:] = entry + 1 if entry < 65_535 else 0
    check_refusal(kernels, codec, np.stack([good, with_checksum(bad)]), shape[0])
