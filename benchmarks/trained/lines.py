"""The losses of tables of n-grams, and of programs that compress, on the text of the model."""

from __future__ import annotations

import gzip
import lzma
from typing import Any

import numpy as np

from benchmarks.data import batches
from benchmarks.data.samples import Samples
from benchmarks.trained import ngrams
from benchmarks.trained.training import Recipe, load

ORDERS = (1, 2, 3, 4)
_PARTS = 4
"""The tables are counted after as many parts of the training."""


def lines(recipe: Recipe, seed: int) -> dict[str, Any]:
    """Bits a byte of all test text.

    Returns:
        ``"tables"``: for each part of the training, the bytes of training text so far, each window
        counted once, and the bits of each order's table of them; ``"programs"``: the bits of each program,
        for the test text alone or behind the training text.
    """
    data = load(recipe.context, recipe.data)
    assert data.test is not None
    train, test = data.train, data.test
    order = batches.epoch(len(train.labels), recipe.batch, seed=seed, epoch=0)
    tables = []
    for part in range(1, _PARTS + 1):
        steps = min(recipe.steps * part // _PARTS, len(order))
        seen = _pieces(train, np.concatenate(order[:steps]))
        bits = ngrams.bits(seen, _pieces(test), max(ORDERS))
        tables.append(
            {
                "bytes": steps * recipe.batch * recipe.context,
                "bits": {str(n): bits[n] for n in ORDERS},
            }
        )
    return {"tables": tables, "programs": _programs(train, test)}


def _programs(train: Samples, test: Samples) -> dict[str, float]:
    before, own = (one.load(np.arange(len(one.labels))).astype(np.uint8) for one in (train, test))
    text, both = own.tobytes(), before.tobytes() + own.tobytes()

    def xz(content: bytes) -> int:
        return len(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))

    sizes = {
        "gzip -9": len(gzip.compress(text, 9)),
        "xz -9e": xz(text),
        "xz -9e behind the training text": xz(both) - xz(before.tobytes()),
    }
    return {name: 8 * size / len(text) for name, size in sizes.items()}


def _pieces(samples: Samples, rows: np.ndarray | None = None) -> np.ndarray:
    """Windows, each with the byte that follows it, shape=(n, context + 1), uint8."""
    chosen = np.arange(len(samples.labels)) if rows is None else rows
    inputs = samples.load(chosen).astype(np.uint8)
    return np.concatenate([inputs, samples.labels[chosen][:, -1:].astype(np.uint8)], axis=1)
