"""The ranks that share a model's layers, and how they exchange activations and error signals."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist

from hvd_compress.codecs import Codec, ErrorFeedback, NoiseKey, PayloadError
from hvd_compress.codecs.payload import FLAG_NONFINITE, FLAGS_OFFSET
from hvd_compress.exchange.counters import Counters
from hvd_compress.exchange.limits import check_gather
from hvd_compress.kernels.batch import Entry, altered_payload, on_host
from hvd_compress.parallel.transport import ProcessGroupTransport, Transport
from hvd_compress.torch_common.comm import Collective
from hvd_compress.torch_common.executors import Executors

Content = Literal["activations", "error signals", "parameters"]
"""What is in a message."""

_OFF = ErrorFeedback(alpha=0.0)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class ParallelGroup:
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
            :class:`hvd_compress.parallel.horovod.HorovodTransport`, in place of a process group's.
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
        self.exact_own = exact_own
        self.counters = Counters()
        self._step = 0  # Counts exchanges; stamped on payloads, and the position in the noise.
        self._seed = seed
        self._kernels = Executors(torch.get_num_threads() if threads is None else threads)
        self._transport = transport or ProcessGroupTransport(process_group)
        self.rank, self.size = self._transport.rank, self._transport.size
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

    def agree(
        self,
        settings: dict[str, Any],
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ) -> None:
        """Compares settings with those of the other ranks; waits for them.

        Args:
            settings: fit for JSON.
            device: with a backend in the process group.

        Raises:
            ExchangeError: on every rank, naming what differs.
        """
        if self.size > 1:
            self._transport.compare(settings, device)()

    @contextmanager
    def telling(self) -> Iterator[None]:
        """What raises in here raises on every rank: others get an :class:`ExchangeError` next time.

        For what one rank may find, before an exchange or after it. Waits for the others then.
        """
        try:
            yield
        except Exception as error:
            with contextlib.suppress(Exception):  # The others may have failed, or have ended.
                self.agree({"what": f"{type(error).__name__}: {error}"})
            raise

    @torch.no_grad()
    def gather(self, part: torch.Tensor, content: Content, codec: Codec) -> torch.Tensor:
        """Every rank's tensor.

        Args:
            part: float32, float16 or bfloat16, of one shape and dtype on all ranks.
            content: for messages.
            codec: what the tensor is encoded with.

        Returns:
            shape=(size, ...): the ranks' tensors, in rank order.

        Raises:
            TypeError: of another dtype.
            ExchangeError: on every rank, shapes or dtypes differ, or the ranks make different exchanges.
            PayloadError: on every rank, a payload was altered.
        """
        if self.size == 1:
            return part.unsqueeze(0)
        part = part.contiguous()
        settle = self._begin("gather", content, part, codec)
        message = self._encode(codec, [part])
        settle()
        rows = self._run(Collective("all_gather", message, self.size, self.rank, "all"), content)
        parts = part.new_empty((self.size, *part.shape))
        with self.telling():
            for rank, row in enumerate(rows):
                self._decode(codec, row, parts[rank], rank, content)
        if self._keeps_own(rows):
            parts[self.rank] = part
        return parts

    @torch.no_grad()
    def sum(self, part: torch.Tensor, content: Content, codec: Codec) -> torch.Tensor:
        """The sum of all ranks' tensors, added in float32 in rank order.

        Args, errors: as for :meth:`gather`.

        Returns:
            Like ``part``.
        """
        if self.size == 1:
            return part
        part = part.contiguous()
        settle = self._begin("sum", content, part, codec)
        message = self._encode(codec, [part])
        settle()
        rows = self._run(Collective("all_gather", message, self.size, self.rank, "all"), content)
        return self._added(rows, codec, part, content)

    @torch.no_grad()
    def reduce_scatter(self, whole: torch.Tensor, content: Content, codec: Codec) -> torch.Tensor:
        """This rank's share of the sum of all ranks' tensors, added in float32 in rank order.

        Args:
            whole: shape=(size * n, ...), otherwise as for :meth:`gather`.
            content: for messages.
            codec: what each share is encoded with.

        Returns:
            shape=(n, ...): rank ``r`` has the ``r``-th share.

        Raises:
            ValueError: ``whole`` cannot be shared out equally.
            TypeError, ExchangeError, PayloadError: as for :meth:`gather`.
        """
        if self.size == 1:
            return whole
        with self.telling():
            if not whole.dim() or whole.shape[0] % self.size:
                raise ValueError(
                    f"reduce_scatter: expected a multiple of {self.size} samples, one share a rank, got "
                    f"shape {tuple(whole.shape)}"
                )
        whole = whole.contiguous()
        settle = self._begin("reduce_scatter", content, whole, codec)
        shares = list(whole.chunk(self.size))
        message = self._encode(codec, shares)
        if self._flagged(message.view(self.size, -1)):
            # Each rank gets one of the payloads only, and has to see it.
            shares = [torch.full_like(share, math.nan) for share in shares]
            message = self._encode(codec, shares)
        settle()
        sizes = (message.numel() // self.size,) * self.size
        rows = self._run(
            Collective("all_to_all", message, self.size, self.rank, "all", sizes), content
        )
        return self._added(rows, codec, shares[self.rank], content)

    def _begin(
        self, kind: str, content: Content, tensor: torch.Tensor, codec: Codec
    ) -> Callable[[], None]:
        with self.telling():
            if tensor.dtype not in _DTYPES:
                expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
                raise TypeError(f"{content}: expected one of {expected}, got {tensor.dtype}")
            check_gather(content, codec.payload_bytes(tuple(tensor.shape)), self.size)
            self._kernels.check()  # What a device has met in an earlier exchange.
        self._step += 1
        self.counters.steps += 1
        self.counters.uncompressed_bytes += tensor.numel() * tensor.element_size()
        self.counters.encoded_elements += tensor.numel()
        settings = {
            "what": f"{kind} of {content}",
            "number": self._step,
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype),
        }
        compared = self._transport.compare(settings, tensor.device)

        def settle() -> None:
            try:
                compared()
            except Exception:
                self._step -= 1  # No exchange; a rank that has raised an error has not begun one.
                raise

        return settle

    def _encode(self, codec: Codec, parts: list[torch.Tensor]) -> torch.Tensor:
        started = time.perf_counter()
        size = codec.payload_bytes(tuple(parts[0].shape))
        message = torch.empty(size * len(parts), dtype=torch.uint8, device=parts[0].device)
        for number, part in enumerate(parts):
            self._kernels.encode(
                codec,
                tuple(part.shape),
                part.view(-1),
                message[number * size : (number + 1) * size],
                feedback=_OFF,
                residual=None,
                noise=NoiseKey(self._seed, self.rank, number, self._step),
            )
        self.counters.encode_seconds += time.perf_counter() - started
        return message

    def _run(self, collective: Collective, content: Content) -> torch.Tensor:
        collective.count(self.counters)
        name = f"{collective.kind}.{content}.{collective.message.numel()}"
        return self._transport.run(collective, name)

    def _added(
        self,
        rows: torch.Tensor,
        codec: Codec,
        own: torch.Tensor,
        content: Content,
    ) -> torch.Tensor:
        total = torch.zeros(own.shape, dtype=torch.float32, device=own.device)
        keeps = self._keeps_own(rows)
        with self.telling():
            for rank, row in enumerate(rows):
                if keeps and rank == self.rank:
                    # Decoded all the same: every rank has to find an altered payload.
                    self._decode(codec, row, torch.empty_like(total), rank, content)
                    total += own
                else:
                    self._decode(codec, row, total, rank, content, accumulate=True)
        return total.to(own.dtype)

    def _decode(
        self,
        codec: Codec,
        row: torch.Tensor,
        out: torch.Tensor,
        rank: int,
        content: Content,
        *,
        accumulate: bool = False,
    ) -> None:
        started = time.perf_counter()
        try:
            self._kernels.decode_sum(
                codec,
                tuple(out.shape),
                row.unsqueeze(0),
                out.view(-1),
                step=self._step,
                accumulate=accumulate,
            )
        except PayloadError as error:
            entry = Entry(codec, tuple(out.shape), _OFF, NoiseKey(), 0)
            named = altered_payload(entry, 0, self._step, rank, row) if on_host(row) else None
            raise PayloadError(f"{content}: {named or error}") from None
        finally:
            self.counters.decode_seconds += time.perf_counter() - started

    def _keeps_own(self, rows: torch.Tensor) -> bool:
        """Whether this rank takes its own tensor unencoded.

        Not where its payload holds an Inf or a NaN: other ranks get one then in place of finite numbers
        beyond the codec's range, and so must this rank.
        """
        return self.exact_own and not self._flagged(rows[self.rank : self.rank + 1])

    @staticmethod
    def _flagged(payloads: torch.Tensor) -> bool:
        return bool((payloads[:, FLAGS_OFFSET] & FLAG_NONFINITE).any())
