"""The ranks that share a model's layers, and the codecs of their messages."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from hvd_compress.codecs import Codec
from hvd_compress.codecs.registry import codec_of
from hvd_compress.process_group.encoded import EncodedCollectives
from hvd_compress.process_group.transport import ProcessGroupTransport, Transport


class ParallelGroup(EncodedCollectives):
    """The ranks that share layers, and the codecs of their messages.

    Every exchange is one collective. Each rank encodes its tensor once and decodes all ranks' payloads.
    For its own tensor, a rank uses the original instead of the decoded one, as the paper's GPUs usually do
    (Dettmers, 2016, section 3.4). There is no error feedback: the next activations are those of other
    samples, for which the rounding errors of these ones have no meaning.

    Before every exchange, the ranks compare the kind of exchange and the shapes and dtypes of their
    tensors. A tensor with an Inf or a NaN, or with a number beyond the range of ``FP16()``, puts an Inf or
    a NaN into the result on every rank. ``Int8("static")`` and ``Int8("mantissa")`` cut numbers off at the
    end of their range.

    Make groups, and the layers of a group, in the same order on all ranks.

    Args:
        codec: the codec of activations, such as ``Int8()``, or its name; entropy coding is not
            supported, because messages have a fixed size.
        error_codec: the codec of error signals, which are the gradients of activations; None means
            ``codec``.
        exact_own: whether a rank uses its own tensor unencoded. If not, all ranks have the same bits, and
            copies of parameters stay equal on all ranks.
        process_group: a process group of ``torch.distributed``; None means the default group.
        transport: other collectives, such as
            :class:`hvd_compress.papers.horovod.HorovodTransport`, in place of a process group's.
        seed: the seed of the stochastic codecs' noise, the same on every rank.
        threads: the number of kernel threads; None means ``torch.get_num_threads()``.

    Attributes:
        rank: this rank's number in the group.
        size: the number of ranks.
        codec: the codec of activations.
        error_codec: the codec of error signals.
        exact_own: whether a rank uses its own tensor unencoded.
        counters: the counts of this rank's sent bytes, without those of comparisons; ``steps`` counts
            exchanges.

    Raises:
        TypeError, ValueError: an argument is wrong, "expected X, got Y".
        ExchangeError: the ranks' settings differ, raised on every rank; or there are no ranks.
    """

    def __init__(
        self,
        codec: Codec | str,
        *,
        error_codec: Codec | str | None = None,
        exact_own: bool = True,
        process_group: dist.ProcessGroup | None = None,
        transport: Transport | None = None,
        seed: int = 0,
        threads: int | None = None,
    ) -> None:
        self.codec = codec_of("ParallelGroup", "codec", codec)
        self.error_codec = self.codec
        if error_codec is not None:
            self.error_codec = codec_of("ParallelGroup", "error_codec", error_codec)
        if transport is not None and process_group is not None:
            raise ValueError(
                "ParallelGroup: expected process_group or transport, got both; give the transport its ranks"
            )
        super().__init__(
            transport or ProcessGroupTransport(process_group),
            exact_own=exact_own,
            seed=seed,
            threads=threads,
        )
        with self.telling():
            for name, value in (("codec", self.codec), ("error_codec", self.error_codec)):
                if value.varies:
                    raise ValueError(
                        f"ParallelGroup.{name}: expected a codec whose payloads have a fixed size, such as "
                        f"one with coding='plain', got {value!r}"
                    )
        self.agree(
            {
                "codec": self.codec.to_config(),
                "error_codec": self.error_codec.to_config(),
                "exact_own": exact_own,
                "seed": seed,
            }
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelGroup:
        """Returns the group itself: a copied layer exchanges with the same ranks."""
        return self
