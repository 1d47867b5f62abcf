"""The state of :func:`hvd_compress.distributed.all_reduce`: codec, exchange and residuals."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Unpack

import torch
import torch.distributed as dist

from hvd_compress.codecs import Codec
from hvd_compress.codecs.calls import expect_instance, guard
from hvd_compress.distributed.keys import Keys, like, pairs, parts, writable
from hvd_compress.distributed.ranks import CallRanks
from hvd_compress.distributed.rebinding import RebindingCompressor
from hvd_compress.engine.options import Options
from hvd_compress.engine.residuals import norm_of
from hvd_compress.engine.slots import Slot
from hvd_compress.exchanges.routing import Route
from hvd_compress.process_group.compressor import count
from hvd_compress.process_group.packing import Packer
from hvd_compress.process_group.ranks import exchanges_of
from hvd_compress.process_group.step import Bucket
from hvd_compress.ranks.errors import ExchangeError

Accept = Callable[[], bool]
"""A function that is called when the results have arrived, and returns whether they are used, the same on
every rank; raises if whether they count is not known."""


class Work:
    """The result of ``all_reduce(..., async_op=True)``; used like ``torch.distributed.Work``.

    Args:
        bucket: the call's tensors.
        over: a function that is called once, at the end of :meth:`wait`.
        check: a function that is called once before ``over``, unless the call has failed; may raise an
            error.
    """

    def __init__(
        self, bucket: Bucket, over: Callable[[], None], check: Callable[[], None] | None = None
    ) -> None:
        self._bucket = bucket
        self._over: Callable[[], None] | None = over
        self._check = check

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would return, or raise, at once."""
        return self._bucket.future.done()

    def settle(self, *, dropped: bool) -> None:
        """Settles residuals after :meth:`wait` has raised; other ranks may have received this rank's data.

        Args:
            dropped: whether no rank uses the results.
        """
        self._bucket.settle(dropped)

    def wait(self) -> bool:
        """Waits until the tensors hold the results; has to be called before their next ``all_reduce``.

        On a CUDA device, the current stream waits, and the host does not.

        Returns:
            True.

        Raises:
            ExchangeError: the ranks' calls differ, or another rank has failed.
            PayloadError: a payload was altered in transit.
        """
        try:
            self._bucket.future.wait()
            check, self._check = self._check, None
            if check is not None:
                check()
        finally:
            over, self._over = self._over, None
            if over is not None:
                over()
        return True


@guard
class Compressor(RebindingCompressor):
    """The codec, exchange and residuals of :func:`hvd_compress.distributed.all_reduce`.

    Holds a residual for each key that ``all_reduce`` is called with. All tensors with the same key have the
    same shape and dtype. The first call joins the ranks; in every call, the ranks compare what they are
    about to send.

    Args:
        codec: the codec that encodes tensors, a :class:`~hvd_compress.Route`, or a codec's name.
        process_group: the ranks; None is the ``group`` of the first call.
        options: see :class:`~hvd_compress.engine.options.Options`. Name patterns match keys, and
            ``warmup_steps`` counts the calls with each key.

    Raises:
        TypeError, ValueError: an argument is wrong, "expected X, got Y".
    """

    _remedy = "give it to hvd_compress.distributed.all_reduce on every rank"
    _idle_after = "wait() of every all_reduce"

    def __init__(
        self,
        codec: Codec | Route | str,
        *,
        process_group: dist.ProcessGroup | None = None,
        **options: Unpack[Options],
    ) -> None:
        self._keys = Keys()
        super().__init__(self._keys.slots.values(), codec, CallRanks(process_group), **options)

    def __setstate__(self, state: dict[str, Any]) -> None:
        Compressor.__init__(self, state["codec"], **state["options"])
        self._continue_copy(state)
        self._came_from = state["came from"]
        self._keys.slots.update({slot.name: slot for slot in state["slots"]})

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The process group of the ranks; None is the default group."""
        return self._ranks.process_group

    @property
    def exchange(self) -> str:
        """The exchange that the compressor was made with, such as ``"auto"``."""
        return self._routes.exchange

    # Later calls, and other threads, could not write to what inference_mode makes.
    @torch.inference_mode(False)
    @torch.no_grad()
    def reduce(
        self,
        tensor: torch.Tensor | Sequence[torch.Tensor],
        key: str | Sequence[str],
        op: Any,
        group: dist.ProcessGroup | None = None,
        accept: Accept | None = None,
        device: torch.device | None = None,
    ) -> Work:
        """Starts :func:`hvd_compress.distributed.all_reduce`, with the same arguments and errors.

        Args:
            accept: a function that ``wait()`` calls when the results have arrived, before residuals are
                settled. If the results are not used, or the function raises an error, which ``wait()``
                raises, too, residuals are as before the call.
            device: the device of the tensors, for a call that may have none of them; the ranks then compare
                their settings alone.
        """
        self._ranks.take(group)
        self._bind()
        several = list(tensor) if isinstance(tensor, Sequence) else [tensor]
        devices = (one.device for one in several if isinstance(one, torch.Tensor))
        self._begin_call(next(devices, device))
        try:
            with self._keys.restored_on_error():
                given, keys = pairs(tensor, key) if several or device is None else ([], [])
                named = dict(zip(keys, given, strict=True))
                own, numbers = parts(named, self._ranks.process_group)
                tensors = list(own.values())
                scale = _scale(op, self._ranks.group.size)
                slots = self._slots_for(tensors, keys)
                tensors = [writable(one) for one in tensors]
                settings = self._configuration(slots)
                settings |= {"order of tensors": keys, "op": str(op), "part of": numbers}
                # The owners of parts depend on the numbers of the keys.
                settings["numbers of keys"] = [slot.index for slot in slots]
                bucket = Bucket(tensors, self._ranks.device, scale)
                self._begin_encoding()
                self._ranks.begin_step()
                self._packer.pack(bucket, zip(slots, tensors, tensors, strict=True), self.counters)
        except Exception as error:
            self._ranks.tell(error)
            raise
        bucket.held = accept is not None
        self._ranks.send(bucket, exchanges_of(slots), settings)
        for slot in slots:
            slot.pending = True
        self._ranks.under_way.append(bucket)
        self.counters.steps += 1
        asks = None if accept is None else functools.partial(self._accept, bucket, accept)
        return Work(bucket, lambda: self._end(bucket, slots), asks)

    def refuse(self, problem: Exception, device: torch.device) -> None:
        """Makes the other ranks raise an :class:`ExchangeError` from a call that this rank cannot make.

        Args:
            problem: the error that prevents the call on this rank.
            device: the device of the call's tensors.
        """
        self._bind()
        self._begin_call(device)
        self._ranks.tell(problem)

    def exchanges(self, key: str) -> int:
        """The number of calls with a key since its warm-up began; 0 before the first one."""
        slot = self._keys.slots.get(key)
        return 0 if slot is None else slot.exchanges

    def restart_warmup(self, keys: Iterable[str]) -> None:
        """Restarts the ``warmup_steps`` of some keys at their next call; every rank has to call it."""
        for key in keys:
            self._keys.slots[key].exchanges = 0

    def end_warmup(self, keys: Iterable[str]) -> None:
        """Ends the ``warmup_steps`` of some keys before their next call; every rank has to call it."""
        for key in keys:
            slot = self._keys.slots[key]
            slot.exchanges = max(slot.exchanges, self.warmup_steps)

    def set_codec(self, codec: Codec | Route | str | None, layers: str = "*") -> None:
        """Changes the codec between two calls; every rank has to make the same change.

        For the rest, see :meth:`.CompressorBase.set_codec`; ``layers`` also applies to keys of later calls.

        Raises:
            ExchangeError: tensors are being exchanged, or there was no call yet.
            ValueError: no key matches.
        """
        if self._ranks.comparisons is None:
            raise ExchangeError("set_codec: expected a call of all_reduce before, got none")
        super().set_codec(codec, layers)

    def drop_step(self) -> None:
        """Undoes the last call of ``all_reduce`` for all of its tensors; every rank has to call it.

        For the rest, see :meth:`.CompressorBase.drop_step`. If some rank has not called this method, the
        next ``all_reduce`` raises an error on all ranks.
        """
        super().drop_step()
        self._ranks.drops += 1

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's residuals, noise positions and owned parts, by key; every rank saves them."""
        self._expect_idle("state_dict")
        return {**super().state_dict(), "keys": self._keys.kinds, "member": self._member}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from the :meth:`state_dict` of the same rank; may be called before the first call.

        A state from before the first call has no keys, and loading it removes all keys.

        Raises:
            ValueError: the state has another rank, number of ranks or seed, or other tensors. Nothing is
                changed then.
            ExchangeError: tensors are being exchanged, or there is no process group.
        """
        self._expect_idle("load_state_dict")
        self._bind()
        with self._keys.of_states("load_state_dict", [state], self._route_of):
            super().load_state_dict(state)
        if not self._keys.slots:
            self._keys.routed.clear()

    def load_resized(self, states: Iterable[dict[str, Any]]) -> None:
        """Continues from the states of all ranks of a job of another size, in rank order."""
        self._expect_idle("load_resized")
        states = list(states)
        self._bind()
        with self._keys.of_states("load_resized", states, self._route_of):
            super().load_resized(states)

    def share_norms(self, *, early: bool = False) -> None:
        """Sends the norm of this rank's residuals to all ranks without waiting, for :meth:`rebind`'s log.

        All ranks that :meth:`rebind` has brought together call it equally often: after an exchange; or
        before an exchange (``early``) that may fail on some ranks only.
        """
        norms = self._norms
        assert norms is not None
        norms.shares, norms.early = norms.shares + 1, early
        share = norms.shares
        own = norm_of(self._slots, norms.ranks.device).view(1)

        def keep(error: Exception | None) -> None:
            # A group has several threads, which may finish an earlier gathering last.
            if error is None and share > norms.arrived:
                norms.arrived, norms.values = share, rows.view(-1)

        # If a rank is lost, the next exchange reports it.
        with contextlib.suppress(RuntimeError):
            rows, work = norms.ranks.all_gather(own)
            norms.ranks.when_over(work, keep)

    def close(self) -> None:
        """Closes the connections to the other ranks after an error, so that they notice it at once.

        Nothing can be sent until :meth:`rebind` has been called with another process group.
        """
        self._ranks.close()
        if self._norms is not None:
            self._norms.ranks.close()

    def _begin_call(self, device: torch.device | None) -> None:
        if self._ranks.begin_call(device, first=not self._keys.slots):
            self._packer = Packer(self._batches, self._routes, self._ranks.device)

    def _bind(self) -> None:
        if not self._ranks.joined:
            self._join()
            self._ranks.expect_origin(self._slots)
            self._ranks.joined = True
            self._came_from = self._ranks.group.size
            for slot in self._keys.slots.values():
                slot.route = slot.route.among(self._came_from)

    def _slots_for(self, tensors: Sequence[torch.Tensor], keys: Sequence[str]) -> list[Slot]:
        """The record of each tensor, with a route."""
        slots = self._keys.of(tensors, keys, self._ranks.device)
        pairs = zip(slots, tensors, strict=True)
        new = [(slot, one) for slot, one in pairs if slot.name not in self._keys.routed]
        for slot, tensor in new:
            slot.parameter = like(tensor)  # A loaded state's one is elsewhere.
        if new:
            self._routes.choose([slot for slot, _ in new])
        self._keys.routed.update(keys)
        if any(slot.exchanges for slot in slots):
            self._routes.expect_encoding()  # A key has come again, so that all are known.
        return slots

    def _route_of(self, slot: Slot, dtype: str) -> Route:
        route = self._routes.router_of(slot.name).choose(slot.name, slot.shape, dtype)
        ranks = self._ranks
        return route.among(ranks.group.size) if ranks.joined else route

    def _accept(self, bucket: Bucket, accept: Accept) -> None:
        used = accept()
        with self._ranks.collectives.behind():
            bucket.settle(bucket.dropped if used else True)

    def _end(self, bucket: Bucket, slots: Sequence[Slot]) -> None:
        # Not by the process group's thread: whether a key may be used again must not depend on time.
        self._ranks.under_way.remove(bucket)
        for slot in slots:
            slot.pending = False
        count([bucket], self.counters)


def _scale(op: Any, ranks: int) -> float:
    """The factor on the sum of the ranks' tensors; raises ``ValueError`` for another operation."""
    if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        raise ValueError(f"all_reduce.op: expected ReduceOp.AVG or ReduceOp.SUM, got {op}")
    return 1 / ranks if op == dist.ReduceOp.AVG else 1.0


def group_of(given: Any) -> dist.ProcessGroup | None:
    """The process group of what :func:`compressor_of` would return."""
    return given.process_group if isinstance(given, Compressor) else None


def compressor_of(given: Any, where: str, write: str, **options: Any) -> Compressor:
    """The given compressor, or a new one for a given codec, for an object that does not share it.

    Args:
        given: a compressor, a codec, a route or a codec's name.
        where: the caller's name, for the message.
        write: the caller's line, with ``{}`` in place of the argument.
        options: the options of a new compressor.

    Raises:
        TypeError, ValueError: ``given`` is something else.
    """
    if isinstance(given, Codec | Route | str):
        given = Compressor(given, **options)
    expect_instance(where, given, Compressor, write, "Int8()")
    compressor: Compressor = given
    compressor._use.remedy = f"call step() of the {where} that has it, on every rank"
    return compressor
