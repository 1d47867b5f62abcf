"""The CUDA kernels' own duties: sizes, altered payloads, flags, streams, and a library that is missing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest import mock

import pytest
import torch

from hvd_compress.codecs import (
    BF16,
    ECQ,
    Codec,
    ErrorFeedback,
    Int8,
    NoCompression,
    NoiseKey,
    OneBit,
    PayloadError,
    Ternary,
)
from hvd_compress.engine.executors import Executors
from hvd_compress.kernels.batch import Entry
from hvd_compress.kernels.cuda import CudaKernels
from hvd_compress.kernels.cuda_batch import CudaBatch
from hvd_compress.kernels.native import KernelError
from tests.codecs.cases import Truncated, encode, normal
from tests.cuda.executors import Checked, HostDevice, emulated_library

SHAPE = (70,)
CODEC = ECQ(4, "l2", 64)
FULL = ErrorFeedback(1.0, 1.0)


def test_a_library_that_was_not_built_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(
        KernelError, match=r"expected|none: install nvcc of CUDA 12 or 13 .*HVDC_CUDA=on"
    ):
        CudaKernels(HostDevice(), Path("/nowhere/libhvdc_cuda.so"))


# Arguments


@pytest.mark.parametrize(
    ("codec", "count"), ((OneBit(64), 2**31), (NoCompression(), 2**31 - 8)), ids=str
)
def test_tensors_that_are_too_large(kernels: Checked, codec: Codec, count: int) -> None:
    """Their elements, or their payload's words; memory is never touched, and so is not there."""
    shape = (count,)

    class Large:
        dtype, device = torch.float32, torch.zeros(0, device=kernels.device).device
        is_cpu = device.type == "cpu"

        def __init__(self, count: int, dtype: torch.dtype) -> None:
            self.count, self.dtype = count, dtype

        def numel(self) -> int:
            return self.count

        def get_device(self) -> int:
            return 0

        def is_contiguous(self) -> bool:
            return True

        def data_ptr(self) -> int:
            return 256

    with pytest.raises(ValueError, match=r"expected less than 2\*\*31 elements, and as few"):
        values = [Large(count, torch.float32)]
        message = Large(codec.payload_bytes(shape), torch.uint8)
        kernels.batch([Entry(codec, shape)]).encode(values, [None], [None], [0], message)


@pytest.mark.parametrize("codec", (Truncated(), ECQ(coding="entropy")), ids=str)
def test_a_codec_without_a_kernel(kernels: Checked, codec: Codec) -> None:
    with pytest.raises(KernelError, match="has no CUDA kernel: keep its gradients on the CPU"):
        kernels.batch([Entry(codec, SHAPE)])


# Altered payloads


@pytest.mark.parametrize(
    "codec",
    (
        CODEC,
        OneBit(64),
        OneBit("column"),
        Ternary(64),
        Ternary("tensor"),
        Int8("linear", 64),
        BF16(),
        NoCompression(),
    ),
    ids=str,
)
def test_every_altered_byte_makes_nan_and_is_reported(kernels: Checked, codec: Codec) -> None:
    sent = torch.from_numpy(encode(codec, SHAPE, normal(SHAPE), noise=NoiseKey(step=3)))
    payloads = torch.stack([sent, sent]).to(kernels.device)
    batch = kernels.batch([Entry(codec, SHAPE)])
    for dtype in (torch.float32, torch.bfloat16):
        for byte in range(sent.numel()):
            out = torch.zeros(SHAPE, dtype=dtype, device=kernels.device)
            payloads[1, byte] ^= 1 << byte % 8
            what = "header" if byte < 16 or 20 <= byte < 24 else "checksum"
            with pytest.raises(
                PayloadError, match=rf"rank 1's payload: expected the {what} that .* NaN"
            ):
                batch.decode_sum([out], [3], payloads)
            assert bool(torch.isnan(out).all())
            payloads[1, byte] ^= 1 << byte % 8
        out = torch.zeros(SHAPE, dtype=dtype, device=kernels.device)
        batch.decode_sum([out], [3], payloads)
        assert not bool(torch.isnan(out).any())


def test_the_first_error_is_kept_until_it_is_read(kernels: Checked) -> None:
    sent = torch.from_numpy(encode(CODEC, SHAPE, normal(SHAPE))).to(kernels.device)
    out = torch.zeros(SHAPE, device=kernels.device)
    bad = torch.stack([sent, sent, sent])
    bad[2, 40] ^= 1
    batch = CudaBatch(kernels, [Entry(CODEC, SHAPE)])
    batch.decode_sum([out], [0], bad)
    batch.decode_sum([out], [9], sent[None])
    with pytest.raises(PayloadError, match="rank 2's payload: expected the checksum"):
        kernels.settle()
    kernels.settle()


def test_the_tensors_device_is_current_while_work_is_given() -> None:
    current: list[int] = []

    class Guarded(HostDevice):
        @contextmanager
        def guard(self, index: int) -> Iterator[None]:
            current.append(index)
            yield
            current.pop()

        def stream(self, index: int) -> int:
            assert current == [index]
            return super().stream(index)

    kernels = CudaKernels(Guarded(), emulated_library())
    gradient, residual, word = torch.ones(SHAPE), torch.zeros(SHAPE), torch.ones(1).int()
    payload = torch.zeros(1, CODEC.payload_bytes(SHAPE), dtype=torch.uint8)
    batch = CudaBatch(kernels, [Entry(CODEC, SHAPE, FULL)])
    batch.encode([gradient], [residual], [residual], [0], payload[0])
    batch.decode_sum([gradient], [0], payload)
    kernels.restore([([gradient], [residual])], word)
    assert current == []


# Steps that are dropped without the host's knowing


@pytest.mark.parametrize("bad", (False, True))
def test_residuals_are_restored_where_a_flag_says_so(kernels: Checked, bad: bool) -> None:
    before, after = (
        torch.from_numpy(normal(SHAPE, seed=seed)).to(kernels.device) for seed in (2, 3)
    )
    expected = (before if bad else after).clone()
    word = torch.full((1,), int(bad), dtype=torch.int32, device=kernels.device)
    kernels.restore([([before], [after])], word)
    assert torch.equal(after, expected)


def test_one_thread_at_a_time_gives_work_to_a_stream() -> None:
    """Kernels of two calls that took turns in one stream would share that stream's workspace."""
    both = threading.Barrier(2)
    together: list[str] = []

    class Meeting(HostDevice):
        def stream(self, index: int) -> int:
            with suppress(threading.BrokenBarrierError):
                both.wait(0.3)
                together.append(threading.current_thread().name)
                raise AssertionError("two threads give work at once")
            return super().stream(index)

    kernels = CudaKernels(Meeting(), emulated_library())
    word, values = torch.zeros(1, dtype=torch.int32), torch.zeros(SHAPE)
    copies = [([values], [torch.zeros_like(values)])]
    threads = [threading.Thread(target=kernels.restore, args=(copies, word)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == []


def test_a_stream_waits_for_every_other_one_that_has_work() -> None:
    """Hooks and a progress thread take turns, each in a stream of its own."""
    waits: list[tuple[str, str]] = []

    class Stream(str):
        __slots__ = ()

        def wait_stream(self, other: str) -> None:
            waits.append((self, other))

    tensor = cast("torch.Tensor", SimpleNamespace(device=torch.device("cuda", 0)))
    executors = Executors(1)
    for name in ("hook", "thread", "end", "end"):
        with mock.patch.object(torch.cuda, "current_stream", lambda _, name=name: Stream(name)):
            executors.order(tensor)
    assert sorted(waits[:3]) == [("end", "hook"), ("end", "thread"), ("thread", "hook")]
