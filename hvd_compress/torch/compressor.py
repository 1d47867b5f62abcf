"""Horovod's compressor interface over the codecs and the exchanges."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from horovod.torch.compression import Compressor as HorovodCompressor

from hvd_compress.codecs import Codec
from hvd_compress.codecs.calls import guard_methods
from hvd_compress.engine.compressor import CompressorBase
from hvd_compress.engine.options import Options
from hvd_compress.engine.parameters import NamedParameters, Slot
from hvd_compress.engine.residuals import Changes
from hvd_compress.engine.routes import sent_dtype
from hvd_compress.engine.use import Discarded
from hvd_compress.exchanges.routing import Route
from hvd_compress.ranks import names, token
from hvd_compress.ranks.errors import ExchangeError
from hvd_compress.torch.ranks import HorovodRanks
from hvd_compress.torch.slots import Slots
from hvd_compress.torch.step import HorovodStep


@dataclass(eq=False)
class Sent:
    """The context of a gradient between compress and decompress.

    Attributes:
        slot: the slot of the gradient.
        gradient: the tensor that was passed to compress; decompress returns it.
        encoded: whether the gradient is encoded; otherwise Horovod reduces it itself.
    """

    slot: Slot
    gradient: torch.Tensor
    encoded: bool


@guard_methods("compress", "decompress", write="compression={}")
class Compressor(CompressorBase, HorovodCompressor):
    """Encodes gradients before they are sent; pass one to ``hvd.DistributedOptimizer(compression=...)``.

    Make one for each model and optimizer: it holds the residuals. Two compressors are never equal.

    Args:
        model: the model or its ``named_parameters()``, as for the optimizer.
        codec: the encoding of gradients: a codec, a :class:`~hvd_compress.Route` or a codec's name.
        process_set: the same as the optimizer's; None is all ranks.
        name: the prefix of the names of this compressor's collectives. The first parameter's name follows
            it, and a number where this process has made such a compressor before: all ranks make
            their compressors in the same order.
        options: :class:`~hvd_compress.engine.options.Options`.

    Raises:
        TypeError, ValueError: an argument is wrong, "expected X, got Y".
        ExchangeError: ``hvd.init()`` was not called.
    """

    _remedy = "pass it to hvd.DistributedOptimizer as compression= on every rank"
    _slots: Slots
    _ranks: HorovodRanks
    _changes: Changes  # Those of gradients that Horovod adds up itself.

    def __init__(
        self,
        model: NamedParameters,
        codec: Codec | Route | str,
        *,
        process_set: Any | None = None,
        name: str = "hvd_compress",
        **options: Unpack[Options],
    ) -> None:
        slots = Slots(model)
        for slot in slots:
            if slot.parameter.is_complex() and not slot.frozen:
                raise TypeError(
                    f"{slot.name}: expected a parameter of real numbers, got {slot.dtype}, which Horovod "
                    f"cannot add up: keep its real and imaginary parts in one of float32 "
                    f"(torch.view_as_complex)"
                )
        prefix = names.distinct(f"{name}.{next(iter(slots)).name}")
        super().__init__(slots, codec, HorovodRanks(process_set, prefix, slots), **options)
        self._discarded = Discarded(slot.parameter for slot in slots)
        self._take_place()
        self._routes.choose(list(slots))

    def rebind(self) -> None:
        """Takes this rank's new place, after Horovod was initialized again.

        Elastic Horovod does that when ranks are added or removed, and
        :class:`hvd_compress.torch.elastic.TorchState` calls this method by itself. With another state,
        register it as a reset callback on all ranks:
        ``state.register_reset_callbacks([compressor.rebind])``.

        A step in progress is forgotten. Residuals stay, and keep their weight in the ranks' average; what
        this rank has not sent of parts that it owned is sent with its next gradients. A new rank has to
        load the others' positions in the noise: the next step compares them.

        Raises:
            ValueError: the compressor has an owner step, and nothing has changed then; or gradients cannot
                travel among the current ranks.
            ExchangeError: Horovod is not initialized, or the process set is no longer registered.
        """
        if self._owner_step is not None:
            raise ValueError(
                "rebind: expected a compressor without owner_step, got one whose state belongs to the "
                "parts that the ranks owned before; make a new compressor, and load_resized() the states "
                "of all ranks"
            )
        size = self._ranks.group.size
        self._take_place()
        for slot in self._slots:
            slot.pending = False
            for holder in (slot, slot.owned):
                if holder is not None and holder.residual is not None:
                    holder.residual.mul_(self._ranks.group.size / size)
        self._take_routes()

    def _take_routes(self) -> None:
        """Sets the routes among other ranks."""
        self._routes.check_again()

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Horovod's entry: takes one gradient.

        Returns:
            The tensor that Horovod has to reduce, and the context for :meth:`decompress`.
        """
        # Hooks run without grad mode, and to switch it takes longer than to note a gradient.
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._compress(tensor)
        return self._compress(tensor)

    def _compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        slot = self._slots.owner(tensor)
        if slot.pending or slot in self._exchanged:
            raise ExchangeError(
                f"{slot.name}: expected its last gradient to be decompressed first, got another one; call "
                f"optimizer.step() or optimizer.synchronize() after each backward pass; and to make "
                f"hvd.DistributedOptimizer again, del the old one and call gc.collect() first, which "
                f"removes its hooks"
            )
        self._routes.take_up(slot, tensor)
        if not self._ranks.exchanging:
            self._begin()
        counters, size = self.counters, self._ranks.group.size
        counters.uncompressed_bytes += tensor.numel() * tensor.element_size()
        self._exchanged[slot] = None
        # Horovod still exchanges a parameter that is frozen later. Zeros must not take a residual along;
        # other values are gradients from before the freeze.
        idle = not slot.parameter.requires_grad and slot.frozen and not bool(tensor.any())
        encoded = not self._routes.goes_uncompressed(slot)
        if encoded:
            slot.pending = True
            self._ranks.step.add(slot, tensor, counters, idle=idle)
            sent = self._token_rows[slot.index]
        else:
            sent = self._uncompressed(slot, tensor, idle)
        counters.add_allreduce(size, sent.numel() * sent.element_size())
        return sent, Sent(slot, tensor, encoded)

    def decompress(self, tensor: torch.Tensor, ctx: Sent | None) -> torch.Tensor:
        """Horovod's exit: the reduced gradient, in the memory and dtype of that passed to :meth:`compress`.

        Horovod does not pass sparse gradients to compress: without ``ctx``, they are returned unchanged.

        Raises:
            ExchangeError: Horovod's operation is not possible on compressed gradients, or ranks differ.
            PayloadError: a payload was altered in transit.
        """
        if ctx is None:
            return tensor
        if ctx.encoded and not ctx.slot.pending:
            raise ExchangeError(
                f"{ctx.slot.name}: expected a gradient that is being exchanged, got one from before "
                f"rebind(), which has forgotten it: call optimizer.zero_grad(), and make the step again"
            )
        step = self._ranks.step
        if self._ranks.exchanging:
            step.settle(ctx.slot.name, tensor if ctx.encoded else None)
            self.counters.steps += 1
            self._ranks.exchanging = False
            self._discarded.end()
            self._move_on()
            if not step.busy:
                self._end(False)
        if not ctx.encoded:
            return tensor if tensor.dtype == ctx.gradient.dtype else tensor.to(ctx.gradient.dtype)
        scale = step.scale(tensor, ctx.slot.name)
        if step.busy:
            step.collect(scale, self.counters)
        ctx.slot.pending = False
        return ctx.gradient

    def _take_place(self) -> None:
        ranks, routes = self._ranks, self._routes
        ranks.join()
        self._join()
        ranks.step = HorovodStep(
            ranks.collectives,
            self._batches,
            self._configuration,
            lambda: ranks.group.hosts if routes.hierarchical else None,
            self._end,
            routes.warming_up,
        )
        self._exchanged: dict[Slot, None] = {}
        # A token for each parameter, and what Horovod's sums turn back into tokens in the next step.
        self._token = torch.tensor(token.make(ranks.group.rank), dtype=torch.float32, device="cpu")
        self._tokens = self._token.repeat(len(list(self._slots)), 1)
        self._token_rows = list(self._tokens)

    def _begin(self) -> None:
        self._ranks.expect_same()
        self._discarded.begin(self._state.last)
        self._begin_encoding()
        self._changes = self._state.last.changes()
        self._tokens.copy_(self._token)
        self._ranks.step.begin()
        self._ranks.exchanging = True

    def _move_on(self) -> None:
        """Counts the step's exchanges, if all ranks took part in it.

        A rank that has called ``hvd.join()`` counts nothing, and must not be behind the others afterwards.
        """
        if self._ranks.step.complete:
            self._ranks.resets = 0
            for slot in self._exchanged:
                slot.exchanges += 1
        left = self._routes.without_gradients()
        if left:
            missed = ", ".join(sorted(slot.name for slot in left))
            warnings.warn(
                f"expected this optimizer to exchange all gradients, got none of {missed}: Horovod "
                f"exchanges what required gradients when hvd.DistributedOptimizer was made; unless another "
                f"optimizer has them, make it again after requires_grad_(True), or ranks drift apart; del "
                f"the old one and call gc.collect() before that",
                stacklevel=2,
            )
        self._exchanged.clear()

    def _end(self, dropped: bool | torch.Tensor) -> None:
        self._changes.settle(dropped)

    def _uncompressed(self, slot: Slot, gradient: torch.Tensor, idle: bool) -> torch.Tensor:
        """The tensor that Horovod sums itself; it includes what earlier codecs have not sent."""
        if not gradient.is_cpu:
            self._kernels.order(gradient)
        scale = self._batches.common.loss_scale
        if not idle:
            self._changes.release(slot, gradient, scale)
            self._changes.release_owned(slot, gradient, scale)
        warming_up = self._routes.warming_up(slot)
        sent = gradient.to(sent_dtype(slot.route, gradient, warming_up=warming_up))
        return sent.float() if sent.dtype == torch.bfloat16 else sent  # Horovod has no bfloat16.
