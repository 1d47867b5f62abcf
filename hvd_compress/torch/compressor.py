"""Horovod's compressor interface over the codecs and the exchanges."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from horovod.torch.compression import Compressor as HorovodCompressor

from hvd_compress.codecs import Codec, ErrorFeedback
from hvd_compress.exchange import token
from hvd_compress.exchange.errors import ExchangeError
from hvd_compress.exchange.routing import DEFAULT_THRESHOLD, EXCHANGES, Route
from hvd_compress.kernels.cpu_levels import CpuLevels
from hvd_compress.torch.collectives import Collectives
from hvd_compress.torch.exchanges.allgather import Allgather
from hvd_compress.torch.exchanges.base import Exchange, Relay
from hvd_compress.torch.exchanges.hierarchical import Hierarchical
from hvd_compress.torch.exchanges.integer_sum import IntegerSum
from hvd_compress.torch.exchanges.two_shot import TwoShot
from hvd_compress.torch.owner_steps import OwnerStep, describe
from hvd_compress.torch.slots import Slots
from hvd_compress.torch.step import Sent, Step
from hvd_compress.torch_common.coder import GradientCoder
from hvd_compress.torch_common.slots import NamedParameters, Owned, Slot


@dataclass(eq=False)
class _Dense:
    """Context of a gradient that Horovod reduces itself."""

    slot: Slot
    gradient: torch.Tensor


class Compressor(GradientCoder, HorovodCompressor):
    """Sends gradients encoded; pass one to ``hvd.DistributedOptimizer(compression=...)``.

    Make one for each model and optimizer: it holds the residuals. Two compressors are never equal.
    Subclasses choose the codec; these arguments are common to all of them.

    Args:
        named_parameters: ``model.named_parameters()`` or the model, as for the optimizer.
        codec: what gradients are encoded with.
        feedback: coefficients of error feedback.
        exchange: how payloads get from rank to rank: ``"allgather"``, ``"two_shot"``, ``"hierarchical"``
            or ``"integer_sum"``.
        owner_step: what the owner of a part does with the ranks' average before it sends it to all, an
            :class:`OwnerStep`; with ``exchange="two_shot"`` only.
        threshold: tensors with fewer elements are left to Horovod, which fuses them.
        exclude: name patterns (``fnmatch``, such as ``"fc3.*"``) of parameters to leave to Horovod.
        layers: other codecs by name pattern: a codec, a scheme's name or None for uncompressed.
        warmup_steps: steps at the start that go uncompressed (1-bit SGD's cold start, section 5.2).
        seed: of the stochastic codecs' noise, the same on every rank.
        process_set: as the optimizer's; None is all ranks.
        grad_scaler: the ``torch.amp.GradScaler`` whose scaled losses make the gradients, so that residuals
            follow when it changes the scale.
        threads: kernel threads; None is ``torch.get_num_threads()``.
        name: what this compressor's collectives are called by; differs where two models whose parameters
            have the same names exchange gradients at the same time.

    Raises:
        TypeError, ValueError: an argument is wrong, "expected X, got Y".
        ExchangeError: ``hvd.init()`` was not called.
    """

    _slots: Slots

    def __init__(
        self,
        named_parameters: NamedParameters,
        codec: Codec,
        feedback: ErrorFeedback,
        *,
        exchange: str = EXCHANGES[0],
        owner_step: OwnerStep | None = None,
        threshold: int = DEFAULT_THRESHOLD,
        exclude: Sequence[str] = (),
        layers: Mapping[str, Codec | str | None] | None = None,
        warmup_steps: int = 0,
        seed: int = 0,
        process_set: Any | None = None,
        grad_scaler: Any | None = None,
        threads: int | None = None,
        name: str = "hvd_compress",
    ) -> None:
        _check_owner_step(owner_step, exchange, warmup_steps)
        slots = Slots(named_parameters)
        # The first parameter's name keeps two models apart whose gradients are under way at one time.
        first = next(iter(slots)).name
        self._collectives = Collectives(process_set, f"{name}.{first}")
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
        )
        self._owner_step = owner_step
        self._exchanges: dict[str, Exchange] = {
            "allgather": Allgather(self._collectives, self._encoder),
            "two_shot": TwoShot(self._collectives, self._encoder, owner_step),
            "hierarchical": Hierarchical(self._collectives, self._encoder),
            "integer_sum": IntegerSum(self._collectives, self._encoder, CpuLevels(self._threads)),
        }
        self._choose_routes(list(self._slots))
        self._step = Step(
            self._collectives,
            self._configuration,
            self._kernels,
            self._prepare_exchanges,
            self._flush,
        )
        self._exchanging = False

    @torch.no_grad()
    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Horovod's entry: starts the exchange of one gradient.

        Returns:
            What Horovod shall allreduce, and the context for :meth:`decompress`.
        """
        slot = self._slots.owner(tensor)
        if slot.pending:
            raise ExchangeError(
                f"{slot.name}: expected its last gradient to be decompressed first, got another one; call "
                f"optimizer.step() or optimizer.synchronize() after each backward pass"
            )
        if not self._exchanging:
            self._kernels.check()
            self._step.end()
            self._encoder.begin_step()
            self._exchanging = True
        self._step.begin()
        self.counters.uncompressed_bytes += tensor.numel() * tensor.element_size()
        warming_up = slot.exchanges < self._warmup_steps
        slot.exchanges += 1
        if warming_up or slot.route.dense:
            return self._start_dense(slot, tensor, warming_up)
        return self._start_encoded(slot, tensor)

    @torch.no_grad()
    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Horovod's exit: the reduced gradient, in the memory and dtype of the one given to compress.

        Raises:
            ExchangeError: an operation that compressed gradients cannot follow, or ranks that differ.
            PayloadError: a payload was altered on its way.
        """
        self._step.settle(ctx.slot.name)
        if self._exchanging:
            self.counters.steps += 1
            self._exchanging = False
        if isinstance(ctx, _Dense):
            return tensor if tensor.dtype == ctx.gradient.dtype else tensor.to(ctx.gradient.dtype)
        scale = self._step.scale(tensor, ctx.slot.name)
        if not ctx.collected:
            self._step.collect()
        self._finish(ctx, scale)
        return ctx.gradient

    def _busy(self) -> bool:
        return self._step.busy or any(slot.pending for slot in self._slots)

    def _forget_agreement(self) -> None:
        self._step.forget_agreement()

    def _check_route(self, slot: Slot, route: Route) -> None:
        self._exchanges[route.exchange].check(slot, route)

    def _owned_by(self, slot: Slot) -> Owned | None:
        return None if slot.route.dense else self._exchanges[slot.route.exchange].owned(slot)

    def _configuration(self) -> dict[str, Any]:
        configuration = {**super()._configuration(), "owner_step": describe(self._owner_step)}
        for exchange in self._exchanges_in_use():
            configuration.update(exchange.settings())
        return configuration

    def _prepare_exchanges(self) -> None:
        for name, exchange in self._exchanges.items():
            routed = [s for s in self._slots if s.route.exchange == name and not s.route.dense]
            if routed:
                exchange.prepare(routed)

    def _flush(self) -> list[Relay]:
        return [relay for exchange in self._exchanges.values() for relay in exchange.flush()]

    def _exchanges_in_use(self) -> list[Exchange]:
        used = {slot.route.exchange for slot in self._slots if not slot.route.dense}
        return [exchange for name, exchange in self._exchanges.items() if name in used]

    def _start_dense(
        self, slot: Slot, gradient: torch.Tensor, warming_up: bool
    ) -> tuple[torch.Tensor, _Dense]:
        self._encoder.release_residual(slot, gradient)
        self._encoder.release_owned(slot, gradient)
        sent = gradient.to(self._dense_dtype(slot, gradient, warming_up))
        if sent.dtype == torch.bfloat16:
            sent = sent.float()  # Horovod has no bfloat16.
        size = self._collectives.size
        self.counters.add_allreduce(size, sent.numel() * sent.element_size())
        return sent, _Dense(slot, gradient)

    def _start_encoded(self, slot: Slot, gradient: torch.Tensor) -> tuple[torch.Tensor, Sent]:
        ctx = Sent(slot, gradient, self._exchanges[slot.route.exchange].encode(slot, gradient))
        self._step.add(ctx)
        slot.pending = True
        sent = torch.tensor(token.make(self._collectives.rank))
        self.counters.add_allreduce(self._collectives.size, sent.numel() * sent.element_size())
        return sent, ctx

    def _finish(self, ctx: Sent, scale: float) -> None:
        transfer = ctx.transfer
        started = time.perf_counter()
        self._kernels.order(transfer.flat)
        if ctx.dropped or ctx.unread is not None:
            transfer.take_back(ctx.unread)
        transfer.write(scale)
        if not ctx.gradient.is_contiguous():
            ctx.gradient.copy_(transfer.flat.view(ctx.slot.shape))
        self.counters.decode_seconds += time.perf_counter() - started
        transfer.count(self.counters)
        ctx.slot.pending = False


def _check_owner_step(owner_step: OwnerStep | None, exchange: str, warmup_steps: int) -> None:
    if owner_step is None:
        return
    if not callable(owner_step):
        raise TypeError(f"Compressor.owner_step: expected a callable, got {owner_step!r}")
    if exchange != "two_shot":
        raise ValueError(
            f"Compressor.owner_step: expected exchange='two_shot', whose ranks own parts, got {exchange!r}"
        )
    if warmup_steps:
        raise ValueError(
            f"Compressor.owner_step: expected warmup_steps=0, got {warmup_steps}: uncompressed gradients "
            f"have no owners, and would come without the step"
        )
