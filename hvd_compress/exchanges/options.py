"""The keyword options of the compressors of all frontends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from hvd_compress.codecs import ErrorFeedback
from hvd_compress.exchanges.routing import CodecLike


class SharedOptions(TypedDict, total=False):
    """The options of every compressor, all of them optional keywords.

    Attributes:
        feedback: the error feedback coefficients; by default, those of the codec's paper.
        exchange: the exchange of payloads between ranks: ``"auto"``, the default, ``"allgather"``,
            ``"two_shot"``, ``"hierarchical"``, ``"integer_sum"`` or, for PowerSGD, ``"low_rank"``.
            ``"auto"`` is the allgather among up to two ranks, and two shots among more
            (:mod:`hvd_compress.exchanges.default`); for PowerSGD, it is ``"low_rank"``. FSDP2 has no
            ``"hierarchical"``; TensorFlow has ``"allgather"`` and ``"two_shot"`` alone.
        threshold: the smallest number of elements that is compressed, 1024 by default. Smaller tensors
            are sent uncompressed: with Horovod, in Horovod's own fused messages; without Horovod, in one
            all-reduce per bucket.
        exclude: the name patterns (``fnmatch``, such as ``"fc3.*"``) of tensors that are sent uncompressed.
        layers: exceptions by name pattern: a codec, a :class:`~hvd_compress.Route`, a codec's name, or
            None for uncompressed. The first match wins.
        warmup_steps: the number of uncompressed steps at the start (1-bit SGD's cold start, section 5.2);
            0 by default.
        seed: the seed of the stochastic codecs' noise, from 0 to 2^32 - 1, the same on every rank; 0 by
            default.
        threads: the number of kernel threads; None, the default, means the framework's own number.
    """

    feedback: ErrorFeedback | None
    exchange: str
    threshold: int
    exclude: Sequence[str]
    layers: Mapping[str, CodecLike] | None
    warmup_steps: int
    seed: int
    threads: int | None
