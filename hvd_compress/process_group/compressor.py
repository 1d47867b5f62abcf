"""The base of the compressors that send by torch.distributed."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from typing import Any, ClassVar, NoReturn, Unpack

import torch
import torch.distributed as dist

from hvd_compress.codecs import Codec
from hvd_compress.codecs.refusal import refuse
from hvd_compress.engine.compressor import CompressorBase
from hvd_compress.engine.executors import CUDA_KERNELS, Executors, device_of
from hvd_compress.engine.options import Options
from hvd_compress.engine.pending import Pending
from hvd_compress.engine.residuals import Changes, LastExchange
from hvd_compress.engine.slots import Slot
from hvd_compress.engine.uncompressed import Uncompressed
from hvd_compress.exchanges import hosts
from hvd_compress.exchanges.comm import Group
from hvd_compress.exchanges.hosts import Hosts
from hvd_compress.exchanges.registry import EXCHANGES
from hvd_compress.exchanges.routing import Route
from hvd_compress.process_group.agreement import Agreement
from hvd_compress.process_group.collectives import Collectives
from hvd_compress.process_group.device_collectives import collectives_of
from hvd_compress.process_group.environment import Place, find_place, ranks_of_job
from hvd_compress.process_group.launcher import Launcher, Part
from hvd_compress.process_group.private import is_unregistered, timeout_of
from hvd_compress.process_group.rendezvous import Rendezvous
from hvd_compress.process_group.stateful import expect_own_names
from hvd_compress.process_group.step import Bucket, Step
from hvd_compress.ranks.errors import ExchangeError


class ProcessGroupCompressor(CompressorBase):
    """A :class:`CompressorBase` among the ranks of a process group: the base of the frontends' compressors.

    A frontend puts tensors into buckets with :meth:`_pack`, and adds the buckets to a step, which
    :meth:`_begin` makes.

    Args:
        slots: see :class:`CompressorBase`, also for ``codec`` and ``options``.
        process_group: the ranks; None is the default group.
    """

    _chained = True
    _made_by_use: ClassVar[frozenset[str]] = frozenset(
        {"_kernels", "_batches", "_group", "_rank", "_size", "_collectives", "_device"}
        | {"_made_launcher", "_process_group", "_bound", "_step", "_rendezvous", "_last"}
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
        # None while the ranks have to compare their configurations before a step.
        self._rendezvous: Rendezvous | None = None

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals, noise positions and owned parts; every rank saves its own state.

        For the rest, see :meth:`.CompressorBase.state_dict`.

        Raises:
            TypeError: torch.distributed.checkpoint asks for it, and not for that of a ``RankStates``.
        """
        expect_own_names("state_dict")
        return super().state_dict()

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
        self._rendezvous = None

    def _note_agreement(self, name: str) -> None:
        """Called when all ranks have agreed, with the agreement's name.

        Ranks of a group that torch.distributed does not know have no common store to meet in. They compare
        their configurations before every step.
        """
        self._resets = 0
        if not is_unregistered(self._process_group):
            self._rendezvous = Rendezvous(name, *self._place_among_all())

    def _place_among_all(self) -> tuple[int, int]:
        """This rank's number, and the number of ranks, among all ranks that change settings together."""
        return self._rank, self._size

    def _wait_for_ranks(self, call: str, **arguments: str) -> None:
        if self._rendezvous is not None:
            group: Any = self._process_group or dist.group.WORLD
            limit = timeout_of(group, self._device).total_seconds()
            self._rendezvous.wait(call, arguments, limit)
            self._forget_agreement()

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
        if self._rendezvous is None:
            asked = self._ask()
            asked.settle()
            self._prepare()
            self._note_agreement(asked.name)

    def _begin(self, *, asks: bool = False) -> Step:
        """Begins a step; with ``asks``, the step compares the ranks' configurations before it sends."""
        self._begin_encoding()
        self._collectives.begin_step()
        if self._rendezvous is not None:
            self._rendezvous.step += 1
        asked = self._ask() if asks else None
        return Step(
            self._collectives, self._launcher, asked, self._prepare, self._count, self._anywhere
        )

    def _ask(self) -> Agreement:
        return Agreement(self._collectives, self._configuration())

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
        exchange = EXCHANGES[batch.plan.exchange]
        remainders = exchange.remainders if batch.plan.packed else ()
        return Part(Pending("", 0, exchanging, batch), exchange.stages, remainders)

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
