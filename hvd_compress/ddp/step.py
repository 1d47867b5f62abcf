"""The buckets of one backward pass: sent from hooks, decoded as they come back."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from hvd_compress.ddp.agreement import Agreement
from hvd_compress.ddp.cargo.base import Cargo
from hvd_compress.ddp.collectives import Collectives
from hvd_compress.ddp.parcel import Parcel
from hvd_compress.torch_common.executors import Executors


class Step:
    """Sends parcels and finishes them; nothing waits while gradients are still being computed.

    Parcels are decoded as they come. But one non-finite gradient makes the whole step worthless, so that no
    residual may count it as sent, and this is known with the last parcel only. Until then, gradients that
    are needed to take residuals back stay as they are: in the bucket, where there is no other copy of them,
    and outside, as DDP copies a parcel's averages there when its future is complete.

    On a CUDA device all of this is put behind the parcels' collectives in a stream, when the last one is
    added at the latest, and futures are complete for the host before anything has been done.

    Args:
        collectives: the ranks.
        kernels: decode payloads, and read their flags.
        agreement: a comparison under way, or None; until it is settled, everything is held back, because
            ranks that differ would mix up each other's messages.
        prepare: called once they agree, by every rank, before anything is sent; may wait for the others.
        write: writes a parcel's averages to its buffer.
        take_back: takes back a parcel's residuals, where a word on their device is not 0, if it is given
            one.

    Attributes:
        last_index: of the latest bucket.
    """

    def __init__(
        self,
        collectives: Collectives,
        kernels: Executors,
        agreement: Agreement | None,
        prepare: Callable[[], None],
        write: Callable[[Parcel], None],
        take_back: Callable[[Parcel, torch.Tensor | None], None],
    ) -> None:
        self._collectives = collectives
        self._kernels = kernels
        self._agreement = agreement
        self._prepare = prepare
        self._write = write
        self._take_back = take_back
        self._parcels: list[Parcel] = []
        self._kept: list[Parcel] = []
        self._lock = threading.Lock()
        self._outstanding = 1  # close() is the last to be counted off.
        self._dropped = False
        self._word: torch.Tensor | None = None
        self._error: Exception | None = None
        self.last_index = -1

    def add(self, parcel: Parcel) -> None:
        """Sends one bucket, in the order of the buckets, which is the same on every rank."""
        self._parcels.append(parcel)
        if self._agreement is None:
            self._send(parcel)

    def close(self) -> None:
        """Called after the last bucket.

        Here an agreement is waited for: every rank comes here without waiting for another one before, and
        has started it.

        Raises:
            ExchangeError: ranks differ.
        """
        if self._agreement is not None:
            self._agreement.settle()
            self._prepare()
            for parcel in self._parcels:
                self._send(parcel)
        with self._collectives.behind():
            self._count_off()
        if self._error is not None:
            self._fail(self._error)  # Parcels added since then would wait for ever.

    def wait(self) -> None:
        """Waits for all parcels, and raises what went wrong with one of them as what it was."""
        for parcel in self._parcels:
            parcel.future.wait()

    def _send(self, parcel: Parcel) -> None:
        parcel.waiting = len(parcel.dense) + (parcel.cargo is not None)
        with self._lock:
            self._outstanding += 1
        if not parcel.waiting:
            with self._collectives.behind():
                self._arrived(parcel)
        if parcel.cargo is not None:
            parcel.cargo.send(lambda error: self._returned(parcel, error))
        for dense in parcel.dense:
            work = self._collectives.average(dense.sent)
            self._collectives.when_over(work, lambda error: self._returned(parcel, error))

    def _returned(self, parcel: Parcel, error: Exception | None) -> None:
        # Called by a process group's thread, or at once where a collective is over already.
        if error is not None:
            self._fail(error)
            return
        try:
            with self._lock:
                parcel.waiting -= 1
                complete = parcel.waiting == 0
            if complete:
                self._arrived(parcel)
        except Exception as problem:
            self._fail(problem)

    def _arrived(self, parcel: Parcel) -> None:
        if parcel.cargo is not None:
            self._judge(parcel.cargo)
        if parcel.writable:
            self._write(parcel)
        if not parcel.recallable:
            self._resolve(parcel)
        if parcel.recallable:
            with self._lock:
                self._kept.append(parcel)
        self._count_off()

    def _judge(self, cargo: Cargo) -> None:
        payloads = cargo.payloads
        word = self._kernels.flags(payloads, self._word) if payloads else None
        if word is not None:
            self._word = word
        elif cargo.nonfinite:
            with self._lock:
                self._dropped = True

    def _count_off(self) -> None:
        with self._lock:
            self._outstanding -= 1
            over = self._outstanding == 0
        if over:
            for parcel in self._kept:
                self._complete(parcel)

    def _complete(self, parcel: Parcel) -> None:
        try:
            if self._dropped or self._word is not None:
                self._take_back(parcel, None if self._dropped else self._word)
            if not parcel.writable:
                self._write(parcel)
        except Exception as error:
            self._fail(error)
        else:
            self._resolve(parcel)

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._error = self._error or error
        for parcel in self._parcels:
            self._resolve(parcel, self._error)

    def _resolve(self, parcel: Parcel, error: Exception | None = None) -> None:
        with self._lock:
            if parcel.future.done():
                return
            if error is None:
                parcel.future.set_result(parcel.buffer)
            else:
                parcel.future.set_exception(error)  # type: ignore[arg-type]
