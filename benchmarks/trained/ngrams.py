"""Tables of byte n-grams, smoothed as by Witten and Bell (1991): what counting alone predicts."""

from __future__ import annotations

import numpy as np

from benchmarks.data.text import CLASSES

MOST = 6
"""The longest context: its bytes and the next one fit 64 bits."""


def bits(train: np.ndarray, test: np.ndarray, order: int) -> list[float]:
    """The mean bits a byte of test text, by counts of training text, for every order up to one.

    Args:
        train: pieces of text, shape=(n, bytes), uint8; no context reaches from one into the next.
        test: pieces of text, shape=(n, bytes), uint8; the first byte of each is context only.
        order: the most bytes of context, from 0 to :data:`MOST`; a piece's first bytes have fewer.

    Returns:
        The bits of orders 0 to ``order``.

    Raises:
        ValueError: the order is out of range.
    """
    if not 0 <= order <= MOST:
        raise ValueError(f"expected an order from 0 to {MOST}, got {order}")
    probability = np.full((len(test), test.shape[1] - 1), 1 / CLASSES)
    means = []
    for length in range(order + 1):
        seen, followed = _keys(train, length), _keys(test, length)
        contexts, of_context, kinds = _counts(*seen)
        # A context at a piece's start is as long as what lies before it.
        first = max(length, 1)
        known = probability[:, first - 1 :]
        context, pair = (keys.ravel() for keys in followed)
        at = np.minimum(np.searchsorted(contexts, context), len(contexts) - 1)
        found = contexts[at] == context
        total, different = of_context[at] * found, kinds[at] * found
        pairs, of_pair = np.unique(seen[1], return_counts=True)
        where = np.minimum(np.searchsorted(pairs, pair), len(pairs) - 1)
        count = of_pair[where] * (pairs[where] == pair)
        lower = known.ravel()
        mixed = (count + different * lower) / np.maximum(total + different, 1)
        known[:] = np.where(found, mixed, lower).reshape(known.shape)
        means.append(float(-np.log2(probability).mean()))
    return means


def _keys(text: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Each place's context, and the context with the next byte, as numbers; shape=(n, places)."""
    first = max(length, 1)  # The first byte of a piece is never predicted.
    places = text.shape[1] - first
    context = np.zeros((len(text), places), np.uint64)
    for back in range(length, 0, -1):
        start = first - back
        context = context << np.uint64(8) | text[:, start : start + places].astype(np.uint64)
    return context, context << np.uint64(8) | text[:, first:].astype(np.uint64)


def _counts(context: np.ndarray, pair: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The contexts, sorted, how often each occurs, and the number of different bytes after it."""
    contexts, total = np.unique(context, return_counts=True)
    _, different = np.unique(np.unique(pair) >> np.uint64(8), return_counts=True)
    return contexts, total, different
