"""Makes the worked bytes of the page on the payload format, from the NumPy reference.

Prints every block with its name. With --write FILE it puts them into the page instead: only blocks
that the page has already, and only when a person asks. The tests compare; they never write.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from pathlib import Path

import numpy as np

from hvd_compress.codecs import (
    ECQ,
    HEADER_BYTES,
    Codec,
    Int8,
    LevelCodec,
    NoiseKey,
    OneBit,
    Ternary,
    TopK,
)
from hvd_compress.codecs.base import round_up
from hvd_compress.codecs.noise import philox, uniform
from hvd_compress.codecs.packing import pack_planes, pack_trits
from hvd_compress.codecs.payload import assemble, checksum, payload_length
from hvd_compress.kernels.reference import dequantize, quantize

SHAPE = (7, 10)
NOISE = NoiseKey(seed=1, rank=0, tensor=0, step=3)
CODECS: dict[str, Codec] = {
    "onebit": OneBit(group=64),
    "int8": Int8(kind="dynamic", group=64),
    "ternary": Ternary(bucket=64, clip=2.5),
    "ecq": ECQ(levels=4, norm="l2", bucket=64),
    "topk": TopK(chunk=64, keep=8, bits=2),
    "entropy": ECQ(levels=4, norm="l2", bucket=64, coding="entropy"),
}


def tensor() -> np.ndarray:
    """The tensor of the examples, shape=(70,), dtype float32: exact in a few bits."""
    i = np.arange(70)
    return ((29 * i % 64 - 31) / 16).astype(np.float32)


def payload(name: str) -> np.ndarray:
    """The payload of :func:`tensor`, without error feedback."""
    scales, codes = quantize(CODECS[name], SHAPE, tensor(), NOISE)
    slot = assemble(CODECS[name], SHAPE, NOISE.step, scales, codes)
    return slot[: payload_length(slot, slot.size)]


def decoded(name: str) -> np.ndarray:
    """What a decoder makes of :func:`payload`."""
    return dequantize(CODECS[name], SHAPE, *quantize(CODECS[name], SHAPE, tensor(), NOISE))


def blocks() -> dict[str, str]:
    """The text of every block by its name on the page."""
    made = {"tensor": _tensor()}
    for name, codec in CODECS.items():
        made[f"{name}-payload"] = _dump(codec, payload(name))
        made[f"{name}-decoded"] = _ends(decoded(name))
        made[f"{name}-config"] = _config(codec)
    small = np.zeros(HEADER_BYTES, np.uint8)
    small[:24] = payload("onebit")[:24]
    made["checksum"] = _checksum(small)
    made["planes"] = _planes()
    made["trits"] = _trits()
    made["entries"] = _entries()
    made["noise"] = _noise()
    return made


def _tensor() -> str:
    rows = tensor().reshape(SHAPE)
    return "\n".join(" ".join(f"{value:7.4f}" for value in row) for row in rows)


def _ends(values: np.ndarray) -> str:
    # The first elements of the first group and all of the second, enough digits to be exact.
    return "\n".join(
        f"{start:2d} ... {start + 5:2d}: "
        + " ".join(f"{value:12.9f}" for value in values[start:][:6])
        for start in (0, 6, 64)
    )


def _dump(codec: Codec, data: np.ndarray) -> str:
    layout = codec.layout(SHAPE)
    scales = HEADER_BYTES + 4 * layout.scales
    codes = HEADER_BYTES + layout.codes_offset
    marks = {0: "header", HEADER_BYTES: "scales", scales: "padding"}
    if isinstance(codec, LevelCodec) and codec.varies:
        # One chunk, of one state.
        table = codes + 2 * codec.alphabet
        states = round_up(table, 4)
        marks |= {codes: "table", table: "padding", states: "state", states + 4: "words"}
    else:
        end = codes + (layout.blocks - 1) * layout.block_bytes + layout.last_bytes
        marks |= {codes: "codes", end: "padding"}
    edges = sorted({*marks, len(data)})
    lines = []
    for start, stop in itertools.pairwise(edges):
        name = marks[start]
        for row in range(start, stop, 16):
            text = data[row : min(row + 16, stop)].tobytes().hex(" ")
            lines.append(f"{row:3d}  {text:47s}  {name}".rstrip())
            name = ""
    return "\n".join(lines)


def _config(codec: Codec) -> str:
    text = json.dumps(codec.to_config(), sort_keys=True, separators=(",", ":"))
    return f"{text}\n{codec.config_hash():08x}"


def _checksum(data: np.ndarray) -> str:
    words = data.view("<u4")
    lines = [
        f"word {i}: {words[i]:08x} * {2 * i + 1:2d} = {int(words[i]) * (2 * i + 1):010x}"
        for i in range(6)
    ]
    total = checksum(data)
    stored = total.to_bytes(8, "little").hex(" ")
    return "\n".join([*lines, f"sum: {total:016x}, stored as {stored}"])


def _planes() -> str:
    codes = np.array([4, 1, 7, 8, 2, 0], np.uint8)
    packed = pack_planes(codes, 4)
    words = [
        f"plane {b}: {packed[8 * b : 8 * b + 8].tobytes().hex(' ')}  bits "
        + " ".join(str(c >> b & 1) for c in codes)
        for b in range(4)
    ]
    return "\n".join([f"codes:   {' '.join(map(str, codes))}", *words])


def _trits() -> str:
    digits = (np.arange(23) * 2 % 3).astype(np.uint8)
    packed = pack_trits(digits)
    size = packed.size
    padded = np.zeros(5 * size, np.uint8)
    padded[:23] = digits
    lines = [f"digits:  {' '.join(map(str, digits))}"]
    for j, byte in enumerate(packed):
        mine = padded[j::size]
        terms = " + ".join(f"{3**k}*{d}" for k, d in enumerate(mine))
        lines.append(f"byte {j}:  {terms} = {byte:3d} = {byte:02x}")
    return "\n".join(lines)


def _entries() -> str:
    # The codec's own packing, of two of its entries.
    x = np.zeros(64, np.float32)
    x[[5, 62]] = -1.0, 2.0
    _, packed = TopK(chunk=64, keep=2, bits=2).quantize(x, x.shape, NOISE)
    return f"indices: 5 62\ncodes:   2 1\nbytes:   {packed.tobytes().hex(' ')}"


def _noise() -> str:
    counter = np.array([[5], [0], [3], [0]], np.uint32)
    words = philox(counter, (1, 0))[:, 0]
    numbers = uniform(64, NOISE)[[5, 21, 37, 53]]
    return "\n".join(
        [
            "counter 5 0 3 0, key 1 0",
            "words    " + " ".join(f"{w:08x}" for w in words),
            "elements 5 21 37 53",
            "numbers  " + " ".join(f"{int(n):08x}" for n in numbers),
        ]
    )


def blocks_on(page: str) -> dict[str, str]:
    """The named blocks of the page's text."""
    pattern = r"```\{code-block\} text\n:name: ([\w-]+)\n\n(.*?)\n```"
    return dict(re.findall(pattern, page, flags=re.DOTALL))


def _write(path: Path) -> None:
    page = path.read_text()
    for name, text in blocks().items():
        pattern = rf"(```\{{code-block\}} text\n:name: {name}\n\n).*?(```)"
        page = re.sub(pattern, lambda m, t=text: f"{m[1]}{t}\n{m[2]}", page, flags=re.DOTALL)
    path.write_text(page)


def main() -> None:
    """Prints the blocks, or writes them into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.write:
        _write(args.write)
        return
    for name, text in blocks().items():
        print(f"--- {name}\n{text}\n")


if __name__ == "__main__":
    main()
