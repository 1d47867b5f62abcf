"""The page on the payload format says what the reference does."""

from __future__ import annotations

import importlib.util
import math
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from hvd_compress.codecs import (
    BF16,
    CODECS,
    ECQ,
    FP16,
    HEADER_BYTES,
    Codec,
    Int8,
    LevelCodec,
    NoiseKey,
    OneBit,
    Ternary,
    TopK,
)
from hvd_compress.codecs.base import as_matrix
from hvd_compress.codecs.int8 import magnitudes
from hvd_compress.codecs.noise import uniform
from hvd_compress.codecs.packing import pack_planes, pack_trits
from hvd_compress.codecs.payload import (
    assemble,
    checksum,
    payload_length,
    read_header,
)
from hvd_compress.codecs.rotation import rotate_back
from hvd_compress.kernels.batch import Entry
from hvd_compress.kernels.cpu_batch import CpuBatch
from hvd_compress.kernels.reference import ReferenceBatch

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGE = (DOCS / "format.md").read_text()


def _examples() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "format_examples", DOCS / "examples" / "format_examples.py"
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


EXAMPLES = _examples()
MADE: dict[str, str] = EXAMPLES.blocks()
SHOWN: dict[str, str] = EXAMPLES.blocks_on(PAGE)


@pytest.fixture(scope="module")
def snippets() -> dict[str, Any]:
    """The names that the page's Python defines, run in order."""
    names: dict[str, Any] = {}
    for source in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL):
        exec(source, names)
    return names


def test_every_block_is_on_the_page() -> None:
    assert SHOWN.keys() == MADE.keys()


@pytest.mark.parametrize("name", MADE)
def test_the_page_shows_the_reference_bytes(name: str) -> None:
    assert SHOWN[name] == MADE[name]


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
def test_codec_ids_and_settings(codec: type[Codec]) -> None:
    ids = re.search(r"\| codec id \| (.*?) \|", PAGE)
    assert ids and f"{codec.codec_id} {codec.name}" in ids[1].split(", ")
    settings = ", ".join(f"`{key}`" for key in sorted(codec().to_config()))
    row = next(
        line
        for line in PAGE.splitlines()
        if line.startswith("| ") and codec.name in line.split("|")[1] and f"| {settings} |" in line
    )
    assert row
    for key in codec.added:
        assert re.search(rf"\n\| {codec.name} \| `{key}` \| ", PAGE)


@pytest.mark.parametrize(
    "codec",
    [
        *(OneBit(), Int8(), Ternary(), Ternary(clip=None), ECQ(), ECQ(rotate=True)),
        *(FP16(), BF16(), BF16("stochastic")),
    ],
)
def test_configuration_hash(snippets: dict[str, Any], codec: Codec) -> None:
    assert snippets["configuration_hash"](codec.to_config()) == codec.config_hash()


@pytest.mark.parametrize("name", EXAMPLES.CODECS)
def test_checksum(snippets: dict[str, Any], name: str) -> None:
    payload = EXAMPLES.payload(name)
    assert snippets["checksum"](payload.tobytes()) == read_header(payload).checksum


@pytest.mark.parametrize("name", EXAMPLES.CODECS)
def test_flag_bits_without_a_meaning(name: str) -> None:
    codec, shape = EXAMPLES.CODECS[name], EXAMPLES.SHAPE
    scales, codes = codec.quantize(EXAMPLES.tensor(), shape, EXAMPLES.NOISE)
    sent = assemble(codec, shape, 3, scales, codes)
    size = payload_length(sent, sent.size)
    wanted = EXAMPLES.decoded(name)
    for bit in (2, 3) if name == "entropy" else range(1, 32):
        slot = sent.copy()
        slot.view("<u4")[4] |= 1 << bit
        slot[24:32] = np.frombuffer(checksum(slot[:size]).to_bytes(8, "little"), np.uint8)
        for make in (CpuBatch, ReferenceBatch):
            out = np.zeros(math.prod(shape), np.float32)
            make([Entry(codec, shape)]).decode_sum([out], [3], slot[None])
            assert np.array_equal(out, wanted), bit


@pytest.mark.parametrize("shape", [(), (3,), (0, 3), (3, 0), (4, 5, 6)])
def test_rows_and_columns(shape: tuple[int, ...]) -> None:
    rows = shape[0] if shape else 1
    columns = math.prod(shape[1:])
    assert as_matrix(shape) == (rows, columns)
    count = rows * columns
    for codec, groups in ((OneBit("row"), rows), (OneBit("column"), columns)):
        assert codec.layout(shape).scales == (2 * groups if count else 0)
        assert count or codec.payload_bytes(shape) == 32


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 2048, 2560, 2561, 100_003])
def test_payload_bytes(snippets: dict[str, Any], count: int) -> None:
    pad, size = snippets["pad"], snippets["payload_bytes"]

    def planes(bits: int) -> Any:
        return lambda m: 8 * bits * -(-m // 64)

    def trits(m: int) -> int:
        return 4 * -(-m // 20)

    groups = -(-count // 128)
    cases = {
        OneBit(128): (2 * groups, 128, planes(1)),
        OneBit("tensor"): (2, 2560, planes(1)),
        OneBit("row"): (2 * count, 2560, planes(1)),
        OneBit("column"): (2, 2560, planes(1)),
        Int8(group=128): (groups, 128, lambda m: m),
        Int8(group="tensor"): (1, 2560, lambda m: m),
        Ternary(bucket=128): (groups, 128, trits),
        Ternary(bucket="tensor"): (1, 2560, trits),
        ECQ(bucket=128): (groups, 128, planes(4)),
        ECQ(levels=31, bucket="tensor"): (1, 2560, planes(6)),
        TopK(128, 30, 3): (groups, 128, lambda m: 4 * -(-(-(-30 * m // 128) * (7 + 3)) // 32)),
        FP16(): (0, 2560, lambda m: 2 * m),
    }
    assert pad(17, 16) == 32
    for codec, layout in cases.items():
        assert size(count, *layout) == codec.payload_bytes((count,)), codec


@pytest.mark.parametrize("count", [1, 6, 64, 70, 200])
def test_packed_codes(snippets: dict[str, Any], count: int) -> None:
    random = np.random.default_rng(count)
    for bits in range(1, 9):
        codes = random.integers(0, 1 << bits, count).astype(np.uint8)
        packed = pack_planes(codes, bits).tobytes()
        assert snippets["unpack_planes"](packed, count, bits) == codes.tolist()
    for codec in (TopK(256, 20, 3), TopK(64, 64, 32)):
        x = random.normal(size=count).astype(np.float32)
        _, packed = codec.quantize(x, x.shape, NoiseKey())
        length = min(count, codec.chunk)
        kept = codec.kept(length)
        used = codec.layout((length,)).last_bytes
        index_bits = (codec.chunk - 1).bit_length()
        indices, codes = snippets["unpack_entries"](
            packed[:used].tobytes(), kept, index_bits, codec.bits
        )
        largest = np.argsort(-np.abs(x[:length]), kind="stable")[:kept]
        assert indices == sorted(largest.tolist())
        assert [code >> (codec.bits - 1) for code in codes] == np.signbit(x[indices]).tolist()
    digits = random.integers(0, 3, count).astype(np.uint8)
    assert snippets["unpack_trits"](pack_trits(digits).tobytes(), count) == digits.tolist()


@pytest.mark.parametrize(
    ("codec", "shape"),
    (
        (EXAMPLES.CODECS["entropy"], EXAMPLES.SHAPE),
        (ECQ(4, "l2", 4096, "entropy"), (140_001,)),
        (Ternary(192, coding="entropy"), (2_049,)),
        (ECQ(127, "linf", "tensor", "entropy"), (70_000,)),
    ),
    ids=str,
)
def test_entropy_coded_codes(
    snippets: dict[str, Any], codec: LevelCodec, shape: tuple[int, ...]
) -> None:
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32).reshape(-1)
    scales, codes = codec.quantize(x, shape, NoiseKey())
    slot = assemble(codec, shape, 0, scales, codes)
    length, layout = payload_length(slot, slot.size), codec.layout(shape)
    assert length < slot.size
    coded = slot[HEADER_BYTES + layout.codes_offset : length].tobytes()
    decoded = snippets["decode_coded"](coded, layout.count, layout.block, codec.alphabet)
    assert decoded == codec.unpack(codes, layout.count).tolist()


@pytest.mark.parametrize("kind", ["dynamic", "static", "mantissa", "e4m3", "e5m2"])
def test_magnitudes(snippets: dict[str, Any], kind: Any) -> None:
    found = [snippets["magnitude"](kind, c) for c in range(128)]
    np.testing.assert_array_equal(found, magnitudes(kind))


@pytest.mark.parametrize("count", [1, 7, 64, 100, 255, 256])
def test_rotated_groups(snippets: dict[str, Any], count: int) -> None:
    x = np.random.default_rng(count).normal(size=count).astype(np.float32)
    assert snippets["rotated_back"](x.tolist()) == rotate_back(x, 256).tolist()


def test_noise(snippets: dict[str, Any]) -> None:
    key = NoiseKey(seed=7, rank=3, tensor=11, step=2**32 + 5)
    numbers = [snippets["noise"](i, 7, 3, 11, 2**32 + 5) for i in range(200)]
    assert numbers == uniform(200, key).tolist()
    # The published test vector of Philox 4x32-7 for a counter and a key of zeros.
    zeros = snippets["philox"]((0, 0, 0, 0), (0, 0))
    assert zeros == (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)
