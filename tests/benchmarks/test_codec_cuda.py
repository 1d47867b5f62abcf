"""The GPU benchmark's cases and arithmetic, with kernels that run on the host.

Graphs and events are CUDA's own: plain calls and the clock stand in for them here.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from benchmarks import codec_cuda
from benchmarks.codec_cases import CODECS
from tests.cuda.executors import emulated

ELEMENTS = 1 << 13


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(work: Callable[[], object]) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    kernels = emulated()
    monkeypatch.setattr(codec_cuda, "DEVICE", "cpu")
    monkeypatch.setattr(codec_cuda, "CudaKernels", lambda _: kernels)
    monkeypatch.setattr(codec_cuda, "graph_of", lambda work: work)
    monkeypatch.setattr(codec_cuda, "seconds", seconds)
    monkeypatch.setattr(codec_cuda, "empty_launch", lambda: None)
    monkeypatch.setattr(codec_cuda, "gpu_name", lambda: "none")


def test_every_codec_is_measured_and_compared(on_host: None) -> None:
    result = codec_cuda.run(list(CODECS), ELEMENTS, repeats=1, others=True)

    assert {name for name, codec in CODECS.items() if not codec.varies} < set(result["codecs"])
    for name, row in result["codecs"].items():
        assert "failed" not in row, f"{name}: {row}"
        assert row["encode_with_feedback"] is None or (
            row["encode_with_feedback"]["share_of_copy_bandwidth"] > 0
        )
    assert result["copy_bytes_per_second"] > 0 and result["empty_launch_seconds"] > 0
    text = codec_cuda.table(result).text()
    assert "onebit column" in text and codec_cuda.ComposedOneBit.name in text


def test_bytes_are_those_that_have_to_move(on_host: None) -> None:
    rows = codec_cuda.run(["none", "onebit 1024", "onebit column"], ELEMENTS, 1, False)["codecs"]
    payload = {name: row["bits_per_element"] * ELEMENTS / 8 for name, row in rows.items()}
    moved = {
        name: (row["encode_with_feedback"]["bytes"] - payload[name]) / ELEMENTS
        for name, row in rows.items()
    }
    # Gradient and residual in, residual out; once more in where columns have to be summed first.
    assert moved == {"none": 12, "onebit 1024": 12, "onebit column": 20}
    rows = codec_cuda.run(["onebit column"], ELEMENTS, 1, False, "bfloat16")["codecs"]
    fed = rows["onebit column"]["encode_with_feedback"]["bytes"]
    assert (fed - payload["onebit column"]) / ELEMENTS == 14
