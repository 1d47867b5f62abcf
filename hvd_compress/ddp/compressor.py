"""DDP's communication hook over the codecs and the exchanges."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hvd_compress.codecs import Codec, ErrorFeedback
from hvd_compress.codecs.base import check_choice
from hvd_compress.ddp.agreement import Agreement
from hvd_compress.ddp.bucket import Bucket, Part
from hvd_compress.ddp.device_collectives import collectives_of
from hvd_compress.ddp.launcher import Launcher
from hvd_compress.ddp.step import Step
from hvd_compress.exchange import agreement, hosts
from hvd_compress.exchange.errors import ExchangeError
from hvd_compress.exchange.hosts import Hosts
from hvd_compress.exchange.registry import EXCHANGES, Group
from hvd_compress.exchange.routing import DEFAULT_THRESHOLD, Route
from hvd_compress.exchange.routing import EXCHANGES as EXCHANGE_NAMES
from hvd_compress.torch_common.changes import Changes
from hvd_compress.torch_common.coder import GradientCoder
from hvd_compress.torch_common.drivers import Pending
from hvd_compress.torch_common.slots import NamedParameters, Slot, slots_of
from hvd_compress.torch_common.uncompressed import Uncompressed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket


_VARIABLES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
"""A rank's number on its host, the host's ranks, and the host's number, as torchrun sets them."""


class Compressor(GradientCoder):
    """Sends gradients encoded: the state of :func:`hvd_compress.ddp.hook`.

    Make one for each model: it holds the residuals, by parameter, so that DDP may rebuild its buckets.
    Made before there is a process group, it joins the ranks when it is first used.
    Subclasses choose the codec; these arguments are common to all of them.

    Args:
        model: the ``DistributedDataParallel`` model. Or, before there is one, the module in it or its
            ``named_parameters()``.
        codec: what gradients are encoded with.
        feedback: coefficients of error feedback.
        exchange: how payloads get from rank to rank: ``"allgather"``, ``"two_shot"``,
            ``"hierarchical"`` or ``"integer_sum"``.
        threshold: tensors with fewer elements are averaged as they are, one allreduce a bucket.
        exclude: name patterns (``fnmatch``, such as ``"fc3.*"``) of parameters to send as they are. Names
            are those of the module, without ``module.`` in front.
        layers: other codecs by name pattern: a codec, a scheme's name or None for uncompressed.
        warmup_steps: steps at the start that go uncompressed (1-bit SGD's cold start, section 5.2).
        seed: of the stochastic codecs' noise, the same on every rank.
        process_group: as DDP's; None is that of the ``model`` given, or else the default group.
        grad_scaler: the ``torch.amp.GradScaler`` whose scaled losses make the gradients, so that residuals
            follow when it changes the scale.
        threads: kernel threads; None is ``torch.get_num_threads()``.

    Raises:
        TypeError, ValueError: an argument is wrong, "expected X, got Y". Where there is no process group
            yet, the first use raises what depends on it.
        ExchangeError: by the first use, ``torch.distributed.init_process_group()`` was not called.
    """

    def __init__(
        self,
        model: NamedParameters,
        codec: Codec,
        feedback: ErrorFeedback,
        *,
        exchange: str = EXCHANGE_NAMES[0],
        threshold: int = DEFAULT_THRESHOLD,
        exclude: Sequence[str] = (),
        layers: Mapping[str, Codec | str | None] | None = None,
        warmup_steps: int = 0,
        seed: int = 0,
        process_group: dist.ProcessGroup | None = None,
        grad_scaler: Any | None = None,
        threads: int | None = None,
    ) -> None:
        check_choice("Compressor", "exchange", exchange, tuple(EXCHANGES))
        if isinstance(model, DistributedDataParallel):
            if getattr(model, "skip_all_reduce_unused_params", False):
                raise ValueError(
                    "Compressor.model: expected skip_all_reduce_unused_params=False, got True: a step ends "
                    "with its last bucket, which DDP may leave out then"
                )
            process_group = _group_of(model, process_group)
            model = model.module
        super().__init__(
            slots_of(model),
            codec,
            feedback,
            exchange=exchange,
            threshold=threshold,
            exclude=exclude,
            layers=layers,
            warmup_steps=warmup_steps,
            seed=seed,
            grad_scaler=grad_scaler,
            threads=threads,
            chained=True,
        )
        self._process_group = process_group
        self._bound = False
        self._step: Step | None = None
        self._agreed = False
        self._changes = Changes()
        self._used: set[int] = set()
        # Strides of each parameter, and whether it is dense in memory with them.
        self._strides: dict[int, tuple[tuple[int, ...], bool]] = {}
        self._by_parameter = {slot.parameter: slot for slot in self._slots}
        for slot in self._slots:
            if slot.parameter.requires_grad and slot.parameter.is_leaf:
                _note_use(slot.parameter, self._used, slot.index)
        if process_group is not None or dist.is_initialized():
            self._bind()

    @torch.no_grad()
    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Starts the exchange of one bucket's gradients.

        Returns:
            A future of the ranks' averages, in the bucket's own memory.

        Raises:
            ExchangeError: ranks differ (in the first step, every rank raises it), or a bucket that this
                compressor cannot do.
        """
        self._bind()
        if self._step is None:
            self._step = self._begin()
        step = self._step
        if bucket.index() <= step.last_index:
            raise ExchangeError(
                "expected the last backward pass to have come to its end, got a new one: what that one had "
                "sent is counted as sent; make a new compressor, and load the last checkpoint"
            )
        step.last_index = bucket.index()
        sent = self._pack(bucket)
        step.add(sent)
        if bucket.is_last():
            self._end(step)
        # A child of the future tells DDP's C++ code of an exception; the future itself only Python.
        return sent.future.then(lambda done: done.value())

    def _bind(self) -> None:
        if self._bound:
            return
        self._device = _device_of(self._slots)
        ranks = self._collectives = collectives_of(self._process_group, self._device)
        local = _ranks_of_a_host(required=self._exchange == "hierarchical")
        self._join(Group(ranks.rank, ranks.size, Hosts(ranks.size, local)))
        self._launcher = Launcher(ranks, self._group)
        self._choose_routes(list(self._slots))
        self._bound = True

    def _busy(self) -> bool:
        return self._step is not None

    def _forget_agreement(self) -> None:
        self._agreed = False

    def _check_route(self, slot: Slot, route: Route) -> None:
        device = slot.parameter.device
        if device != self._device:
            where = "the CPU" if self._device.type == "cpu" else f"{self._device}, as another's"
            raise ValueError(
                f"{slot.name}: expected a parameter in the memory of {where}, got one on {device}: exclude "
                f"it by name to send it uncompressed"
            )
        if route.exchange == "hierarchical" and self._size != dist.get_world_size():
            raise ValueError(
                f"{slot.name}: expected process_group=None for exchange='hierarchical', got a group of "
                f"{self._size} of {dist.get_world_size()} ranks: hosts are those of the whole job"
            )
        super()._check_route(slot, route)

    def _configuration(self) -> dict[str, Any]:
        configuration = super()._configuration()
        if self._hosts_in_use() is not None:
            local_rank, local, host = _read_environment()
            configuration["hosts"] = hosts.describe(self._rank, self._size, local_rank, local, host)
        return configuration

    def _begin(self) -> Step:
        self._kernels.check()  # What a device has met in an earlier step.
        self._collectives.begin_step()
        self._encoder.begin_step()
        asked = None
        if not self._agreed:
            line = agreement.serialize(self._configuration())
            asked = Agreement(self._collectives, line)
        return Step(self._collectives, self._launcher, asked, self._prepare, self._settle)

    def _prepare(self) -> None:
        for exchange in sorted({s.route.exchange for s in self._slots if not s.route.uncompressed}):
            self._launcher.prepare(EXCHANGES[exchange].stages)

    def _end(self, step: Step) -> None:
        self._step = None
        self.counters.steps += 1
        step.close()
        self._agreed = True
        # Ahead of DDP's own callback, which knows of a Python exception's text alone. A rank that has
        # joined (uneven inputs) has no backward pass: it is refused there.
        with contextlib.suppress(RuntimeError):
            torch.autograd.Variable._execution_engine.queue_callback(step.wait)

    def _pack(self, bucket: GradBucket) -> Bucket:
        buffer = bucket.buffer()
        if buffer.is_sparse:
            raise ExchangeError(
                "expected dense gradients, got sparse ones; make them with sparse=False"
            )
        packed = Bucket(buffer)
        self.counters.uncompressed_bytes += buffer.numel() * buffer.element_size()
        encoded: dict[str, list[tuple[Slot, torch.Tensor]]] = {}
        uncompressed: dict[torch.dtype, list[torch.Tensor]] = {}
        slots = [self._slot_of(parameter) for parameter in bucket.parameters()]
        for slot, row in zip(slots, bucket.gradients(), strict=True):
            gradient = self._like(slot, row)
            warming_up = slot.exchanges < self._warmup_steps
            slot.exchanges += 1
            if not gradient.numel():
                continue
            if warming_up or slot.route.uncompressed:
                self._release(slot, gradient)
                dtype = self._sent_dtype(slot, gradient, warming_up)
                uncompressed.setdefault(dtype, []).append(row)
            else:
                self._check_device(slot, gradient)
                encoded.setdefault(slot.route.exchange, []).append((slot, gradient))
        for pairs in encoded.values():
            packed.parts.append(self._encode(pairs))
        for dtype, rows in uncompressed.items():
            packed.parts.append(self._as_it_is(rows, dtype, buffer))
        self._used -= {slot.index for slot in slots}
        return packed

    def _like(self, slot: Slot, row: torch.Tensor) -> torch.Tensor:
        """The gradient in a bucket, as a view of the parameter's shape.

        DDP gives a parameter that is dense in memory, such as one in channels_last, its own order of memory
        in the bucket; codecs see tensors in row-major order.
        """
        strides = self._strides.get(slot.index)
        if strides is None or strides[0] != slot.parameter.stride():
            own = slot.parameter.stride()
            dense = torch.empty_like(slot.parameter, device="meta").stride() == own
            strides = self._strides[slot.index] = own, dense
        return row.as_strided(slot.shape, strides[0]) if strides[1] else row

    def _release(self, slot: Slot, gradient: torch.Tensor) -> None:
        # Where no rank uses a parameter, DDP throws the average away: what is released would be lost.
        if slot.index in self._used:
            scale = self._encoder.loss_scale
            self._changes.release(slot, gradient, scale)
            self._changes.release_owned(slot, gradient, scale)

    def _encode(self, pairs: Sequence[tuple[Slot, torch.Tensor]]) -> Part:
        slots = [slot for slot, _ in pairs]
        used = [slot.index in self._used for slot in slots]
        gradients = [gradient for _, gradient in pairs]
        batch, exchanging = self._batches.make(slots, gradients, used)
        pending = Pending("", 0, exchanging, batch.note)
        batch.count_encoding(self.counters)
        return Part(batch, pending, EXCHANGES[batch.plan.exchange].stages)

    def _as_it_is(self, rows: list[torch.Tensor], dtype: torch.dtype, buffer: torch.Tensor) -> Part:
        whole = sum(row.numel() for row in rows) == buffer.numel()
        content = Uncompressed(rows, dtype, buffer=buffer if whole else None, divisor=self._size)
        exchanging = content.exchange(self._batches.comm)
        return Part(content, Pending("", 0, exchanging, content.note), ("all",))

    def _settle(self, parts: Sequence[Part], dropped: bool | torch.Tensor) -> None:
        self._changes.settle(dropped)
        self._changes = Changes()
        for part in parts:
            part.content.settle(dropped)
            part.content.count(self.counters)

    def _check_device(self, slot: Slot, gradient: torch.Tensor) -> None:
        if gradient.device != self._device:
            raise ExchangeError(
                f"{slot.name}: expected a gradient on {self._device}, as when the compressor was made, got "
                f"one on {gradient.device}: make the compressor after the model has been moved; "
                f"load_state_dict() takes residuals along"
            )

    def _slot_of(self, parameter: torch.Tensor) -> Slot:
        slot = self._by_parameter.get(parameter)
        if slot is None:
            raise ExchangeError(
                f"expected the parameters that this compressor was made for, got one of shape "
                f"{tuple(parameter.shape)}: make a compressor for each model, after its last change"
            )
        return slot


def _group_of(
    model: DistributedDataParallel, process_group: dist.ProcessGroup | None
) -> dist.ProcessGroup:
    if process_group is not None and process_group is not model.process_group:
        raise ValueError("Compressor.process_group: expected the model's own, got another one")
    return model.process_group


def _device_of(slots: Iterable[Slot]) -> torch.device:
    """Where gradients are encoded: the first CUDA device that has a parameter, or else the CPU."""
    devices = (slot.parameter.device for slot in slots)
    return next((device for device in devices if device.type == "cuda"), torch.device("cpu"))


def _note_use(parameter: torch.Tensor, used: set[int], index: int) -> None:
    # The hook lives as long as the parameter: it must not hold a compressor with all its residuals.
    parameter.register_post_accumulate_grad_hook(lambda _: used.add(index))


def _ranks_of_a_host(*, required: bool) -> int:
    """How many ranks this host has, or 1 where the environment does not tell and that is not required."""
    try:
        return _read_environment()[1]
    except ValueError:
        if required:
            raise
        return 1


def _read_environment() -> tuple[int, int, int]:
    """This rank's number on its host, how many ranks the host has, and the host's number.

    Raises:
        ValueError: the environment does not tell.
    """
    values = [os.environ.get(name, "") for name in _VARIABLES]
    if not all(value.isdecimal() for value in values):
        found = ", ".join(f"{n}={v!r}" for n, v in zip(_VARIABLES, values, strict=True))
        raise ValueError(
            f"Compressor.exchange: expected {', '.join(_VARIABLES)} in the environment for 'hierarchical', "
            f"got {found}: start the ranks by torchrun, which sets them, or set them to this rank's place "
            f"on its host, the number of ranks there, and the host's number"
        )
    local_rank, local, host = map(int, values)
    if not local_rank < local:
        raise ValueError(
            f"Compressor.exchange: expected LOCAL_RANK below LOCAL_WORLD_SIZE for 'hierarchical', got "
            f"{local_rank} of {local}"
        )
    return local_rank, local, host
