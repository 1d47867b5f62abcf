"""The base of the compressors that send by torch.distributed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from typing import Any, ClassVar, NamedTuple, NoReturn, Unpack

import torch
import torch.distributed as dist

from hvd_compress.codecs import Codec
from hvd_compress.codecs.refusal import refuse
from hvd_compress.engine.batch import Batch
from hvd_compress.engine.compressor import CompressorBase
from hvd_compress.engine.executors import CUDA_KERNELS, Executors, device_of
from hvd_compress.engine.inquiry import Inquiry
from hvd_compress.engine.options import Options
from hvd_compress.engine.pending import Pending
from hvd_compress.engine.residuals import Changes, LastExchange
from hvd_compress.engine.slots import Slot
from hvd_compress.engine.uncompressed import Uncompressed
from hvd_compress.exchanges import hosts
from hvd_compress.exchanges.comm import Exchanging, Group
from hvd_compress.exchanges.hosts import Hosts
from hvd_compress.exchanges.registry import EXCHANGES
from hvd_compress.exchanges.routing import Route
from hvd_compress.exchanges.shards import shared
from hvd_compress.process_group.agreement import Agreement
from hvd_compress.process_group.collectives import Collectives
from hvd_compress.process_group.device_collectives import collectives_of
from hvd_compress.process_group.environment import Place, find_place, ranks_of_job
from hvd_compress.process_group.launcher import Launcher, Part
from hvd_compress.process_group.private import is_unregistered
from hvd_compress.process_group.stateful import expect_own_names
from hvd_compress.process_group.step import Bucket, Step
from hvd_compress.ranks.errors import ExchangeError


class _Former(NamedTuple):
    """A parameter's route on a rank without the latest change.

    Attributes:
        route: the route of the parameter's gradients.
        exchanges: the rank's number of exchanges, less this rank's.
        loaded: whether this rank has loaded or reset its state since the ranks agreed last.
    """

    route: Route
    exchanges: int = 0
    loaded: bool = False


class ProcessGroupCompressor(CompressorBase):
    """A :class:`CompressorBase` among the ranks of a process group: the base of the frontends' compressors.

    A frontend puts tensors into buckets with :meth:`_pack`, and adds the buckets to a step, which
    :meth:`_begin` makes.

    Args:
        slots: see :class:`CompressorBase`, also for ``codec`` and ``options``.
        process_group: the ranks; None is the default group.
    """

    _chained = True
    _asks_uncompressed: ClassVar[bool] = False
    """Whether messages of gradients that are not encoded can tell that a rank has made a change."""
    _made_by_use: ClassVar[frozenset[str]] = frozenset(
        {"_kernels", "_batches", "_group", "_rank", "_size", "_collectives", "_device"}
        | {"_made_launcher", "_process_group", "_bound", "_step", "_agreed", "_former", "_last"}
        | {"_formats", "_deferred"}
    )
    """The attributes that belong to a process group or to the native library, and are not copied."""

    def __init__(
        self,
        slots: Iterable[Slot],
        codec: Codec | Route | str,
        *,
        process_group: dist.ProcessGroup | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(slots, codec, **options)
        self._begin_unbound()
        self._process_group: dist.ProcessGroup | None = process_group
        # The rank, and the number of ranks, whose residuals a copy has.
        self._copied_from: tuple[int, int] | None = None

    @classmethod
    def compress(cls, tensor: Any) -> NoReturn:
        """Raises ``TypeError``: Horovod calls it if this compressor was given as ``compression``."""
        refuse(f"one of {cls.__module__}", "codec")

    def __getstate__(self) -> dict[str, Any]:
        """See :class:`CompressorBase`; the first use of the copy makes what belongs to a process group.

        Raises:
            ExchangeError: gradients are being exchanged.
        """
        self._expect_idle("pickle or copy")
        self._kernels.settle()
        state = {name: v for name, v in self.__dict__.items() if name not in self._made_by_use}
        return {
            **state,
            "_copied_from": (self._rank, self._size) if self._bound else self._copied_from,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._kernels = Executors(self._threads, chained=self._chained)
        self._last = LastExchange()
        self._formats = {}
        self._begin_unbound()

    def __reduce_ex__(self, protocol: Any) -> Any:
        group = self._process_group
        if group not in (None, dist.group.WORLD):
            raise TypeError(
                "pickle or copy: expected a compressor of the default process group, got one of another "
                "group, which has no name outside of this process: keep what state_dict() returns, and "
                "make a compressor for the other model"
            )
        return super().__reduce_ex__(protocol)

    @staticmethod
    def _ranks_of_job() -> int:
        return ranks_of_job()

    def _begin_unbound(self) -> None:
        """Resets the attributes that the compressor gets when it joins a process group."""
        self._process_group = None
        self._bound = False
        self._step: Step | None = None
        self._agreed = False
        # By number, how gradients travel on ranks that set_codec, or a loaded state, has not changed.
        self._former: dict[int, _Former] | None = None

    def set_codec(self, codec: Codec | Route | str | None, layers: str = "*") -> None:
        """Changes the codec between two steps; every rank must make the same call."""
        self._bind()
        former = self._known()
        super().set_codec(codec, layers)
        self._former = former

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals, noise positions and owned parts; every rank saves its own state.

        For the rest, see :meth:`.CompressorBase.state_dict`.

        Raises:
            TypeError: torch.distributed.checkpoint asks for it, and not for that of a ``RankStates``.
        """
        expect_own_names("state_dict")
        return super().state_dict()

    def reset(self) -> None:
        """Discards what was not sent, for a model that returns to an earlier state; every rank calls it.

        For the rest, see :meth:`.CompressorBase.reset`.
        """
        with self._changing_state():
            super().reset()

    def _restore(self, state: dict[str, Any]) -> None:
        with self._changing_state():
            super()._restore(state)

    @contextlib.contextmanager
    def _changing_state(self) -> Iterator[None]:
        """Makes the next step ask whether all ranks have changed their states, as in this block."""
        known = self._known()
        before = {slot.index: slot.exchanges for slot in self._slots}
        yield
        if known is not None:
            self._former = {
                slot.index: _Former(
                    known[slot.index].route,
                    known[slot.index].exchanges + before[slot.index] - slot.exchanges,
                    loaded=True,
                )
                for slot in self._slots
            }
            self._forget_agreement()

    def _known(self) -> dict[int, _Former] | None:
        """The routes that ranks without the latest change expect; None before the first agreement."""
        if self._former is None and self._agreed:
            return {slot.index: _Former(slot.route) for slot in self._slots}
        return self._former

    def _set_routes(self, routes: Iterable[tuple[Slot, Route]]) -> None:
        routes = list(routes)
        for slot, route in routes:
            self._check_cold_start(slot, route)
        super()._set_routes(routes)

    def _check_cold_start(self, slot: Slot, route: Route) -> None:
        """Raises if a rank without the change would divide an owner step's first gradients differently.

        These gradients are not encoded, so no payload could show that a rank has not made the change.
        """
        former = self._known() or {}
        if self._owner_step is None or slot.index not in former or not self._warming_up(slot):
            return
        if _cut(slot, route) != _cut(slot, former[slot.index].route):
            raise ValueError(
                f"{slot.name}: expected a codec that shares gradients out as "
                f"{former[slot.index].route.codec} "
                f"does in the first {self._warmup_steps} steps of an owner_step, got {route.codec}: change "
                f"the codec after these"
            )

    def _bind(self) -> None:
        if self._bound:
            return
        self._connect(device_of(slot.parameter for slot in self._slots))
        self._join_group()
        if self._copied_from is None:
            self._choose_routes(list(self._slots))
        else:
            self._check_copied()
            self._take_routes_again()
        self._bound = True

    def _check_copied(self) -> None:
        """Raises if a copy has another rank's residuals."""
        used = any(slot.exchanges for slot in self._slots)
        if used and self._copied_from not in (None, (self._rank, self._size)):
            assert self._copied_from is not None
            raise ExchangeError(
                f"expected a compressor that was copied or saved on rank {self._rank} of {self._size}, got "
                f"one of rank {self._copied_from[0]} of {self._copied_from[1]}: "
                f"each rank has residuals of its own; "
                f"make a compressor, and load_resized() the states of all ranks"
            )

    def _connect(self, device: torch.device) -> None:
        """Sets the device on which tensors are encoded, and the collectives for this device."""
        self._device = device
        self._collectives = collectives_of(self._process_group, device)

    def _join_group(self) -> None:
        ranks = Collectives(self._process_group)
        self._place: Place | None = None
        if self._needs_hosts() and self._is_whole_job():
            self._place = find_place()
        local = 1 if self._place is None else self._place.local
        self._join(Group(ranks.rank, ranks.size, Hosts(ranks.size, local)))
        self._made_launcher: Launcher | None = None

    def _needs_hosts(self) -> bool:
        """Whether gradients may be exchanged first within and then between hosts."""
        exchanges = {self._exchange, *(route.exchange for route in self._router.encoding)}
        return "hierarchical" in exchanges

    def _is_whole_job(self) -> bool:
        group = self._process_group
        return not is_unregistered(group) and dist.get_world_size(group) == dist.get_world_size()

    @property
    def _launcher(self) -> Launcher:
        if self._made_launcher is None:
            self._made_launcher = self._make_launcher()
        return self._made_launcher

    def _make_launcher(self) -> Launcher:
        return Launcher(self._collectives, self._group)

    def _busy(self) -> bool:
        return self._step is not None

    def _forget_agreement(self) -> None:
        self._agreed = False

    def _note_agreement(self) -> None:
        """Called when the ranks are known to agree."""
        self._agreed, self._former, self._resets = True, None, 0

    def _check_route(self, slot: Slot, route: Route) -> None:
        device = slot.parameter.device
        if device != self._device:
            where = "the CPU" if self._device.type == "cpu" else f"{self._device}, as another's"
            raise ValueError(
                f"{slot.name}: expected a parameter in the memory of {where}, got one on {device}: exclude "
                f"it by name to send it uncompressed"
            )
        if route.exchange == "hierarchical":
            if is_unregistered(self._process_group):
                raise ValueError(
                    f"{slot.name}: expected process_group=None for exchange='hierarchical', got a group "
                    f"that torch.distributed did not make: hosts are those of the whole job"
                )
            if self._size != dist.get_world_size():
                raise ValueError(
                    f"{slot.name}: expected process_group=None for exchange='hierarchical', got a group "
                    f"of {self._size} of {dist.get_world_size()} ranks: hosts are those of the whole job"
                )
            if self._place is None:  # All ranks have to look for hosts together.
                raise ValueError(
                    f"{slot.name}: expected a compressor that was made with exchange='hierarchical', or "
                    f"with a route of this exchange in layers=, got one that does not know which ranks "
                    f"share a host: make it anew, and load what state_dict() of this one returns"
                )
        super()._check_route(slot, route)

    def _configuration(self, slots: Iterable[Slot] | None = None) -> dict[str, Any]:
        configuration = super()._configuration(slots)
        if self._hosts_in_use() is not None:
            assert self._place is not None
            configuration["hosts"] = hosts.describe(self._rank, self._size, *astuple(self._place))
        return configuration

    def _between_steps(self) -> None:
        """Called by every rank before a step's first gradient, when none is being exchanged."""

    def _agree(self) -> None:
        """Waits for the other ranks, unless they are known to agree; :meth:`_begin` does not wait.

        Raises:
            ExchangeError: the ranks' configurations differ (raised on every rank).
        """
        if not self._agreed and self._former is None:
            self._ask().settle()
            self._prepare()
            self._note_agreement()

    def _begin(self) -> Step:
        self._begin_encoding()
        self._collectives.begin_step()
        asked = None
        if not self._agreed and self._former is None:
            asked = self._ask()
        return Step(
            self._collectives, self._launcher, asked, self._prepare, self._count, self._anywhere
        )

    def _ask(self) -> Agreement:
        configuration = self._configuration()
        if self._former is not None:
            # Within a step, while buckets are on their way, ranks learn lengths at different times.
            configuration.pop("lengths of messages", None)
        return Agreement(self._collectives, configuration)

    def _inquire(self, bucket: Bucket) -> None:
        """Sends a bucket's inquiries; :meth:`_hand_over` waits for the answers."""
        with self._launcher.turn():
            for part in bucket.inquiries:
                self._launcher.submit(part, bucket.answers.put, lags=True)

    def _hand_over(self, step: Step, buckets: Sequence[Bucket]) -> None:
        """Adds buckets to a step; waits for the other ranks if they may not expect their routes.

        If not all ranks have made the same changes, the step fails on every rank. Ranks without the
        change notice it when results arrive, perhaps after they have sent later buckets. So a rank with
        the change goes on to the end of the step with messages that those ranks expect.
        """
        try:
            self._confirm(buckets, step.refusal)
        except Exception as error:
            for bucket in buckets:
                step.refuse(bucket, error)
        else:
            for bucket in buckets:
                step.add(bucket)

    def _confirm(self, buckets: Sequence[Bucket], refusal: Exception | None) -> None:
        """Waits for the other ranks if they may not expect the routes of some buckets' tensors.

        Called before these buckets are sent. Ranks without a change have sent what corresponds to the
        buckets' inquiries.

        Raises:
            ExchangeError: not all ranks have made the same changes (raised on every rank), or ``refusal``.
        """
        if not any(bucket.rerouted for bucket in buckets):
            return
        self._launcher.catch_up()
        asked = [part.pending.content for bucket in buckets for part in bucket.inquiries]
        errors = [bucket.answers.get() for bucket in buckets for _ in bucket.inquiries]
        refusal = refusal or next(filter(None, errors), None)
        for bucket in buckets:
            bucket.inquiries.clear()
        if refusal is None and asked:
            # The first message asks; its answer is that of all other ones of the step.
            first: Any = asked[0]
            with self._collectives.behind():
                first.check()
        if refusal is not None:
            raise refusal
        self._ask().settle()
        self._prepare()
        self._note_agreement()

    def _anywhere(self, dropped: bool | torch.Tensor) -> bool | torch.Tensor:
        """Whether a step is dropped, also by ranks outside of the group; see :class:`Step`."""
        return dropped

    def _prepare(self) -> None:
        self._launcher.prepare(exchanges_of(self._slots))

    def _pack(
        self,
        bucket: Bucket,
        tensors: Iterable[tuple[Slot, torch.Tensor, torch.Tensor]],
        *,
        buffer: torch.Tensor | None = None,
    ) -> None:
        """Encodes a bucket's tensors, and adds the parts that are sent to the bucket.

        Args:
            bucket: a bucket without parts.
            tensors: for each tensor, its slot, its view in the slot's shape, and a view of the same memory
                in any shape, which is sent if the tensor is not encoded.
            buffer: the memory that holds exactly these tensors one after another, if there is such memory.
        """
        bucket.changes = self._last.changes()
        if self._former is not None:
            tensors = list(tensors)
            self._compare_with(self._former, bucket, tensors)
        encoded: dict[tuple[str, bool, torch.dtype], list[tuple[Slot, torch.Tensor]]] = {}
        uncompressed: dict[torch.dtype, list[torch.Tensor]] = {}
        for slot, tensor, row in tensors:
            self.counters.uncompressed_bytes += tensor.numel() * tensor.element_size()
            self._take_up(slot, tensor)
            warming_up, goes = self._warming_up(slot), self._goes_uncompressed(slot)
            slot.exchanges += 1
            if not tensor.numel():
                continue
            if goes:
                self._release(bucket.changes, slot, tensor)
                dtype = self._sent_dtype(slot.route, tensor, warming_up)
                uncompressed.setdefault(dtype, []).append(row)
            else:
                self._check_device(slot, tensor)
                key = slot.route.kind, warming_up, tensor.dtype
                encoded.setdefault(key, []).append((slot, tensor))
        for (_, warming_up, _), pairs in encoded.items():
            bucket.parts.append(self._encode(pairs, encoded=not warming_up))
        # For an average, each rank adds its share: in half precision, a sum might overflow.
        divisor = 1 if bucket.scale == 1 else self._size
        for dtype, rows in uncompressed.items():
            bucket.parts.append(self._as_it_is(rows, dtype, buffer, divisor))

    def _compare_with(
        self,
        former: Mapping[int, _Former],
        bucket: Bucket,
        tensors: Sequence[tuple[Slot, torch.Tensor, torch.Tensor]],
    ) -> None:
        """Prepares inquiries if ranks without the latest change would send a bucket differently."""
        encoded: dict[tuple[str, torch.dtype], list[tuple[Slot, torch.Tensor]]] = {}
        uncompressed: dict[torch.dtype, list[torch.Tensor]] = {}
        loaded = False
        for slot, tensor, row in tensors:
            if not tensor.numel():
                continue
            route, ahead, restored = former[slot.index]
            loaded |= restored
            warming_up = self._warming_up(slot)
            before = slot.exchanges + ahead < self._warmup_steps
            bucket.rerouted |= before != warming_up or (not warming_up and route != slot.route)
            if route.uncompressed or (before and self._owner_step is None):
                dtype = self._sent_dtype(route, tensor, before)
                uncompressed.setdefault(dtype, []).append(row)
            elif not before:
                encoded.setdefault((route.kind, tensor.dtype), []).append((slot, tensor))
        bucket.rerouted |= loaded and (bool(encoded) or self._asks_uncompressed)
        doubtful = self._step is not None and bool(self._step.held or self._step.refusal)
        if not bucket.rerouted or not (encoded or self._asks_uncompressed or doubtful):
            return
        for pairs in encoded.values():
            routes = [(slot, former[slot.index].route) for slot, _ in pairs]
            alike = [tensor for _, tensor in pairs]
            asked = Inquiry(self._batches, routes, alike)
            bucket.inquiries.append(_encoded_part(asked, self._batches.exchange(asked)))
        for dtype, rows in uncompressed.items():
            # No zeros, which ranks without the change would add as gradients.
            invalid = [torch.full_like(row, torch.nan) for row in rows]
            bucket.inquiries.append(self._uncompressed_inquiry(invalid, dtype))

    def _uncompressed_inquiry(self, invalid: list[torch.Tensor], dtype: torch.dtype) -> Part:
        """A message in place of gradients that are not encoded; see :attr:`_asks_uncompressed`."""
        return self._as_it_is(invalid, dtype, None, 1)

    def _uses(self, slot: Slot) -> bool:
        """Whether this rank has a gradient of its own; otherwise it sends zeros for the other ranks."""
        return True

    def _release(self, changes: Changes, slot: Slot, tensor: torch.Tensor) -> None:
        # Where no rank uses a parameter, DDP throws the average away: what is released would be lost.
        if self._uses(slot):
            scale = self._batches.common.loss_scale
            changes.release(slot, tensor, scale)
            changes.release_owned(slot, tensor, scale)

    def _encode(self, pairs: Sequence[tuple[Slot, torch.Tensor]], *, encoded: bool) -> Part:
        slots = [slot for slot, _ in pairs]
        used = [self._uses(slot) for slot in slots]
        tensors = [tensor for _, tensor in pairs]
        batch, exchanging = self._batches.make(slots, tensors, used, encoded=encoded)
        batch.count_encoding(self.counters)
        return _encoded_part(batch, exchanging)

    @functools.cached_property
    def _deferred(self) -> bool:
        """Whether the host must not wait for the gradients' device."""
        # Without the CUDA library, which uncompressed gradients do not need.
        if self._device.type in CUDA_KERNELS:
            return True
        like = torch.empty(0, dtype=torch.float32, device=self._device)
        return self._kernels.deferred(like) is not None

    def _as_it_is(
        self,
        rows: list[torch.Tensor],
        dtype: torch.dtype,
        buffer: torch.Tensor | None,
        divisor: int,
    ) -> Part:
        whole = buffer is not None and sum(row.numel() for row in rows) == buffer.numel()
        content = Uncompressed(
            rows, dtype, buffer=buffer if whole else None, divisor=divisor, deferred=self._deferred
        )
        exchanging = content.exchange(self._batches.comm)
        return Part(Pending("", 0, exchanging, content), ("all",))

    def _count(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            for part in bucket.parts:
                part.pending.content.count(self.counters)

    def _check_device(self, slot: Slot, tensor: torch.Tensor) -> None:
        if tensor.device != self._device:
            raise ExchangeError(
                f"{slot.name}: expected a gradient on {self._device}, as when the compressor was made, got "
                f"one on {tensor.device}: make the compressor after the model has been moved; "
                f"load_state_dict() takes residuals along"
            )


def exchanges_of(slots: Iterable[Slot]) -> set[tuple[str, bool]]:
    """The exchanges of some slots' routes by name, and whether their messages are packed."""
    return {(s.route.exchange, s.route.varies) for s in slots if not s.route.uncompressed}


def _cut(slot: Slot, route: Route) -> object:
    """The way in which ranks divide a gradient among them; None if it is not encoded."""
    if route.uncompressed:
        return None
    cut = shared(route.codec, slot.shape)
    return cut.shards(1).grain, cut.transposed


def _encoded_part(batch: Batch, exchanging: Exchanging) -> Part:
    exchange = EXCHANGES[batch.plan.exchange]
    remainders = exchange.remainders if batch.plan.packed else ()
    return Part(Pending("", 0, exchanging, batch), exchange.stages, remainders)
