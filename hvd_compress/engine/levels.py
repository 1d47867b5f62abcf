"""A batch's gradients as levels that ranks add, computed by NumPy in the memory of the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hvd_compress.codecs import ErrorFeedback, LevelCodec, NoiseKey, PayloadError
from hvd_compress.engine.batch import Batch
from hvd_compress.exchanges import integer_sum
from hvd_compress.exchanges.layout import USED
from hvd_compress.kernels.cpu_arrays import readable
from hvd_compress.kernels.reference import compensated


class LevelBatch:
    """The norms and the levels of a batch's gradients; see :mod:`hvd_compress.exchanges.integer_sum`.

    Args:
        batch: the batch.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        members, size = batch.plan.members, batch.plan.group.size
        self._codecs = [one.codec for one in members if isinstance(one.codec, LevelCodec)]
        self._bits = [integer_sum.bits_of(codec, size) for codec in self._codecs]
        pairs = list(zip(members, self._codecs, self._bits, strict=True))
        # The ends of gradients in the messages; flags follow the norms, and two more words the levels.
        self._norm_ends = np.cumsum([codec.layout(one.shape).scales for one, codec, _ in pairs])
        self._word_ends = np.cumsum([codec.level_words(m.shape, bits) for m, codec, bits in pairs])
        self._own = self._norms = np.empty(0, np.float32)
        # Three arrays a gradient: g and h in float32, and g + alpha h, which is encoded.
        self._inputs: list[tuple[np.ndarray, np.ndarray | None, np.ndarray]] = []
        self._after: Sequence[torch.Tensor | None] = ()

    def norms(self) -> torch.Tensor:
        """This rank's norms and flags, shape=(norms,), float32; zeros if the work fails."""
        batch, count = self._batch, int(self._norm_ends[-1]) + len(self._codecs)

        @np.errstate(all="ignore")
        def work() -> torch.Tensor:
            message = np.zeros(count, np.float32)
            *norms, flags = np.split(message, self._norm_ends)
            residuals, self._after = batch.residuals.take_up()
            for position, gradient in enumerate(batch.flats):
                residual = residuals[position]
                h = None if residual is None else readable(residual)
                g, x = compensated(readable(gradient), self._feedback(position), h)
                self._inputs.append((g, h, x))
                if x.size:
                    norms[position][:] = self._codecs[position].norms(x)
            batch.write_flags(torch.from_numpy(flags))
            self._own = message.copy()  # The largest norms of all ranks come into the message.
            return torch.from_numpy(message)

        elements = sum(member.count for member in batch.plan.members)
        return batch.encoding(work, count, torch.float32, elements)

    def encode(self, norms: torch.Tensor) -> torch.Tensor:
        """This rank's levels, followed by a 1 and a check; zeros if the work fails.

        The work fails if the norms cannot be the largest norms of all ranks.

        Args:
            norms: the largest norms of all ranks, shape=(norms,), float32.

        Returns:
            The message, shape=(words,), int32.
        """
        batch, count = self._batch, int(self._word_ends[-1]) + integer_sum.EXTRA_WORDS
        self._norms = norms.numpy()

        @np.errstate(all="ignore")
        def work() -> torch.Tensor:
            self._check_norms()
            message = np.zeros(count, np.int32)
            words, shared = np.split(message, self._word_ends), self._split_norms()
            for position, (g, h, x) in enumerate(self._inputs):
                if not x.size:
                    continue
                codec, noise = self._codecs[position], self._noise(position)
                levels = codec.to_levels(x, shared[position], noise)
                words[position][:] = codec.pack_levels(levels, self._bits[position])
                after = self._after[position]
                if h is not None and after is not None:
                    sent = codec.from_levels(levels, shared[position])
                    kept = self._feedback(position).carry(g, h, sent, noise)
                    after.copy_(torch.from_numpy(kept))
            message[-2] = 1
            message[-1] = self._check_of(message)
            return torch.from_numpy(message)

        return batch.encoding(work, count, torch.int32)

    def load(self, norms: torch.Tensor, words: torch.Tensor) -> None:
        """Takes the ranks' sums; finds out whether they, or the norms, were altered in transit.

        Args:
            norms: the largest norms of all ranks, shape=(norms,), float32.
            words: the sum of all ranks' levels, shape=(words,), int32.
        """
        batch, sums = self._batch, words.numpy()
        if (int(sums[-1]) - self._check_of(sums)) % integer_sum.MODULUS:
            batch.error = batch.error or PayloadError(
                f"{batch.plan.names}: expected levels and norms that agree with their "
                f"checks, got some that were altered in transit"
            )
        batch.count_senders(int(sums[-2]))
        batch.load_by(lambda scale: self._decode(sums, scale), norms[None, self._norm_ends[-1] :])

    def _decode(self, sums: np.ndarray, scale: float) -> None:
        batch, words, norms = self._batch, np.split(sums, self._word_ends), self._split_norms()
        batch.nonfinite |= any(bool(np.isinf(one).any()) for one in norms)
        with batch.decoding(), np.errstate(all="ignore"):
            for position, values in enumerate(batch.flats):
                codec, bits = self._codecs[position], self._bits[position]
                if values.numel():
                    levels = codec.unpack_levels(words[position], values.numel(), bits)
                    total = codec.from_levels(levels, norms[position]) * np.float32(scale)
                    values.copy_(torch.from_numpy(total))

    def _check_norms(self) -> None:
        """Raises ``PayloadError`` if a norm is NaN or below this rank's own, or a flag is invalid."""
        flags = self._norms[self._norm_ends[-1] :].tolist()
        if not (self._norms >= self._own).all() or not {0, USED}.issuperset(flags):
            raise PayloadError(
                f"{self._batch.plan.names}: expected the ranks' largest norms, got some that were "
                f"altered in transit"
            )

    def _check_of(self, words: np.ndarray) -> int:
        """The check of the levels, plus that of the norms for each rank that has counted itself."""
        norms = integer_sum.check_of(self._norms.view(np.int32))
        return (integer_sum.check_of(words[:-1]) + int(words[-2]) * norms) % integer_sum.MODULUS

    def _split_norms(self) -> list[np.ndarray]:
        return np.split(self._norms, self._norm_ends)[:-1]

    def _feedback(self, position: int) -> ErrorFeedback:
        return self._batch.plan.slots[position].route.feedback

    def _noise(self, position: int) -> NoiseKey:
        plan = self._batch.plan
        index, step = plan.members[position].index, self._batch.steps[position]
        return NoiseKey(plan.common.seed, plan.group.rank, index, step)
