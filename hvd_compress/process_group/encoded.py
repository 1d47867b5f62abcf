"""Collectives of encoded tensors that the caller waits for, without error feedback."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from hvd_compress.codecs import Codec, NoiseKey
from hvd_compress.codecs.feedback import OFF
from hvd_compress.codecs.payload import FLAG_NONFINITE, FLAGS_OFFSET
from hvd_compress.engine.executors import CUDA_KERNELS, Executors, keep_from_reuse
from hvd_compress.engine.failures import explained
from hvd_compress.engine.run import phase, timed
from hvd_compress.exchanges.comm import Collective, Comm, Group
from hvd_compress.exchanges.limits import check_gather
from hvd_compress.exchanges.routing import ENCODABLE
from hvd_compress.kernels.batch import Batch, BatchPayloadError, Entry
from hvd_compress.process_group.transport import Transport
from hvd_compress.ranks.counters import Counters
from hvd_compress.ranks.errors import ExchangeError

_MOST_BATCHES = 4096
"""The most batches to keep: with other shapes in each exchange, their number would be unlimited."""


class EncodedCollectives:
    """A gather, a sum and a reduce-scatter of payloads.

    Each rank encodes its tensor once and decodes the payloads that it gets. Before every exchange, the
    ranks compare what they are about to send. A tensor with an Inf or a NaN, or with a number that the
    codec cannot represent, puts an Inf or a NaN into the result on every rank.

    Args:
        transport: the ranks, and the collectives that carry their messages.
        exact_own: whether a rank takes its own tensor unencoded. If not, all ranks have the same bits.
        seed: the seed of the noise of stochastic codecs, the same on every rank.
        threads: the number of kernel threads; None is ``torch.get_num_threads()``.
        noise_rank: this rank's number in the noise; None is its number in the group.

    Attributes:
        rank: this rank's number in the group.
        size: the number of ranks.
        counters: the amounts that this rank has sent, and the times of its kernels. ``steps`` counts
            exchanges; the bytes of comparisons are not included.
        exchanges: the number of exchanges, the same on every rank; it is stamped on payloads, and is the
            position in the noise.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        exact_own: bool,
        seed: int = 0,
        threads: int | None = None,
        noise_rank: int | None = None,
    ) -> None:
        self.exact_own = exact_own
        self.counters = Counters()
        self.exchanges = 0
        self._seed = seed
        self._kernels = Executors(torch.get_num_threads() if threads is None else threads)
        self._transport = transport
        self.rank, self.size = transport.rank, transport.size
        self._comm = Comm(Group(self.rank, self.size))
        self._noise_rank = self.rank if noise_rank is None else noise_rank
        self._batches: dict[tuple[object, ...], Batch] = {}

    def agree(
        self,
        settings: dict[str, Any],
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ) -> None:
        """Compares settings with those of the other ranks; waits for the other ranks.

        Args:
            settings: the settings, JSON-serializable.
            device: a device for which the process group has a backend.

        Raises:
            ExchangeError: settings differ (raised on every rank, with the difference).
        """
        if self.size > 1:
            self._transport.compare(settings, device)()

    def raise_everywhere(self, what: str, problem: Exception | None, device: torch.device) -> None:
        """Waits for the other ranks; raises the error of this rank, or one that another rank reports.

        Args:
            what: the ranks' place in the program; an error if other ranks are elsewhere.
            problem: the error of this rank, if any.
            device: a device for which the process group has a backend.
        """
        said = None if problem is None else f"{type(problem).__name__}: {problem}"
        try:
            self.agree({"what": what, "error": said}, device)
        except ExchangeError:
            if problem is None:
                raise
        if problem is not None:
            raise problem

    def settle(self) -> None:
        """Waits until CUDA devices have decoded all payloads.

        Raises:
            PayloadError: a payload was altered.
        """
        self._kernels.settle()

    @contextmanager
    def telling(
        self,
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ) -> Iterator[None]:
        """Reports an error in the ``with`` block to the other ranks; their next exchange raises it.

        This is for an error that only one rank may find, before or after an exchange. The other ranks get
        an :class:`ExchangeError`. After an error, waits for the other ranks.

        Args:
            device: see :meth:`agree`.
        """
        try:
            yield
        except Exception as error:
            with contextlib.suppress(Exception):  # The others may have failed, or have ended.
                self.agree({"what": f"{type(error).__name__}: {error}"}, device)
            raise

    @torch.no_grad()
    def gather(self, part: torch.Tensor, content: str, codec: Codec) -> torch.Tensor:
        """Gathers every rank's tensor.

        Args:
            part: this rank's float32, float16 or bfloat16 tensor, of the same shape and dtype on all ranks.
            content: a description of the tensor for messages.
            codec: the codec that encodes the tensor.

        Returns:
            The ranks' tensors in rank order, shape=(size, ...).

        Raises:
            TypeError: the tensor has another dtype.
            ExchangeError: shapes or dtypes differ, or the ranks make different exchanges (raised on every
                rank); or another rank could not encode its tensor.
            PayloadError: a payload was altered (raised on every rank).
        """
        if self.size == 1:
            return part.unsqueeze(0)
        part = part.contiguous()
        parts = part.new_empty((self.size, *part.shape))
        rows = self._exchange("gather", part, [part], content, codec)
        with self._receiving(part.device):
            for rank in range(self.size):
                self._decode(codec, rows[rank : rank + 1], parts[rank], content, rank)
        if self._keeps_own(rows):
            parts[self.rank] = part
        return parts

    @torch.no_grad()
    def sum(self, part: torch.Tensor, content: str, codec: Codec) -> torch.Tensor:
        """The sum of all ranks' tensors, added in float32 in rank order.

        Arguments and errors are the same as in :meth:`gather`.

        Returns:
            The sum, in the shape and dtype of ``part``.
        """
        if self.size == 1:
            return part
        part = part.contiguous()
        return self._added("sum", part, [part], part, content, codec)

    @torch.no_grad()
    def reduce_scatter(
        self,
        whole: torch.Tensor,
        content: str,
        codec: Codec,
        *,
        scale: float = 1.0,
    ) -> torch.Tensor:
        """This rank's share of the sum of all ranks' tensors, added in float32 in rank order.

        Args:
            whole: this rank's tensor, shape=(size * n, ...), with a dtype as in :meth:`gather`.
            content: a description of the tensor for messages.
            codec: the codec that encodes each share.
            scale: a factor on the sum, applied before the sum is rounded to the tensors' dtype.

        Returns:
            This rank's share of the sum, shape=(n, ...): rank ``r`` has the ``r``-th share.

        Raises:
            ValueError: ``whole`` cannot be divided into equal shares.
            TypeError, ExchangeError, PayloadError: see :meth:`gather`.
        """
        if self.size == 1:
            return whole if scale == 1 else whole * scale
        with self.telling(whole.device):
            if not whole.dim() or whole.shape[0] % self.size:
                raise ValueError(
                    f"reduce_scatter: expected a multiple of {self.size} samples, one share a rank, got "
                    f"shape {tuple(whole.shape)}"
                )
        whole = whole.contiguous()
        shares = list(whole.chunk(self.size))
        own = shares[self.rank]
        return self._added("reduce_scatter", whole, shares, own, content, codec, scale)

    def _receiving(self, device: torch.device) -> AbstractContextManager[None]:
        """A context for work that may fail on one rank after the other ranks have begun another exchange.

        On a CUDA device, the other ranks may have begun exchanges of other groups: they notice the error
        when their next exchange here begins, and this rank does not wait for that.
        """
        return contextlib.nullcontext() if device.type in CUDA_KERNELS else self.telling(device)

    def _exchange(
        self,
        kind: str,
        tensor: torch.Tensor,
        parts: Sequence[torch.Tensor],
        content: str,
        codec: Codec,
    ) -> torch.Tensor:
        """Sends the only part to all ranks, or each part to its rank.

        A rank that cannot encode sends zeros, which do not begin a valid payload: the other ranks do not
        wait for this rank, and raise an error.

        Returns:
            The ranks' payloads, shape=(size, bytes), uint8.
        """
        with self.telling(tensor.device):
            if str(tensor.dtype).removeprefix("torch.") not in ENCODABLE:
                raise TypeError(
                    f"{content}: expected one of {', '.join(ENCODABLE)}, got {tensor.dtype}"
                )
            size = codec.payload_bytes(tuple(parts[0].shape))
            check_gather(content, size, self.size)
            self._raise_earlier()
            message = torch.empty(size * len(parts), dtype=torch.uint8, device=tensor.device)
        self.exchanges += 1
        self.counters.steps += 1
        self.counters.uncompressed_bytes += tensor.numel() * tensor.element_size()
        self.counters.encoded_elements += tensor.numel()
        settings = {
            "what": f"{kind} of {content}",
            "number": self.exchanges,
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype),
        }
        settle = self._transport.compare(settings, tensor.device)
        problem = None
        try:
            self._encode(codec, parts, message)
        except Exception as error:
            problem = error
            message.zero_()
        try:
            settle()
        except Exception:
            # This was no exchange: a rank that has raised an error has not begun one.
            self.exchanges -= 1
            raise
        if len(parts) == 1:
            collective = self._comm.all_gather(message)
        else:
            collective = self._comm.all_to_all(message, (size,) * self.size)
        rows = self._send(collective, f"{collective.kind}.{content}.{message.numel()}")
        if problem is not None:
            with self._receiving(tensor.device):
                raise problem
        return rows

    def _send(self, collective: Collective, name: str) -> torch.Tensor:
        """Runs a collective whose bytes are counted, and returns its result."""
        collective.count(self.counters)
        with phase("send"):
            return self._transport.run(collective, name)

    def _raise_earlier(self) -> None:
        """Raises what a device has met in an earlier exchange."""
        self._kernels.begin_step()

    def _encode(self, codec: Codec, parts: Sequence[torch.Tensor], message: torch.Tensor) -> None:
        with timed("encode", self.counters):
            self._kernels.order(message)
            kernels = self._batch(codec, parts)
            steps, nothing = [self.exchanges] * len(parts), [None] * len(parts)

            def write(values: Sequence[torch.Tensor]) -> None:
                kernels.encode([one.view(-1) for one in values], nothing, nothing, steps, message)

            write(parts)
            if len(parts) > 1 and self._flagged(message.view(len(parts), -1)):
                # Each rank gets one of the payloads only, and has to see it.
                write([torch.full_like(part, math.nan) for part in parts])

    def _batch(
        self, codec: Codec, parts: Sequence[torch.Tensor], content: str = "", first: int = 0
    ) -> Batch:
        """The kernels for parts of the same shape, whose payloads follow each other in a message.

        They are kept: if a device reports an error of this exchange in a later one, the batch that met the
        error explains it, and has to know what it decodes, and the rank of its first payload.
        """
        shape = tuple(parts[0].shape)
        key = codec, shape, len(parts), parts[0].device, content, first
        if key not in self._batches:
            size, numbers = codec.payload_bytes(shape), range(len(parts))
            noise = [NoiseKey(self._seed, self._noise_rank, number) for number in numbers]
            entries = [Entry(codec, shape, OFF, noise[n], n * size) for n in numbers]
            batch = self._kernels.batch(entries, None, parts[0])
            batch.name_senders(lambda _, row: (content, first + row))
            if len(self._batches) >= _MOST_BATCHES:
                del self._batches[next(iter(self._batches))]
            self._batches[key] = batch
        return self._batches[key]

    def _added(
        self,
        kind: str,
        tensor: torch.Tensor,
        parts: Sequence[torch.Tensor],
        own: torch.Tensor,
        content: str,
        codec: Codec,
        scale: float = 1.0,
    ) -> torch.Tensor:
        """The sum of the payloads that this rank gets, in the shape and dtype of its part ``own``."""
        rows = self._exchange(kind, tensor, parts, content, codec)
        out = torch.empty_like(own)
        with self._receiving(own.device):
            if not self._keeps_own(rows):
                self._decode(codec, rows, out, content, scale=scale)
                return out
            total = torch.zeros(own.shape, dtype=torch.float32, device=own.device)
            decoded = torch.empty_like(total)
            for rank in range(self.size):
                # Its own as well: every rank has to find an altered payload.
                self._decode(codec, rows[rank : rank + 1], decoded, content, rank)
                total += own if rank == self.rank else decoded
            out.copy_(total * scale)
        return out

    def _decode(
        self,
        codec: Codec,
        rows: torch.Tensor,
        out: torch.Tensor,
        content: str,
        first: int = 0,
        *,
        scale: float = 1.0,
    ) -> None:
        """Adds up the payloads of consecutive ranks, from rank ``first`` on."""
        try:
            with timed("decode", self.counters):
                self._kernels.order(rows)
                keep_from_reuse(rows, out)
                kernels = self._batch(codec, [out], content, first)
                kernels.decode_sum([out.view(-1)], [self.exchanges], rows, scale)
        except BatchPayloadError as error:
            raise explained(error, rows[error.rank], content, first + error.rank) from None

    def _keeps_own(self, rows: torch.Tensor) -> bool:
        """Whether this rank takes its own tensor unencoded.

        It does not if its payload holds an Inf or a NaN: other ranks then get an Inf or a NaN in place of
        finite numbers beyond the codec's range, and this rank must get the same.
        """
        return self.exact_own and not self._flagged(rows[self.rank : self.rank + 1])

    @staticmethod
    def _flagged(payloads: torch.Tensor) -> bool:
        return bool((payloads[:, FLAGS_OFFSET] & FLAG_NONFINITE).any())
