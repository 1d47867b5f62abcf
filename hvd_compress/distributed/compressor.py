"""A compressed all-reduce of any tensors, and its state: codec, exchange and residuals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Unpack

import torch
import torch.distributed as dist

from hvd_compress.codecs import Codec
from hvd_compress.codecs.calls import expect_instance, guard
from hvd_compress.distributed.keys import Keys, pairs, parts, writable
from hvd_compress.distributed.ranks import CallRanks
from hvd_compress.distributed.rebinding import Meeting, Members
from hvd_compress.engine.options import Options
from hvd_compress.engine.parameters import Slot, like
from hvd_compress.engine.residuals import norm_of
from hvd_compress.exchanges.routing import Route
from hvd_compress.process_group.compressor import ProcessGroupCompressor, continue_copy
from hvd_compress.process_group.packing import Packer
from hvd_compress.process_group.ranks import exchanges_of
from hvd_compress.process_group.step import Bucket
from hvd_compress.ranks.counters import Counters
from hvd_compress.ranks.errors import ExchangeError

Accept = Callable[[], bool]
"""A function that is called when the results have arrived, and returns whether they are used, the same on
every rank; raises if whether they count is not known."""


class Work:
    """The result of ``all_reduce(..., async_op=True)``; used like ``torch.distributed.Work``.

    Args:
        bucket: the call's tensors.
        slots: their records.
        ranks: the ranks.
        counters: a function that returns the counters, to which the call's traffic is added.
        accept: see :data:`Accept`.
    """

    def __init__(
        self,
        bucket: Bucket,
        slots: Sequence[Slot],
        ranks: CallRanks,
        counters: Callable[[], Counters],
        accept: Accept | None = None,
    ) -> None:
        self._bucket, self._slots, self._ranks, self._counters = bucket, slots, ranks, counters
        self._accept = accept
        self._over = False
        for slot in slots:
            slot.pending = True
        ranks.under_way.append(bucket)

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
            accept, self._accept = self._accept, None
            if accept is not None:
                used = accept()
                with self._ranks.collectives.behind():
                    self._bucket.settle(self._bucket.dropped if used else True)
        finally:
            # Not by the process group's thread: whether a key may be used again must not depend on time.
            if not self._over:
                self._over = True
                self._ranks.under_way.remove(self._bucket)
                for slot in self._slots:
                    slot.pending = False
                self._bucket.count(self._counters())
        return True


@guard
class Compressor(ProcessGroupCompressor):
    """The codec, exchange and residuals of :func:`hvd_compress.distributed.all_reduce`.

    Holds a residual for each key that ``all_reduce`` is called with. All tensors with the same key have the
    same shape and dtype. The first call joins the ranks; in every call, the ranks compare what they are
    about to send.

    Attributes:
        keys: the keys, with a record of each.
        members: the ranks of the process group, which may change.

    Args:
        codec: the codec that encodes tensors, a :class:`~hvd_compress.Route`, or a codec's name.
        process_group: the ranks; None is the ``group`` of the first call.
        options: see :class:`~hvd_compress.engine.options.Options`. Name patterns match keys, and
            ``warmup_steps`` counts the calls with each key.

    Raises:
        TypeError, ValueError: an argument is wrong, "expected X, got Y".
    """

    _remedy = "give it to hvd_compress.distributed.all_reduce on every rank"
    _ranks: CallRanks

    def __init__(
        self,
        codec: Codec | Route | str,
        *,
        process_group: dist.ProcessGroup | None = None,
        **options: Unpack[Options],
    ) -> None:
        self.keys = Keys()
        super().__init__(self.keys.slots.values(), codec, CallRanks(process_group), **options)
        self.keys.route_of = self._routes.expected
        self.members = Members(self._ranks, self.keys, self._state)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "came from": self.members.came_from}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Compressor.__init__(self, state["codec"], **state["options"])
        continue_copy(self, state)
        self.members.came_from = state["came from"]
        self.keys.slots.update({slot.name: slot for slot in state["slots"]})

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
            with self.keys.restored_on_error():
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
        self.counters.steps += 1
        return Work(bucket, slots, self._ranks, lambda: self.counters, accept)

    def refuse(self, problem: Exception, device: torch.device) -> None:
        """Makes the other ranks raise an :class:`ExchangeError` from a call that this rank cannot make.

        Args:
            problem: the error that prevents the call on this rank.
            device: the device of the call's tensors.
        """
        self._bind()
        self._begin_call(device)
        self._ranks.tell(problem)

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
        self._ranks.expect_idle("state_dict")
        return {**super().state_dict(), "keys": self.keys.kinds, "member": self.members.own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from the :meth:`state_dict` of the same rank; may be called before the first call.

        A state from before the first call has no keys, and loading it removes all keys.

        Raises:
            ValueError: the state has another rank, number of ranks or seed, or other tensors. Nothing is
                changed then.
            ExchangeError: tensors are being exchanged, or there is no process group.
        """
        self._ranks.expect_idle("load_state_dict")
        self._bind()
        with self.keys.of_states("load_state_dict", [state]):
            super().load_state_dict(state)
        if not self.keys.slots:
            self.keys.routed.clear()

    def load_resized(self, states: Iterable[dict[str, Any]]) -> None:
        """Continues from the states of all ranks of a job of another size, in rank order."""
        self._ranks.expect_idle("load_resized")
        states = list(states)
        self._bind()
        with self.keys.of_states("load_resized", states):
            super().load_resized(states)

    def rebind(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        lost: Iterable[dict[str, Any]] = (),
    ) -> None:
        """Continues among the ranks of another process group; all of them call it, including new ranks.

        Residuals keep their share in the ranks' average. A rank that stays multiplies its residual by
        ``K' / K``, if there were ``K`` ranks and now are ``K'``; the residuals of parts that it owned are
        included. A new rank begins with zero residuals, and with the keys of the other ranks and their
        positions in the noise. The residuals of a rank that has left are missing, unless ``lost`` holds
        them; a message in the log names these ranks, and the norm of what is missing if it is known.

        Args:
            process_group: the ranks; None is the default group, which may differ from the one before.
            lost: the latest available :meth:`state_dict` of each rank that has left, in CPU memory; the
                same on every rank that stays. The residuals in these states are shared out.

        Raises:
            ExchangeError: tensors are being exchanged; ranks have different seeds, or different keys or
                another order of keys; or something is wrong on another rank. Nothing is changed then.
            ValueError: a state in ``lost`` does not belong to a rank that has left, or has other keys; the
                other ranks raise an :class:`ExchangeError`. Nothing is changed then.
        """
        self.rebind_to(self.members.meet(process_group, lost))

    def rebind_to(self, meeting: Meeting) -> None:
        """Continues among ranks that have met: :meth:`.Members.move`."""
        self.members.move(meeting, self._join)

    def share_norms(self, *, early: bool = False) -> None:
        """Sends the norm of this rank's residuals to all ranks without waiting, for :meth:`rebind`'s log.

        All ranks that :meth:`rebind` has brought together call it equally often: after an exchange; or
        before an exchange (``early``) that may fail on some ranks only.
        """
        norms = self._ranks.norms
        assert norms is not None
        norms.share(norm_of(self._slots, norms.ranks.device).view(1), early=early)

    def close(self) -> None:
        """Closes the connections to the other ranks after an error, so that they notice it at once.

        Nothing can be sent until :meth:`rebind` has been called with another process group.
        """
        self._ranks.close()

    def _begin_call(self, device: torch.device | None) -> None:
        if self._ranks.begin_call(device, first=not self.keys.slots):
            self._packer = Packer(self._batches, self._routes, self._ranks.device)

    def _bind(self) -> None:
        if not self._ranks.joined:
            self._join()
            self._ranks.expect_origin(self._slots)
            self._ranks.joined = True
            self.members.came_from = self._ranks.group.size
            for slot in self.keys.slots.values():
                slot.route = slot.route.among(self._ranks.group.size)

    def _slots_for(self, tensors: Sequence[torch.Tensor], keys: Sequence[str]) -> list[Slot]:
        """The record of each tensor, with a route."""
        slots = self.keys.of(tensors, keys, self._ranks.device)
        pairs = zip(slots, tensors, strict=True)
        new = [(slot, one) for slot, one in pairs if slot.name not in self.keys.routed]
        for slot, tensor in new:
            slot.parameter = like(tensor)  # A loaded state's one is elsewhere.
        if new:
            self._routes.choose([slot for slot, _ in new])
        self.keys.routed.update(keys)
        if any(slot.exchanges for slot in slots):
            self._routes.expect_encoding()  # A key has come again, so that all are known.
        return slots


def _scale(op: Any, ranks: int) -> float:
    """The factor on the sum of the ranks' tensors; raises ``ValueError`` for another operation."""
    if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        raise ValueError(f"all_reduce.op: expected ReduceOp.AVG or ReduceOp.SUM, got {op}")
    return 1 / ranks if op == dist.ReduceOp.AVG else 1.0


def all_reduce(
    tensor: torch.Tensor | Sequence[torch.Tensor],
    state: Compressor,
    *,
    op: Any = dist.ReduceOp.AVG,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    key: str | Sequence[str] = "tensor",
) -> Work | None:
    """Averages or adds up the ranks' tensors like ``torch.distributed.all_reduce``, but encoded.

    All ranks of the group have to make the same calls in the same order, with tensors of the same dtypes
    and shapes. They compare keys, dtypes, shapes and settings with a short all_gather before any tensor is
    sent; the first call, and the first call with an exchange of several stages, wait for the result.

    The part of a tensor that a rank has not sent stays in ``state`` and is added to the next tensor with
    the same key (error feedback). If some rank's tensors hold an Inf or a NaN, every rank gets it, and all
    residuals of the call stay unchanged.

    Args:
        tensor: a float32, float16 or bfloat16 tensor of any shape, or a list of such tensors, which are
            sent together and may differ in dtype. The results are written over them. Float64 tensors,
            and those below the compressor's ``threshold``, are added up unencoded. If a ``DTensor`` is
            replicated, or sharded on one dimension of its mesh, each rank reduces its own part; the ranks
            have to be those that hold the same part.
        state: a compressor of this package, such as ``OneBit()``: the same one in every call.
        op: ``ReduceOp.AVG`` or ``ReduceOp.SUM``.
        group: the ranks; None is the compressor's ``process_group``, or the default group.
        async_op: whether to return as soon as the tensors are encoded. They must not be used before
            ``wait()`` has returned.
        key: the name of the tensor, the same in every call and on every rank; residuals, ``layers`` and
            ``exclude`` refer to tensors by this name. For a list of tensors, a list of keys, or one string,
            to which a dot and the position in the list are appended.

    Returns:
        With ``async_op``, a :class:`Work` whose ``wait()`` has to be called; otherwise None.

    Raises:
        TypeError, ValueError: an argument is wrong, "expected X, got Y". The other ranks then raise an
            :class:`ExchangeError`, if their arguments are right.
        ExchangeError: the ranks' calls or settings differ; a tensor with the same key is still being
            exchanged; another rank failed; there is no process group, or this rank is not in it.
        PayloadError: a payload was altered in transit.
    """
    expect_instance("all_reduce", state, Compressor, "all_reduce(tensor, {})", "OneBit()")
    work = state.reduce(tensor, key, op, group)
    if async_op:
        return work
    work.wait()
    return None
