"""An entropy coder for codes: interleaved range asymmetric numeral systems (rANS) with a static table.

Sources: Duda, "Asymmetric numeral systems", 2013, arXiv:1311.2540; for several states that take turns and
share one run of words, Giesen, "Interleaved entropy coders", 2014, arXiv:1402.3392. ``docs/format.md``,
"Entropy-coded codes", defines the bytes.
"""

from __future__ import annotations

import numpy as np

from hvd_compress.codecs.base import PayloadLayout, round_up

PRECISION = 14
"""The precision of frequencies, which are in units of ``2**-PRECISION``."""

TOTAL = 1 << PRECISION
LOWER = 1 << 16
"""The smallest state: when its state falls below this, a decoder reads a word of 16 bits."""

CHUNK = 65536
"""The largest number of elements in a chunk, which consists of whole blocks coded independently."""

MAX_LANES = 16
ELEMENTS_PER_LANE = 1024
"""The fewest elements per lane of a chunk with several lanes, as a state costs two bytes or more."""


class StreamError(ValueError):
    """Bytes that no encoder can have written, with an impossible table or index."""


def frequencies(counts: np.ndarray) -> np.ndarray:
    """Each code's share of ``TOTAL``, from the number of times that it occurs, not all 0; shape=(codes,).

    Returns:
        dtype int64, with the sum ``TOTAL``: 0 for a code that does not occur, otherwise 1 plus a share of
        the rest, rounded down. The first of the most frequent codes also gets the remainder.
    """
    counts = counts.astype(np.int64)
    present = counts > 0
    rest = TOTAL - int(present.sum())
    shares = present + counts * rest // int(counts.sum())
    shares[np.argmax(counts)] += TOTAL - int(shares.sum())
    return shares


def lanes_of(count: int) -> int:
    """The number of states of a chunk with ``count`` elements, a power of two."""
    lanes = 1
    while lanes < MAX_LANES and count >= 2 * lanes * ELEMENTS_PER_LANE:
        lanes *= 2
    return lanes


def chunk_lengths(layout: PayloadLayout) -> list[int]:
    """The number of elements in each chunk."""
    size = max(1, CHUNK // layout.block) * layout.block
    return [min(size, layout.count - start) for start in range(0, layout.count, size)]


def fixed_bytes(layout: PayloadLayout, alphabet: int) -> int:
    """The bytes of the table, the index and the states, less the states' part that holds codes."""
    lengths = chunk_lengths(layout)
    states = 4 * sum(map(lanes_of, lengths))
    return _head_bytes(alphabet) + 4 * (len(lengths) - 1) + states // 2


def encode(symbols: np.ndarray, layout: PayloadLayout, alphabet: int) -> np.ndarray:
    """Encodes codes as a table, an index and chunks.

    Args:
        symbols: the codes, each below ``alphabet``, not empty; shape=(layout.count,), dtype uint8.
        layout: the layout of the plain payload.
        alphabet: the number of different codes, at most 256.

    Returns:
        shape=(bytes,), dtype uint8; the number of bytes is a multiple of 4.
    """
    table = frequencies(np.bincount(symbols, minlength=alphabet))
    values, begin, chunks = symbols.tolist(), 0, []
    for length in chunk_lengths(layout):
        chunks.append(_encode_chunk(values[begin : begin + length], table))
        begin += length
    begins = np.cumsum([len(chunk) // 4 for chunk in chunks])[:-1]
    head = table.astype("<u2").tobytes()
    head += bytes(_head_bytes(alphabet) - len(head)) + begins.astype("<u4").tobytes()
    return np.frombuffer(head + b"".join(chunks), np.uint8)


def decode(coded: np.ndarray, layout: PayloadLayout, alphabet: int) -> np.ndarray:
    """The inverse of :func:`encode`; bytes behind the last chunk are ignored.

    Args:
        coded: the encoded bytes, a multiple of 4; shape=(bytes,), dtype uint8.
        layout: the layout of the plain payload, not empty.
        alphabet: the number of different codes.

    Returns:
        shape=(layout.count,), dtype uint8.

    Raises:
        StreamError: frequencies with another sum than ``TOTAL``, or chunks that do not fit.
    """
    lengths = chunk_lengths(layout)
    index = _head_bytes(alphabet)
    first = index + 4 * (len(lengths) - 1)
    if coded.size < first:
        raise StreamError(f"expected at least {first} bytes of table and index, got {coded.size}")
    table = coded[: 2 * alphabet].view("<u2").astype(np.int64)
    if table.sum() != TOTAL:
        raise StreamError(f"expected frequencies with the sum {TOTAL}, got {table.sum()}")
    behind = coded[index:first].view("<u4").astype(np.int64)
    edges = [0, *behind.tolist(), (coded.size - first) // 4]
    parts = []
    for number, length in enumerate(lengths):
        begin, end = edges[number : number + 2]
        if begin + lanes_of(length) > end or end > edges[-1]:
            raise StreamError(
                f"expected chunk {number} to have at least {4 * lanes_of(length)} bytes, "
                f"up to byte {4 * edges[-1]}, got bytes {4 * begin} to {4 * end}"
            )
        parts.append(_decode_chunk(coded[first + 4 * begin : first + 4 * end], table, length))
    return np.concatenate(parts)


def _head_bytes(alphabet: int) -> int:
    return round_up(2 * alphabet, 4)


def _starts(table: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(table)[:-1]])


def _encode_chunk(symbols: list[int], table: np.ndarray) -> bytes:
    """Encodes from the last symbol to the first; writes the states, then the words in a decoder's order."""
    frequency, start = table.tolist(), _starts(table).tolist()
    lanes = lanes_of(len(symbols))
    states = [LOWER] * lanes
    words: list[int] = []
    for i in reversed(range(len(symbols))):
        f, x = frequency[symbols[i]], states[i % lanes]
        if x >> (32 - PRECISION) >= f:
            words.append(x & 0xFFFF)
            x >>= 16
        states[i % lanes] = (x // f << PRECISION) + x % f + start[symbols[i]]
    stream = np.array(states, "<u4").tobytes() + np.array(words[::-1], "<u2").tobytes()
    return stream + bytes(-len(stream) % 4)


def _decode_chunk(stream: np.ndarray, table: np.ndarray, count: int) -> np.ndarray:
    symbol_of = np.repeat(np.arange(table.size), table).tolist()
    frequency, start = table.tolist(), _starts(table).tolist()
    lanes = lanes_of(count)
    states = stream[: 4 * lanes].view("<u4").tolist()
    words = iter(stream[4 * lanes :].view("<u2").tolist())
    symbols = np.empty(count, np.uint8)
    for i in range(count):
        x = states[i % lanes]
        slot = x % TOTAL
        symbol = symbols[i] = symbol_of[slot]
        x = frequency[symbol] * (x >> PRECISION) + slot - start[symbol]
        if x < LOWER:
            x = x << 16 | next(words, 0)
        states[i % lanes] = x
    return symbols
