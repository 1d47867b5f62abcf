"""The ranks that share a model's layers, and the codecs of what they send each other."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from hvd_compress.codecs import Codec
from hvd_compress.process_group.encoded import EncodedCollectives
from hvd_compress.process_group.transport import ProcessGroupTransport, Transport


class ParallelGroup(EncodedCollectives):
    """The ranks that share layers, and the codecs of what they send each other.

    Every exchange is one collective. Each rank encodes its tensor once and decodes all ranks' payloads. A
    rank then takes its own tensor as it was before encoding, as the paper's GPUs usually do (Dettmers,
    2016, section 3.4). There is no error feedback: the next activations are those of other samples, so that
    what was rounded off of these ones does not belong there.

    Before every exchange the ranks compare what they are about to send. A tensor with an Inf or a NaN, or
    with a number that the codec cannot represent, puts an Inf or a NaN into the result on every rank.

    Make groups, and layers of a group, in the same order on all ranks.

    Args:
        codec: of activations, such as ``Int8()``; not one with an entropy code, since messages have a
            fixed size.
        error_codec: of error signals, the gradients of activations; None is ``codec``.
        exact_own: whether a rank takes its own tensor unencoded. If not, all ranks have the same bits:
            parameters that every rank has a copy of stay the same then.
        process_group: of ``torch.distributed``; None is the default group.
        transport: other collectives, such as
            :class:`hvd_compress.model_parallel.horovod.HorovodTransport`, in place of a process group's.
        seed: of the noise of stochastic codecs, the same on every rank.
        threads: kernel threads; None is ``torch.get_num_threads()``.

    Attributes:
        rank: this rank's number in the group.
        size: how many ranks there are.
        codec: of activations.
        error_codec: of error signals.
        exact_own: as given.
        counters: what this rank has sent. ``steps`` counts exchanges; the comparisons' bytes are not in.

    Raises:
        TypeError, ValueError: an argument is wrong, "expected X, got Y".
        ExchangeError: on every rank, the ranks' settings differ; or there are no ranks.
    """

    def __init__(
        self,
        codec: Codec,
        *,
        error_codec: Codec | None = None,
        exact_own: bool = True,
        process_group: dist.ProcessGroup | None = None,
        transport: Transport | None = None,
        seed: int = 0,
        threads: int | None = None,
    ) -> None:
        self.codec = codec
        self.error_codec = codec if error_codec is None else error_codec
        for name, value in (("codec", codec), ("error_codec", self.error_codec)):
            if not isinstance(value, Codec):
                raise TypeError(
                    f"ParallelGroup.{name}: expected a codec of hvd_compress.codecs such as Int8(), got "
                    f"{value!r}"
                )
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
            for name, value in (("codec", codec), ("error_codec", self.error_codec)):
                if value.varies:
                    raise ValueError(
                        f"ParallelGroup.{name}: expected a codec whose payloads have a fixed size, such as "
                        f"one with coding='plain', got {value!r}"
                    )
        self.agree(
            {
                "codec": codec.to_config(),
                "error_codec": self.error_codec.to_config(),
                "exact_own": exact_own,
                "seed": seed,
            }
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelGroup:
        """Itself: a copied layer exchanges with the same ranks."""
        return self
