"""The codecs' speed on a GPU, beside a device-to-device copy; ``benchmarks.codec --device cuda``.

Every measurement is a CUDA graph of many calls, so that Python's time to start them does not count, between
two measurements of a copy. The result is a kernel's bandwidth as a share of the copy's, counting the bytes
that must be moved, in each pass that the codec's groups need.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.codec_cases import CODECS, ResidualDtype, matrix, stable_feedback
from benchmarks.tables import Table
from hvd_compress.codecs import Codec
from hvd_compress.codecs.feedback import OFF
from hvd_compress.kernels.batch import Entry
from hvd_compress.kernels.cuda import CudaKernels
from hvd_compress.kernels.cuda_batch import CudaBatch
from hvd_compress.kernels.torch_device import TorchDevice

SCHEMA = "hvd_compress/codec-cuda/2"
MEASURED = (
    *("encode", "encode_with_feedback", "decode"),
    *("decode_8", "decode_64", "encode_bf16", "encode_at_8_bytes"),
)
"""The measured operations. ``decode_8`` adds up eight payloads. ``encode_bf16`` encodes bfloat16 gradients,
``encode_at_8_bytes`` a gradient that begins at 8 modulo 16 bytes, as views in a bucket of DDP may."""

TITLES = ("encode", "with feedback", "decode", "of 8", "of 64", "bf16", "at 8 bytes")
SMALL_ELEMENTS = 1 << 20
DEVICE = "cuda"
_CALLS = 20
"""The number of calls in a graph."""

HELD = 4096
"""The size in elements up to which contiguous groups are encoded in one pass over memory."""

Work = Callable[[], object]


class Buffers:
    """Device memory that all cases share: gradients, a residual and an output, shape=(n,)."""

    def __init__(self, elements: int, residual_dtype: ResidualDtype) -> None:
        generator = torch.Generator(device=DEVICE).manual_seed(0)
        longer = torch.randn(elements + 4, device=DEVICE, generator=generator)
        self.x, self.x_at_8_bytes = longer[:elements], longer[2 : elements + 2]
        self.x_bf16 = self.x.bfloat16()
        self.residual_dtype = residual_dtype
        self.residual = torch.zeros_like(self.x, dtype=getattr(torch, residual_dtype))
        self.out = torch.zeros_like(self.x)


class CodecCase:
    """The operations of :data:`MEASURED` on a batch of one tensor, and the bytes that each must move."""

    def __init__(self, codec: Codec, kernels: CudaKernels, buffers: Buffers) -> None:
        elements = buffers.x.numel()
        self.config: dict[str, Any] = codec.to_config()
        shape = matrix(elements)
        size = codec.payload_bytes(shape)
        payloads = torch.zeros(64, size + -size % 16, dtype=torch.uint8, device=DEVICE)[:, :size]
        feedback = stable_feedback(codec, elements, buffers.residual_dtype)
        self.passes = _passes(codec)

        batch, fed = (CudaBatch(kernels, [Entry(codec, shape, one)]) for one in (OFF, feedback))

        def encode(gradient: torch.Tensor) -> None:
            batch.encode([gradient], [None], [None], [0], payloads[0])

        def encode_with_feedback() -> None:
            residuals = [buffers.residual]
            fed.encode([buffers.x], residuals, residuals, [0], payloads[0])

        def decode(count: int) -> None:
            batch.decode_sum([buffers.out], [0], payloads[:count])

        encode(buffers.x)
        payloads[1:] = payloads[0]
        self.bits = 8 * size / elements
        width = buffers.residual.element_size()
        self.bytes = {
            "encode": 4 * self.passes * elements + size,
            "encode_with_feedback": (4 * self.passes + width * (self.passes + 1)) * elements + size,
            "decode": 4 * elements + size,
            "decode_8": 4 * elements + 8 * size,
            "decode_64": 4 * elements + 64 * size,
            "encode_bf16": 2 * self.passes * elements + size,
            "encode_at_8_bytes": 4 * self.passes * elements + size,
        }

        self.work: dict[str, Work] = {
            "encode": lambda: encode(buffers.x),
            "encode_with_feedback": encode_with_feedback,
            "decode": lambda: decode(1),
            "decode_8": lambda: decode(8),
            "decode_64": lambda: decode(64),
            "encode_bf16": lambda: encode(buffers.x_bf16),
            "encode_at_8_bytes": lambda: encode(buffers.x_at_8_bytes),
        }


class ComposedOneBit:
    """1-bit SGD composed of torch calls, as a user without kernels would write it."""

    name = "onebit 1024 composed of torch calls"

    def __init__(self, buffers: Buffers) -> None:
        elements = buffers.x.numel()
        self.config: dict[str, Any] = {"torch": torch.__version__, "group": 1024}
        self.bits = 1 + 64 / 1024
        size = int(elements * self.bits / 8)
        kept = 2 * buffers.residual.element_size()
        self.bytes = {
            "encode_with_feedback": (4 + kept) * elements + size,
            "decode": 4 * elements + size,
        }
        weights = 2 ** torch.arange(8, device=DEVICE, dtype=torch.uint8)
        shifts = torch.arange(8, device=DEVICE, dtype=torch.uint8)

        def encode() -> None:
            x = (buffers.x + buffers.residual).view(-1, 1024)
            upper = x >= 0
            above = upper.sum(1, keepdim=True)
            high = torch.where(upper, x, 0).sum(1, keepdim=True) / above.clamp(min=1)
            low = torch.where(upper, 0, x).sum(1, keepdim=True) / (1024 - above).clamp(min=1)
            buffers.residual.copy_((x - torch.where(upper, high, low)).view(-1))
            self._bits = (upper.view(-1, 8) * weights).sum(1, dtype=torch.uint8)
            self._values = low, high

        def decode() -> None:
            low, high = self._values
            bits = (self._bits[:, None] >> shifts & 1).view(-1, 1024).bool()
            torch.where(bits, high, low, out=buffers.out.view(-1, 1024))

        self.work: dict[str, Work] = {"encode_with_feedback": encode, "decode": decode}


class BitsAndBytes:
    """bitsandbytes' 8-bit dynamic map."""

    name = "bitsandbytes 4096"

    def __init__(self, buffers: Buffers) -> None:
        import bitsandbytes
        from bitsandbytes import functional

        elements = buffers.x.numel()
        self.config: dict[str, Any] = {
            "bitsandbytes": bitsandbytes.__version__,
            "blocksize": 4096,
        }
        self.bits = 8 + 32 / 4096
        self.bytes = dict.fromkeys(("encode", "decode"), int(elements * (4 + self.bits / 8)))

        def encode() -> None:
            self._codes, self._state = functional.quantize_blockwise(buffers.x, blocksize=4096)

        def decode() -> None:
            functional.dequantize_blockwise(self._codes, self._state, out=buffers.out)

        self.work: dict[str, Work] = {"encode": encode, "decode": decode}


def run(
    names: list[str],
    elements: int,
    repeats: int,
    others: bool,
    residual_dtype: ResidualDtype = "float32",
) -> dict[str, Any]:
    """Measures the named codecs, and other projects' if asked; a failure is recorded in its row."""
    buffers = Buffers(elements, residual_dtype)
    kernels = CudaKernels(TorchDevice(torch))
    makers: dict[str, Callable[[], Any]] = {
        name: partial(CodecCase, CODECS[name], kernels, buffers)
        for name in names
        if not CODECS[name].varies  # Only CPUs have an entropy code.
    }
    if others:
        makers[ComposedOneBit.name] = partial(ComposedOneBit, buffers)
        if importlib.util.find_spec("bitsandbytes"):
            makers[BitsAndBytes.name] = partial(BitsAndBytes, buffers)
    rows = {}
    for name, make in makers.items():
        try:
            rows[name] = measure(make(), buffers, repeats)
        except Exception as error:
            rows[name] = {"failed": f"{type(error).__name__}: {error}"}
    kernels.check()
    copy = [seconds(graph_of(lambda: buffers.out.copy_(buffers.x))) for _ in range(repeats)]
    return {
        "elements": elements,
        "residual_dtype": residual_dtype,
        "repeats": repeats,
        "gpu": gpu_name(),
        "copy_seconds": statistics.median(copy),
        "copy_bytes_per_second": 8 * elements / statistics.median(copy),
        "empty_launch_seconds": seconds(graph_of(empty_launch)),
        "codecs": rows,
    }


def measure(case: Any, buffers: Buffers, repeats: int) -> dict[str, Any]:
    """Measures the times of one case, each beside copies."""
    copy = graph_of(lambda: buffers.out.copy_(buffers.x))
    row: dict[str, Any] = {"config": case.config, "bits_per_element": case.bits}
    for name in MEASURED:
        if name not in case.work:
            row[name] = None
            continue
        buffers.residual.zero_()
        work = graph_of(case.work[name])
        times, copies = [], [seconds(copy)]
        for _ in range(repeats):
            times.append(seconds(work))
            copies.append(seconds(copy))
        elements = buffers.x.numel()
        share = [
            (case.bytes[name] / t) / (8 * elements / ((before + after) / 2))
            for t, before, after in zip(times, copies[:-1], copies[1:], strict=True)
        ]
        row[name] = {
            "seconds": statistics.median(times),
            "bytes": case.bytes[name],
            "share_of_copy_bandwidth": statistics.median(share),
            "floor_seconds": case.bytes[name] / (8 * elements) * statistics.median(copies),
        }
    return row


def graph_of(work: Work) -> torch.cuda.CUDAGraph:
    """Captures a graph of :data:`_CALLS` calls, after a few calls to warm up."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
        side.synchronize()
        with torch.cuda.graph(graph, stream=side):
            for _ in range(_CALLS):
                work()
    torch.cuda.current_stream().wait_stream(side)
    graph.replay()
    torch.cuda.synchronize()
    return graph


def seconds(graph: torch.cuda.CUDAGraph) -> float:
    """The seconds of one call in a graph."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / _CALLS


def empty_launch() -> None:
    """Launches a kernel that ends at once."""
    torch.cuda._sleep(0)


def gpu_name() -> str:
    """The GPU's name."""
    return torch.cuda.get_device_name()


def table(result: dict[str, Any]) -> Table:
    """Shares of the copy's bandwidth, with microseconds in brackets."""
    return Table(
        ("codec", "bits", *TITLES), [_row(name, row) for name, row in result["codecs"].items()]
    )


def _row(name: str, row: dict[str, Any]) -> list[str]:
    if "failed" in row:
        return [name, "-", row["failed"], *("-" for _ in MEASURED[1:])]
    cells = [
        f"{row[m]['share_of_copy_bandwidth']:.2f} ({row[m]['seconds'] * 1e6:.0f})"
        if row[m]
        else "-"
        for m in MEASURED
    ]
    return [name, f"{row['bits_per_element']:.3f}", *cells]


def _passes(codec: Codec) -> int:
    """The passes of encoding over the gradient: two if a scale needs more than :data:`HELD` elements."""
    group = getattr(codec, "group", getattr(codec, "bucket", None))
    if group is None:
        return 1
    return 1 if isinstance(group, int) and group <= HELD else 2
