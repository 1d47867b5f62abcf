"""DDP's communication hook over the codecs and the exchanges.

This module has no postponed annotations, since DDP inspects those of the hook.
"""

import contextlib
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from hvd_compress.codecs import Codec
from hvd_compress.codecs.calls import expect_instance, guard
from hvd_compress.engine.autograd import after_backward
from hvd_compress.engine.options import Options
from hvd_compress.engine.parameters import NamedParameters, Slot, slots_of
from hvd_compress.engine.use import Discarded
from hvd_compress.exchanges.comm import byte_count
from hvd_compress.exchanges.routing import Route
from hvd_compress.process_group.compressor import ProcessGroupCompressor
from hvd_compress.process_group.private import is_unregistered
from hvd_compress.process_group.ranks import GroupRanks
from hvd_compress.process_group.step import Bucket, Step
from hvd_compress.ranks.errors import ExchangeError


@guard
class Compressor(ProcessGroupCompressor):
    """Encodes gradients before they are sent: the state of :func:`hvd_compress.ddp.hook`.

    Make one for each model: it holds the residuals, by parameter, so that DDP may rebuild its buckets.
    A compressor made before there is a process group joins the ranks when it is first used.

    Args:
        model: the ``DistributedDataParallel`` model; or, before there is one, the module that will be in it
            or its ``named_parameters()``. Names are those of the module, without the prefix ``module.``.
        codec: the encoding of gradients: a codec, a :class:`~hvd_compress.Route` or a codec's name.
        process_group: the same as DDP's; None is the ``model``'s if it has one, otherwise the default
            group.
        options: :class:`~hvd_compress.engine.options.Options`.

    Raises:
        TypeError, ValueError: an argument is wrong, "expected X, got Y". Where there is no process group
            yet, errors that depend on it are raised by the first use.
        ExchangeError: ``torch.distributed.init_process_group()`` was not called before the first use.
    """

    _remedy = "call hvd_compress.ddp.register(model, compressor) on every rank"

    def __init__(
        self,
        model: NamedParameters,
        codec: Codec | Route | str,
        *,
        process_group: dist.ProcessGroup | None = None,
        **options: Unpack[Options],
    ) -> None:
        if isinstance(model, DistributedDataParallel):
            if getattr(model, "skip_all_reduce_unused_params", False):
                raise ValueError(
                    "Compressor.model: expected skip_all_reduce_unused_params=False, got True: a step ends "
                    "with its last bucket, which DDP may leave out then"
                )
            process_group = _group_of(model, process_group)
            model = model.module
        super().__init__(slots_of(model), codec, GroupRanks(process_group), **options)
        self._note_gradients()
        if process_group is not None or dist.is_initialized():
            self._bind()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._note_gradients()

    def _note_gradients(self) -> None:
        """Starts to follow the parameters' gradients."""
        self._discarded = Discarded(slot.parameter for slot in self._slots)
        self._used: set[int] = set()
        # Strides of each parameter, and whether it is dense in memory with them.
        self._strides: dict[int, tuple[tuple[int, ...], bool]] = {}
        self._by_parameter = {slot.parameter: slot for slot in self._slots}
        self._watched: set[Slot] = set()
        for slot in self._slots:
            if slot.parameter.requires_grad and slot.parameter.is_leaf:
                self._watch(slot)

    def take_group_of(self, model: DistributedDataParallel) -> None:
        """Takes the process group of the model that the compressor is registered with, if it has none yet.

        Raises:
            ValueError: the compressor has a group of other ranks.
        """
        ranks = self._ranks
        if ranks.process_group is None and not ranks.joined:
            ranks.process_group = model.process_group
        own, wanted = map(_ranks_in, (ranks.process_group, model.process_group))
        if own != wanted and own is not None:
            raise ValueError(
                f"register: expected a compressor of the model's process group, ranks {wanted}, got one "
                f"of ranks {own}: make it with process_group=model.process_group"
            )

    @torch.no_grad()
    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Starts the exchange of one bucket's gradients.

        Returns:
            A future of the ranks' averages, in the bucket's own memory.

        Raises:
            ExchangeError: ranks differ (in the first step, every rank raises it), or the compressor cannot
                exchange the bucket.
        """
        self._bind()
        ranks = self._ranks
        if ranks.step is None:
            self._discarded.begin(self._state.last)
            self._between_steps()
            ranks.step = self._begin(asks=not ranks.agreed)
        step = ranks.step
        if bucket.index() <= step.last_index:
            raise ExchangeError(
                "expected the last backward pass to have come to its end, got a new one: what that one had "
                "sent is counted as sent; make a new compressor, and load the last checkpoint"
            )
        step.last_index = bucket.index()
        sent = self._packed(bucket)
        step.add(sent)
        if bucket.is_last():
            self._end(step)
        # A child of the future tells DDP's C++ code of an exception; the future itself only Python.
        return sent.future.then(lambda done: done.value())

    def _end(self, step: Step) -> None:
        self._ranks.step = None
        self._discarded.end()
        self.counters.steps += 1
        step.close()
        if step.agreement is not None:
            self._ranks.note_agreement(step.agreement.name)
        # Ahead of DDP's own callback, which knows of a Python exception's text alone. A rank that has
        # joined (uneven inputs) has no backward pass: it is refused there.
        with contextlib.suppress(RuntimeError):
            after_backward(step.wait)

    def _packed(self, bucket: GradBucket) -> Bucket:
        buffer = bucket.buffer()
        size = self._ranks.group.size
        packed = Bucket(buffer, buffer.device, 1 / size)
        slots = [self._slot_of(parameter) for parameter in bucket.parameters()]
        if buffer.is_sparse:  # Such a bucket has one parameter.
            self.counters.uncompressed_bytes += byte_count(buffer)
            run = self._packer.uncompressed([buffer], buffer.dtype, buffer, size)
            packed.runs.append(run)
        else:
            rows = bucket.gradients()
            if slots[0].parameter.is_complex():
                # The bucket has two real numbers for each, and DDP's rows are too short by half.
                rows = list(buffer.split([2 * slot.count for slot in slots]))
            pairs = list(zip(slots, rows, strict=True))
            for slot, row in pairs:
                if slot not in self._watched:
                    self._begin_to_watch(slot, row)
            tensors = ((slot, self._like(slot, row), row) for slot, row in pairs)
            unused = {slot.index for slot in slots} - self._used
            self._packer.pack(packed, tensors, self.counters, unused=unused, buffer=buffer)
        self._used -= {slot.index for slot in slots}
        return packed

    def _watch(self, slot: Slot) -> None:
        _note_use(slot.parameter, self._used, slot.index)
        self._watched.add(slot)

    def _begin_to_watch(self, slot: Slot, row: torch.Tensor) -> None:
        """Called with gradients of a parameter that is not watched, as it was frozen until now.

        One that is still frozen has zeros, unless a gradient from before the freeze is left.
        """
        parameter = slot.parameter
        if (parameter.requires_grad or parameter.grad is not None) and bool(row.any()):
            self._used.add(slot.index)
        if parameter.requires_grad:
            self._watch(slot)

    def _like(self, slot: Slot, row: torch.Tensor) -> torch.Tensor:
        """The gradient in a bucket, as a view of the parameter's shape.

        DDP uses the memory order of a parameter that is dense in memory, such as one in channels_last, in
        the bucket as well; codecs see tensors in row-major order.
        """
        if slot.parameter.is_complex():
            return row
        strides = self._strides.get(slot.index)
        if strides is None or strides[0] != slot.parameter.stride():
            own = slot.parameter.stride()
            dense = torch.empty_like(slot.parameter, device="meta").stride() == own
            strides = self._strides[slot.index] = own, dense
        return row.as_strided(slot.shape, strides[0]) if strides[1] else row

    def _slot_of(self, parameter: torch.Tensor) -> Slot:
        slot = self._by_parameter.get(parameter)
        if slot is None:
            raise ExchangeError(
                f"expected the parameters that this compressor was made for, got one of shape "
                f"{tuple(parameter.shape)}: make a compressor for each model, after its last change"
            )
        return slot


def hook(
    state: Compressor,
    bucket: GradBucket,
) -> torch.futures.Future[torch.Tensor]:
    """The communication hook: ``model.register_comm_hook(compressor, hook)``.

    Args:
        state: the compressor.
        bucket: the gradients that DDP has collected.

    Returns:
        A future of the ranks' averages, in the bucket's own memory.

    Raises:
        TypeError: the state is not a compressor.
    """
    given: Any = state
    if not isinstance(given, Compressor):
        expect_instance("hook", given, Compressor, "model.register_comm_hook({}, hook)")
    return state.reduce(bucket)


def _group_of(
    model: DistributedDataParallel, process_group: dist.ProcessGroup | None
) -> dist.ProcessGroup:
    if process_group is not None and process_group is not model.process_group:
        raise ValueError("Compressor.process_group: expected the model's own, got another one")
    return model.process_group


def _ranks_in(group: dist.ProcessGroup | None) -> list[int] | None:
    """The ranks of the job that are in a group; None where torch.distributed does not know the group."""
    return None if is_unregistered(group) else dist.get_process_group_ranks(group)


def _note_use(parameter: torch.Tensor, used: set[int], index: int) -> None:
    # The hook lives as long as the parameter: it must not hold a compressor with all its residuals.
    parameter.register_post_accumulate_grad_hook(lambda _: used.add(index))
