"""The options that compressors of all frontends take by name, in one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from hvd_compress.codecs import ErrorFeedback
from hvd_compress.exchanges.routing import CodecLike


class SharedOptions(TypedDict, total=False):
    """Options of every compressor; all are optional, and given by name.

    Attributes:
        feedback: coefficients of error feedback; the default is those of the codec's paper.
        exchange: how payloads travel from rank to rank: ``"allgather"``, ``"two_shot"``,
            ``"hierarchical"`` or ``"integer_sum"``; the default is ``"allgather"``. FSDP2 has no
            ``"hierarchical"``.
        threshold: elements, 1024 by default. Smaller tensors travel uncompressed: under Horovod, in
            Horovod's own fused messages; elsewhere in one all-reduce a bucket.
        exclude: name patterns (``fnmatch``, such as ``"fc3.*"``) of tensors that travel uncompressed.
        layers: what other tensors are encoded with, by name pattern: a codec, a
            :class:`~hvd_compress.Route`, a codec's name, or None for uncompressed. The first match wins.
        warmup_steps: steps at the start that travel uncompressed (1-bit SGD's cold start, section 5.2);
            0 by default.
        seed: of the stochastic codecs' noise, from 0 to 2^32 - 1, the same on every rank; 0 by default.
        threads: kernel threads; None, the default, is the framework's own number.
    """

    feedback: ErrorFeedback | None
    exchange: str
    threshold: int
    exclude: Sequence[str]
    layers: Mapping[str, CodecLike] | None
    warmup_steps: int
    seed: int
    threads: int | None
