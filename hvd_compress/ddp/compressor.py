"""DDP's communication hook over the codecs and the exchanges."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hvd_compress.codecs import Codec, ErrorFeedback
from hvd_compress.codecs.base import check_choice
from hvd_compress.ddp.agreement import Agreement
from hvd_compress.ddp.cargo.base import Cargo, Exchange, Item
from hvd_compress.ddp.cargo.gathered import Allgather
from hvd_compress.ddp.cargo.hierarchical import Hierarchical
from hvd_compress.ddp.cargo.integer_sums import IntegerSum
from hvd_compress.ddp.cargo.two_shots import TwoShot
from hvd_compress.ddp.device_collectives import collectives_of
from hvd_compress.ddp.parcel import Dense, Parcel
from hvd_compress.ddp.step import Step
from hvd_compress.exchange import agreement
from hvd_compress.exchange.errors import ExchangeError
from hvd_compress.exchange.routing import DEFAULT_THRESHOLD, EXCHANGES, Route
from hvd_compress.torch_common.coder import GradientCoder
from hvd_compress.torch_common.slots import NamedParameters, Owned, Slot, slots_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket


_EXCHANGES: dict[str, type[Exchange]] = {
    "allgather": Allgather,
    "two_shot": TwoShot,
    "hierarchical": Hierarchical,
    "integer_sum": IntegerSum,
}


class Compressor(GradientCoder):
    """Sends gradients encoded: the state of :func:`hvd_compress.ddp.hook`.

    Make one for each model: it holds the residuals, by parameter, so that DDP may rebuild its buckets.
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
        TypeError, ValueError: an argument is wrong, "expected X, got Y".
        ExchangeError: ``torch.distributed.init_process_group()`` was not called.
    """

    def __init__(
        self,
        model: NamedParameters,
        codec: Codec,
        feedback: ErrorFeedback,
        *,
        exchange: str = EXCHANGES[0],
        threshold: int = DEFAULT_THRESHOLD,
        exclude: Sequence[str] = (),
        layers: Mapping[str, Codec | str | None] | None = None,
        warmup_steps: int = 0,
        seed: int = 0,
        process_group: dist.ProcessGroup | None = None,
        grad_scaler: Any | None = None,
        threads: int | None = None,
    ) -> None:
        check_choice("Compressor", "exchange", exchange, tuple(_EXCHANGES))
        if isinstance(model, DistributedDataParallel):
            if getattr(model, "skip_all_reduce_unused_params", False):
                raise ValueError(
                    "Compressor.model: expected skip_all_reduce_unused_params=False, got True: a step ends "
                    "with its last bucket, which DDP may leave out then"
                )
            process_group = _group_of(model, process_group)
            model = model.module
        slots = slots_of(model)
        self._device = _device_of(slots)
        self._collectives = collectives_of(process_group, self._device)
        super().__init__(
            slots,
            codec,
            feedback,
            rank=self._collectives.rank,
            size=self._collectives.size,
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
        self._way = _EXCHANGES[exchange](self._collectives, self._encoder)
        self._choose_routes(list(self._slots))
        self._step: Step | None = None
        self._agreed = False
        self._used: set[int] = set()
        self._by_parameter = {slot.parameter: slot for slot in self._slots}
        self._counting = threading.Lock()
        for slot in self._slots:
            if slot.parameter.requires_grad and slot.parameter.is_leaf:
                _note_use(slot.parameter, self._used, slot.index)

    @torch.no_grad()
    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Starts the exchange of one bucket's gradients.

        Returns:
            A future of the ranks' averages, in the bucket's own memory.

        Raises:
            ExchangeError: ranks differ (in the first step, every rank raises it), or a bucket that this
                compressor cannot do.
        """
        if self._step is None:
            self._step = self._begin()
        step = self._step
        if bucket.index() <= step.last_index:
            raise ExchangeError(
                "expected the last backward pass to have come to its end, got a new one: what that one had "
                "sent is counted as sent; make a new compressor, and load the last checkpoint"
            )
        step.last_index = bucket.index()
        parcel = self._pack(bucket)
        step.add(parcel)
        if bucket.is_last():
            self._end(step)
        # A child of the future tells DDP's C++ code of an exception; the future itself only Python.
        return parcel.future.then(lambda done: done.value())

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
        self._way.check(slot, route)

    def _owned_by(self, slot: Slot) -> Owned | None:
        return None if slot.route.dense else self._way.owned(slot)

    def _configuration(self) -> dict[str, Any]:
        return {**super()._configuration(), **self._way.settings()}

    def _begin(self) -> Step:
        self._kernels.check()  # What a device has met in an earlier step.
        self._collectives.begin_step()
        self._encoder.begin_step()
        asked = None
        if not self._agreed:
            line = agreement.serialize(self._configuration())
            asked = Agreement(self._collectives, line)
        return Step(
            self._collectives, self._kernels, asked, self._way.prepare, self._write, self._recall
        )

    def _end(self, step: Step) -> None:
        self._step = None
        self.counters.steps += 1
        step.close()
        self._agreed = True
        # Ahead of DDP's own callback, which knows of a Python exception's text alone. A rank that has
        # joined (uneven inputs) has no backward pass: it is refused there.
        with contextlib.suppress(RuntimeError):
            torch.autograd.Variable._execution_engine.queue_callback(step.wait)

    def _pack(self, bucket: GradBucket) -> Parcel:
        buffer = bucket.buffer()
        if buffer.is_sparse:
            raise ExchangeError(
                "expected dense gradients, got sparse ones; make them with sparse=False"
            )
        parcel = Parcel(buffer)
        self.counters.uncompressed_bytes += buffer.numel() * buffer.element_size()
        encoded: list[tuple[Slot, torch.Tensor]] = []
        dense: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter, row in zip(bucket.parameters(), bucket.gradients(), strict=True):
            slot = self._slot_of(parameter)
            gradient = _like(parameter, row)
            warming_up = slot.exchanges < self._warmup_steps
            slot.exchanges += 1
            goes_dense = warming_up or slot.route.dense
            # Where no rank uses a parameter, DDP throws the average away: what is released would be lost.
            if (goes_dense or not slot.route.feedback.enabled) and slot.index in self._used:
                self._encoder.release_residual(slot, gradient)
                self._encoder.release_owned(slot, gradient)
            if not gradient.numel():
                continue
            if goes_dense:
                dtype = self._dense_dtype(slot, gradient, warming_up)
                dense.setdefault(dtype, []).append(row)
            else:
                self._check_device(slot, gradient)
                encoded.append((slot, gradient))
        if encoded:
            parcel.cargo = self._encode_all(encoded)
        for dtype, rows in dense.items():
            parcel.dense.append(self._gather_up(rows, dtype, buffer))
        self._used -= {self._slot_of(parameter).index for parameter in bucket.parameters()}
        return parcel

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

    def _encode_all(self, encoded: list[tuple[Slot, torch.Tensor]]) -> Cargo:
        items = []
        for slot, gradient in encoded:
            item = Item(slot, gradient, slot.index in self._used)
            self._take_up_residuals(item)
            if item.used:
                original = slot.parameter.grad
                if original is not None and _apart(original, gradient):
                    item.original = original
            elif slot.route.feedback.enabled:
                item.remember()
            items.append(item)
        return self._way.pack(items)

    def _take_up_residuals(self, item: Item) -> None:
        slot = item.slot
        owned, enabled = self._owned_by(slot), slot.route.feedback.enabled
        if enabled and self._way.keeps_residuals:
            self._encoder.residual(slot, item.gradient.device)
        if item.used or (owned is not None and (enabled or owned.replaces(slot.owned))):
            self._encoder.own(slot, item.gradient, owned)
        if item.used and not self._way.keeps_residuals:
            self._encoder.release_residual(slot, item.gradient)

    def _gather_up(
        self, rows: list[torch.Tensor], dtype: torch.dtype, buffer: torch.Tensor
    ) -> Dense:
        whole = dtype == buffer.dtype and sum(row.numel() for row in rows) == buffer.numel()
        sent = buffer if whole else torch.cat([row.reshape(-1) for row in rows]).to(dtype)
        self.counters.add_allreduce(self._size, sent.numel() * sent.element_size())
        return Dense(rows, sent)

    @torch.no_grad()
    def _write(self, parcel: Parcel) -> None:
        for dense in parcel.dense:
            dense.write()
        cargo = parcel.cargo
        if cargo is None:
            return
        started = time.perf_counter()
        for index, (item, used) in enumerate(zip(cargo.items, cargo.used, strict=True)):
            if used:
                flat = cargo.write(index)
                if not item.gradient.is_contiguous():
                    item.gradient.copy_(flat.view(item.slot.shape))
            elif item.before is not None:
                item.put_back()  # Used by no rank: DDP leaves its gradient as it is.
        with self._counting:  # The process groups may call back from several threads.
            self.counters.decode_seconds += time.perf_counter() - started
            cargo.count(self.counters)

    @torch.no_grad()
    def _recall(self, parcel: Parcel, when: torch.Tensor | None) -> None:
        for index, item in enumerate(parcel.items):
            if item.before is not None:
                item.put_back(when)
            elif item.slot.route.feedback.enabled:
                assert parcel.cargo is not None
                original = None if item.original is None else item.original.reshape(-1)
                parcel.cargo.take_back(index, original, when)


def _group_of(
    model: DistributedDataParallel, process_group: dist.ProcessGroup | None
) -> dist.ProcessGroup:
    if process_group is not None and process_group is not model.process_group:
        raise ValueError("Compressor.process_group: expected the model's own, got another one")
    return model.process_group


def _device_of(slots: Sequence[Slot]) -> torch.device:
    """Where gradients are encoded: the first CUDA device that has a parameter, or else the CPU."""
    devices = (slot.parameter.device for slot in slots)
    return next((device for device in devices if device.type == "cuda"), torch.device("cpu"))


def _apart(original: torch.Tensor, copy: torch.Tensor) -> bool:
    """Whether a parameter's gradient has memory of its own, and not the bucket's."""
    memories = {tensor.untyped_storage().data_ptr() for tensor in (original, copy)}
    return original.dtype == copy.dtype and len(memories) == 2


def _note_use(parameter: torch.Tensor, used: set[int], index: int) -> None:
    # The hook lives as long as the parameter: it must not hold a compressor with all its residuals.
    parameter.register_post_accumulate_grad_hook(lambda _: used.add(index))


def _like(parameter: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """The gradient in a bucket, as a view of the parameter's shape.

    DDP gives a parameter that is dense in memory, such as one in channels_last, its own order of memory in
    the bucket; codecs see tensors in row-major order.
    """
    dense = torch.empty_like(parameter, device="meta").stride() == parameter.stride()
    return row.as_strided(parameter.shape, parameter.stride()) if dense else row
