"""One compressor class for each codec: :class:`Compressor` with the codec's fields as named arguments."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Unpack

import hvd_compress.codecs as codecs
from hvd_compress.codecs.calls import guard
from hvd_compress.codecs.int8 import Kind
from hvd_compress.engine.options import Options as SharedOptions
from hvd_compress.engine.parameters import NamedParameters
from hvd_compress.torch.compressor import Compressor


class Options(SharedOptions, total=False):
    """The keyword arguments of :class:`Compressor` other than the codec."""

    process_set: Any | None
    name: str


@guard
class OneBit(Compressor):
    """1-bit SGD with error feedback (Seide et al., 2014).

    The same as ``Compressor(model, hvd_compress.OneBit(...), ...)``; codec fields are passed by name.
    """

    def __init__(
        self,
        named_parameters: NamedParameters,
        *,
        group: int | Literal["tensor", "row", "column"] = codecs.OneBit.group,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(named_parameters, codecs.OneBit(group), **options)


@guard
class Int8(Compressor):
    """8-bit data types (Dettmers, 2016).

    The same as ``Compressor(model, hvd_compress.Int8(...), ...)``; codec fields are passed by name.
    """

    def __init__(
        self,
        named_parameters: NamedParameters,
        *,
        kind: Kind = codecs.Int8.kind,
        group: int | Literal["tensor"] = codecs.Int8.group,
        offset: int = codecs.Int8.offset,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(named_parameters, codecs.Int8(kind, group, offset), **options)


@guard
class Ternary(Compressor):
    """TernGrad (Wen et al., 2017).

    The same as ``Compressor(model, hvd_compress.Ternary(...), ...)``; codec fields are passed by name.
    """

    def __init__(
        self,
        named_parameters: NamedParameters,
        *,
        bucket: int | Literal["tensor"] = codecs.Ternary.bucket,
        clip: float | None = codecs.Ternary.clip,
        coding: Literal["plain", "entropy"] = codecs.Ternary.coding,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(named_parameters, codecs.Ternary(bucket, clip, coding), **options)


@guard
class ECQ(Compressor):
    """ECQ-SGD, quantization with error feedback (Wu et al., 2018).

    The same as ``Compressor(model, hvd_compress.ECQ(...), ...)``; codec fields are passed by name.
    """

    _codec: ClassVar[type[codecs.ECQ]] = codecs.ECQ

    def __init__(
        self,
        named_parameters: NamedParameters,
        *,
        levels: int = codecs.ECQ.levels,
        norm: Literal["l2", "linf"] = codecs.ECQ.norm,
        bucket: int | Literal["tensor"] = codecs.ECQ.bucket,
        coding: Literal["plain", "entropy"] = codecs.ECQ.coding,
        rotate: bool = codecs.ECQ.rotate,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            named_parameters, self._codec(levels, norm, bucket, coding, rotate), **options
        )


class QSGD(ECQ):
    """QSGD, quantization without error feedback (Alistarh et al., 2017).

    The same as ``Compressor(model, hvd_compress.QSGD(...), ...)``; codec fields are passed by name.
    """

    _codec = codecs.QSGD


@guard
class TopK(Compressor):
    """The largest elements of each chunk, with error feedback (Aji and Heafield, 2017).

    The same as ``Compressor(model, hvd_compress.TopK(...), ...)``; codec fields are passed by name.
    """

    def __init__(
        self,
        named_parameters: NamedParameters,
        *,
        chunk: int = codecs.TopK.chunk,
        keep: int = codecs.TopK.keep,
        bits: int = codecs.TopK.bits,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(named_parameters, codecs.TopK(chunk, keep, bits), **options)


@guard
class PowerSGD(Compressor):
    """Two factors of each matrix, which allreduces add up (Vogels, Karimireddy and Jaggi, 2019).

    The same as ``Compressor(model, hvd_compress.PowerSGD(...), ...)``; codec fields are passed by name.
    """

    def __init__(
        self,
        named_parameters: NamedParameters,
        *,
        rank: int = codecs.PowerSGD.rank,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(named_parameters, codecs.PowerSGD(rank), **options)


@guard
class FP16(Compressor):
    """Half precision, summed in half precision by an allreduce.

    The same as ``Compressor(model, hvd_compress.FP16(), ...)``.
    """

    def __init__(self, named_parameters: NamedParameters, **options: Unpack[Options]) -> None:
        super().__init__(named_parameters, codecs.FP16(), **options)


@guard
class BF16(Compressor):
    """bfloat16, gathered and summed in float32.

    The same as ``Compressor(model, hvd_compress.BF16(...), ...)``; codec fields are passed by name.
    """

    def __init__(
        self,
        named_parameters: NamedParameters,
        *,
        rounding: Literal["nearest", "stochastic"] = codecs.BF16.rounding,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(named_parameters, codecs.BF16(rounding), **options)


@guard
class NoCompression(Compressor):
    """Uncompressed gradients, with the counters of the other compressors.

    The same as ``Compressor(model, hvd_compress.NoCompression(), ...)``.
    """

    def __init__(self, named_parameters: NamedParameters, **options: Unpack[Options]) -> None:
        super().__init__(named_parameters, codecs.NoCompression(), **options)
