# Written by scripts/stubs.py.
"""Compressors for models that PyTorch's FSDP2 shards within a host and replicates between hosts (HSDP).

``hvdc.OneBit(model, mesh=mesh)`` takes the place of FSDP2's own all-reduce between the replicas. Needs no
Horovod.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hvd_compress.codecs import Codec, ErrorFeedback, PayloadError
from hvd_compress.codecs.frontends import ByName
from hvd_compress.codecs.int8 import Kind
from hvd_compress.engine.owner_steps import AdaGrad, OwnerStep
from hvd_compress.fsdp.compressor import Compressor
from hvd_compress.fsdp.reduce_scatter import CompressedReduceScatter
from hvd_compress.fsdp.stateful import RankStates
from hvd_compress.ranks.errors import ExchangeError

__all__ = [
    "BF16",
    "ECQ",
    "FP16",
    "QSGD",
    "AdaGrad",
    "CompressedReduceScatter",
    "Compression",
    "Compressor",
    "ErrorFeedback",
    "ExchangeError",
    "Int8",
    "NoCompression",
    "OneBit",
    "OwnerStep",
    "PayloadError",
    "RankStates",
    "Ternary",
]

class Compression(ByName[Compressor]): ...

class OneBit(Compressor):
    """1-bit SGD with error feedback.

    One bit an element: which side of zero it lies on.

    Keywords from ``exchange`` on are those of :class:`Compressor`.

    Args:
        group: elements that share two values: a multiple of 64 contiguous elements, ``"tensor"``,
            ``"row"``, or ``"column"`` (the paper's choice). Rows and columns are those of
            ``reshape(shape[0], -1)``.
        alpha: compensation coefficient, 0 <= alpha <= 1 (ECQ-SGD, equation 7).
        beta: time decay of the residual, 1/16 <= beta <= 1 (ECQ-SGD, equation 5).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        group: int | Literal["tensor", "row", "column"] = 1024,
        alpha: float = 1.0,
        beta: float = 1.0,
        mesh: DeviceMesh | None = None,
        process_group: dist.ProcessGroup | None = None,
        exchange: str = "allgather",
        owner_step: OwnerStep | None = None,
        threshold: int = 1024,
        exclude: Sequence[str] = (),
        layers: Mapping[str, Codec | str | None] | None = None,
        warmup_steps: int = 0,
        seed: int = 0,
        grad_scaler: Any | None = None,
        threads: int | None = None,
    ) -> None: ...

class Int8(Compressor):
    """8-bit data types.

    Eight bits an element: a sign and 128 magnitudes.

    Keywords from ``exchange`` on are those of :class:`Compressor`.

    Args:
        kind: ``"dynamic"`` tree, ``"linear"``, ``"static"`` tree or ``"mantissa"`` (figure 1).
        group: elements that share the normalisation of the ``"linear"`` and ``"dynamic"`` types by their
            absolute maximum: a multiple of 64 contiguous elements, or ``"tensor"`` (the paper's choice).
        offset: exponent offset of the ``"static"`` and ``"mantissa"`` types, which are not normalised:
            magnitudes are multiplied by ``10**offset`` (section 3.4 uses 1 and 2).
        alpha: compensation coefficient, 0 <= alpha <= 1 (ECQ-SGD, equation 7).
        beta: time decay of the residual, 1/16 <= beta <= 1 (ECQ-SGD, equation 5).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        kind: Kind = "dynamic",
        group: int | Literal["tensor"] = 2048,
        offset: int = 1,
        alpha: float = 0.0,
        beta: float = 1.0,
        mesh: DeviceMesh | None = None,
        process_group: dist.ProcessGroup | None = None,
        exchange: str = "allgather",
        owner_step: OwnerStep | None = None,
        threshold: int = 1024,
        exclude: Sequence[str] = (),
        layers: Mapping[str, Codec | str | None] | None = None,
        warmup_steps: int = 0,
        seed: int = 0,
        grad_scaler: Any | None = None,
        threads: int | None = None,
    ) -> None: ...

class Ternary(Compressor):
    """TernGrad.

    1.6 bits an element: minus one, zero or one times a scale, at random.

    Keywords from ``exchange`` on are those of :class:`Compressor`.

    Args:
        bucket: elements that share a scale: a multiple of 64 contiguous elements, or ``"tensor"``
            (layer-wise ternarizing, section 3.3).
        clip: the paper's ``c``; ``None`` does not clip.
        coding: ``"plain"`` codes all take the same number of bits; with ``"entropy"`` frequent ones take
            less, and payloads have a size that depends on the gradient.
        alpha: compensation coefficient, 0 <= alpha <= 1 (ECQ-SGD, equation 7).
        beta: time decay of the residual, 1/16 <= beta <= 1 (ECQ-SGD, equation 5).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        bucket: int | Literal["tensor"] = 2048,
        clip: float | None = 2.5,
        coding: Literal["plain", "entropy"] = "plain",
        alpha: float = 0.0,
        beta: float = 1.0,
        mesh: DeviceMesh | None = None,
        process_group: dist.ProcessGroup | None = None,
        exchange: str = "allgather",
        owner_step: OwnerStep | None = None,
        threshold: int = 1024,
        exclude: Sequence[str] = (),
        layers: Mapping[str, Codec | str | None] | None = None,
        warmup_steps: int = 0,
        seed: int = 0,
        grad_scaler: Any | None = None,
        threads: int | None = None,
    ) -> None: ...

class ECQ(Compressor):
    """ECQ-SGD, quantization with error feedback.

    ``levels`` evenly spaced magnitudes below a norm, chosen at random and without bias.

    Keywords from ``exchange`` on are those of :class:`Compressor`.

    Args:
        levels: the paper's ``s``, the number of non-zero magnitudes, 1 to 127.
        norm: the scaling factor of a bucket, ``"l2"`` or ``"linf"``.
        bucket: elements that share a norm: a multiple of 64 contiguous elements, or ``"tensor"``.
        coding: ``"plain"`` codes all take the same number of bits; with ``"entropy"`` frequent ones take
            less, and payloads have a size that depends on the gradient.
        alpha: compensation coefficient, 0 <= alpha <= 1 (ECQ-SGD, equation 7).
        beta: time decay of the residual, 1/16 <= beta <= 1 (ECQ-SGD, equation 5).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        levels: int = 7,
        norm: Literal["l2", "linf"] = "linf",
        bucket: int | Literal["tensor"] = 4096,
        coding: Literal["plain", "entropy"] = "plain",
        alpha: float = 0.01,
        beta: float = 1.0,
        mesh: DeviceMesh | None = None,
        process_group: dist.ProcessGroup | None = None,
        exchange: str = "allgather",
        owner_step: OwnerStep | None = None,
        threshold: int = 1024,
        exclude: Sequence[str] = (),
        layers: Mapping[str, Codec | str | None] | None = None,
        warmup_steps: int = 0,
        seed: int = 0,
        grad_scaler: Any | None = None,
        threads: int | None = None,
    ) -> None: ...

class QSGD(Compressor):
    """QSGD: ECQ without error feedback.

    ``levels`` evenly spaced magnitudes below a norm, chosen at random and without bias.

    Keywords from ``exchange`` on are those of :class:`Compressor`.

    Args:
        levels: the paper's ``s``, the number of non-zero magnitudes, 1 to 127.
        norm: the scaling factor of a bucket, ``"l2"`` or ``"linf"``.
        bucket: elements that share a norm: a multiple of 64 contiguous elements, or ``"tensor"``.
        coding: ``"plain"`` codes all take the same number of bits; with ``"entropy"`` frequent ones take
            less, and payloads have a size that depends on the gradient.
        alpha: compensation coefficient, 0 <= alpha <= 1 (ECQ-SGD, equation 7).
        beta: time decay of the residual, 1/16 <= beta <= 1 (ECQ-SGD, equation 5).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        levels: int = 7,
        norm: Literal["l2", "linf"] = "linf",
        bucket: int | Literal["tensor"] = 4096,
        coding: Literal["plain", "entropy"] = "plain",
        alpha: float = 0.0,
        beta: float = 1.0,
        mesh: DeviceMesh | None = None,
        process_group: dist.ProcessGroup | None = None,
        exchange: str = "allgather",
        owner_step: OwnerStep | None = None,
        threshold: int = 1024,
        exclude: Sequence[str] = (),
        layers: Mapping[str, Codec | str | None] | None = None,
        warmup_steps: int = 0,
        seed: int = 0,
        grad_scaler: Any | None = None,
        threads: int | None = None,
    ) -> None: ...

class FP16(Compressor):
    """Half precision, added in half precision by an allreduce.

    IEEE half precision; NaN is sent as 0x7e00.

    Keywords from ``exchange`` on are those of :class:`Compressor`.

    Args:
        alpha: compensation coefficient, 0 <= alpha <= 1 (ECQ-SGD, equation 7).
        beta: time decay of the residual, 1/16 <= beta <= 1 (ECQ-SGD, equation 5).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        alpha: float = 0.0,
        beta: float = 1.0,
        mesh: DeviceMesh | None = None,
        process_group: dist.ProcessGroup | None = None,
        exchange: str = "allgather",
        owner_step: OwnerStep | None = None,
        threshold: int = 1024,
        exclude: Sequence[str] = (),
        layers: Mapping[str, Codec | str | None] | None = None,
        warmup_steps: int = 0,
        seed: int = 0,
        grad_scaler: Any | None = None,
        threads: int | None = None,
    ) -> None: ...

class BF16(Compressor):
    """bfloat16, gathered and added in float32.

    bfloat16, the upper half of a float32; NaN is sent as 0x7fc0.

    Keywords from ``exchange`` on are those of :class:`Compressor`.

    Args:
        alpha: compensation coefficient, 0 <= alpha <= 1 (ECQ-SGD, equation 7).
        beta: time decay of the residual, 1/16 <= beta <= 1 (ECQ-SGD, equation 5).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        alpha: float = 0.0,
        beta: float = 1.0,
        mesh: DeviceMesh | None = None,
        process_group: dist.ProcessGroup | None = None,
        exchange: str = "allgather",
        owner_step: OwnerStep | None = None,
        threshold: int = 1024,
        exclude: Sequence[str] = (),
        layers: Mapping[str, Codec | str | None] | None = None,
        warmup_steps: int = 0,
        seed: int = 0,
        grad_scaler: Any | None = None,
        threads: int | None = None,
    ) -> None: ...

class NoCompression(Compressor):
    """Gradients as they are, with the counters of the others.

    float32 as it is; NaN is sent as 0x7fc00000.

    Keywords from ``exchange`` on are those of :class:`Compressor`.

    Args:
        alpha: compensation coefficient, 0 <= alpha <= 1 (ECQ-SGD, equation 7).
        beta: time decay of the residual, 1/16 <= beta <= 1 (ECQ-SGD, equation 5).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        alpha: float = 0.0,
        beta: float = 1.0,
        mesh: DeviceMesh | None = None,
        process_group: dist.ProcessGroup | None = None,
        exchange: str = "allgather",
        owner_step: OwnerStep | None = None,
        threshold: int = 1024,
        exclude: Sequence[str] = (),
        layers: Mapping[str, Codec | str | None] | None = None,
        warmup_steps: int = 0,
        seed: int = 0,
        grad_scaler: Any | None = None,
        threads: int | None = None,
    ) -> None: ...
