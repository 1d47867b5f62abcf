"""Horovod's compressor interface over the codecs and the gather of payloads."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from horovod.torch.compression import Compressor as HorovodCompressor

from hvd_compress.codecs import Codec, ErrorFeedback, NoiseKey, PayloadError
from hvd_compress.codecs.base import check_number
from hvd_compress.codecs.payload import FORMAT_VERSION
from hvd_compress.exchange import token
from hvd_compress.exchange.counters import Counters
from hvd_compress.exchange.errors import ExchangeError
from hvd_compress.exchange.routing import DEFAULT_THRESHOLD, Route, Router, check_gather
from hvd_compress.kernels.cpu import CpuKernels
from hvd_compress.torch.collectives import Collectives
from hvd_compress.torch.slots import Slot, Slots
from hvd_compress.torch.state import restore, snapshot
from hvd_compress.torch.step import Encoded, Step

NamedParameters = torch.nn.Module | Iterable[tuple[str, torch.Tensor]]


@dataclass(eq=False)
class _Dense:
    """Context of a gradient that Horovod reduces itself."""

    slot: Slot
    gradient: torch.Tensor


class Compressor(HorovodCompressor):
    """Sends gradients encoded; pass one to ``hvd.DistributedOptimizer(compression=...)``.

    Make one for each model and optimizer: it holds the residuals. Two compressors are never equal.
    Subclasses choose the codec; these arguments are common to all of them.

    Args:
        named_parameters: ``model.named_parameters()`` or the model, as for the optimizer.
        codec: what gradients are encoded with.
        feedback: coefficients of error feedback.
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

    def __init__(
        self,
        named_parameters: NamedParameters,
        codec: Codec,
        feedback: ErrorFeedback,
        *,
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
        check_number("Compressor", "warmup_steps", warmup_steps, 0, 2**63 - 1, integer=True)
        check_number("Compressor", "seed", seed, 0, 2**32 - 1, integer=True)
        if threads is not None:
            check_number("Compressor", "threads", threads, 1, 1024, integer=True)
        if grad_scaler is not None and not hasattr(grad_scaler, "get_scale"):
            raise TypeError(
                f"Compressor.grad_scaler: expected a GradScaler, got {type(grad_scaler).__name__}"
            )
        self._slots = Slots(named_parameters)
        # The first parameter's name keeps two models apart whose gradients are under way at one time.
        first = next(iter(self._slots)).name
        self._collectives = Collectives(process_set, f"{name}.{first}")
        self._kernels = CpuKernels(threads or torch.get_num_threads())
        self._router = Router(Route(codec, feedback), threshold, exclude, layers)
        unused = self._router.unused_patterns([slot.name for slot in self._slots])
        if unused:
            raise ValueError(f"Compressor: expected patterns that match a parameter, got {unused}")
        self._warmup_steps = warmup_steps
        self._seed = seed
        self._grad_scaler = grad_scaler
        self._step = Step(self._collectives, self._configuration)
        self._exchanging = False
        self.counters = Counters()
        self._choose_routes(list(self._slots))

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
            self._step.end()
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
        if ctx.gathered is None and ctx.summed is None:
            self._step.collect()
        self._finish(ctx, scale)
        return ctx.gradient

    def set_codec(
        self,
        codec: Codec,
        feedback: ErrorFeedback | None = None,
        layers: str = "*",
    ) -> None:
        """Changes the codec between two steps, on every rank alike.

        A residual that the new codec does not carry on is added to the next gradient: nothing is lost.

        Args:
            codec: the new codec.
            feedback: its error feedback; None is that of its paper.
            layers: name pattern of the parameters it is for; thresholds and exclusions stay in force.

        Raises:
            ExchangeError: gradients are still on their way.
        """
        from fnmatch import fnmatchcase

        from hvd_compress.codecs.registry import scheme_of

        if self._step.busy or any(slot.pending for slot in self._slots):
            raise ExchangeError("set_codec: expected no gradient on its way; call it after step()")
        route = Route(codec, scheme_of(codec).feedback if feedback is None else feedback)
        chosen = [slot for slot in self._slots if fnmatchcase(slot.name, layers)]
        if not chosen:
            raise ValueError(
                f"set_codec: expected a pattern that matches a parameter, got {layers!r}"
            )
        self._choose_routes(chosen, self._router.with_route(route))
        self._step.forget_agreement()

    def routes(self) -> dict[str, Route]:
        """How each parameter's gradient travels, by name."""
        return {slot.name: slot.route for slot in self._slots}

    def residual_norm(self) -> float:
        """The l2 norm of all residuals of this rank together, loss scaling taken out."""
        squares = [
            self._kernels.square_sum(slot.residual) / slot.residual_scale**2
            for slot in self._slots
            if slot.residual is not None
        ]
        return sum(squares) ** 0.5

    def reset_counters(self) -> None:
        """Sets :attr:`counters` to zero."""
        self.counters = Counters()

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals and noise positions; every rank saves its own.

        Residuals are references, as in ``torch.optim``; ``torch.save`` or a deep copy keeps them.
        """
        return snapshot(self._slots, self._collectives.rank, self._collectives.size, self._seed)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where :meth:`state_dict` of the same rank left off.

        Raises:
            ValueError: another rank, number of ranks, seed or model; nothing is changed then.
        """
        restore(self._slots, state, self._collectives.rank, self._collectives.size, self._seed)

    def _choose_routes(self, slots: list[Slot], router: Router | None = None) -> None:
        router = router or self._router
        chosen = []
        for slot in slots:
            dtype = str(slot.parameter.dtype).removeprefix("torch.")
            route = router.choose(slot.name, slot.shape, dtype)
            if not route.dense:
                size = route.codec.payload_bytes(slot.shape)
                check_gather(slot.name, size, self._collectives.size)
            chosen.append((slot, route))
        for slot, route in chosen:
            slot.route = route

    def _start_dense(
        self, slot: Slot, gradient: torch.Tensor, warming_up: bool
    ) -> tuple[torch.Tensor, _Dense]:
        self._release_residual(slot, gradient)
        sent = gradient
        wanted = None if warming_up else slot.route.dense_dtype
        if wanted is not None and gradient.dtype == torch.float32:
            sent = gradient.to(getattr(torch, wanted))
        elif gradient.dtype == torch.bfloat16:
            sent = gradient.float()  # Horovod has no bfloat16.
        size = self._collectives.size
        self.counters.add_allreduce(size, sent.numel() * sent.element_size())
        return sent, _Dense(slot, gradient)

    def _start_encoded(self, slot: Slot, gradient: torch.Tensor) -> tuple[torch.Tensor, Encoded]:
        route = slot.route
        flat = gradient.reshape(-1)
        if route.feedback.enabled:
            self._prepare_residual(slot, flat)
        else:
            self._release_residual(slot, gradient)
            flat = gradient.reshape(-1)
        payload = torch.empty(route.codec.payload_bytes(slot.shape), dtype=torch.uint8)
        noise = NoiseKey(self._seed, self._collectives.rank, slot.index, slot.step)
        started = time.perf_counter()
        self._kernels.encode(
            route.codec,
            slot.shape,
            flat,
            payload,
            feedback=route.feedback,
            residual=slot.residual,
            noise=noise,
        )
        self.counters.encode_seconds += time.perf_counter() - started
        ctx = Encoded(slot, route, slot.step, gradient, flat, payload)
        self._step.add(ctx)
        slot.step += 1
        slot.pending = True
        sent = torch.tensor(token.make(self._collectives.rank))
        self.counters.encoded_elements += flat.numel()
        self.counters.add_allgather(self._collectives.size, payload.numel())
        self.counters.add_allreduce(self._collectives.size, sent.numel() * sent.element_size())
        return sent, ctx

    def _prepare_residual(self, slot: Slot, flat: torch.Tensor) -> None:
        scale = self._loss_scale()
        if slot.residual is None:
            slot.residual = torch.zeros(flat.numel())
        elif scale != slot.residual_scale:
            slot.residual.mul_(scale / slot.residual_scale)
        slot.residual_scale = scale

    def _release_residual(self, slot: Slot, gradient: torch.Tensor) -> None:
        if slot.residual is not None:
            rest = slot.residual * (self._loss_scale() / slot.residual_scale)
            gradient.add_(rest.view(slot.shape).to(gradient.dtype))
            slot.residual = None

    def _loss_scale(self) -> float:
        return 1.0 if self._grad_scaler is None else float(self._grad_scaler.get_scale())

    def _finish(self, ctx: Encoded, scale: float) -> None:
        started = time.perf_counter()
        if ctx.dropped and ctx.slot.residual is not None:
            self._take_back(ctx)
        if ctx.summed is not None:
            ctx.flat.copy_(ctx.summed.mul_(scale))
        else:
            self._decode(ctx, scale)
        if not ctx.gradient.is_contiguous():
            ctx.gradient.copy_(ctx.flat.view(ctx.slot.shape))
        self.counters.decode_seconds += time.perf_counter() - started
        ctx.gathered = ctx.summed = None
        ctx.slot.pending = False

    def _take_back(self, ctx: Encoded) -> None:
        self._kernels.take_back(
            ctx.route.codec,
            ctx.slot.shape,
            ctx.flat,
            ctx.slot.residual,
            ctx.payload,
            feedback=ctx.route.feedback,
            step=ctx.step,
        )

    def _decode(self, ctx: Encoded, scale: float) -> None:
        try:
            self._kernels.decode_sum(
                ctx.route.codec, ctx.slot.shape, ctx.gathered, ctx.flat, step=ctx.step, scale=scale
            )
        except PayloadError as error:
            raise PayloadError(f"{ctx.slot.name}: {error}") from None

    def _configuration(self) -> dict[str, Any]:
        tensors = {}
        for slot in self._slots:
            dtype = str(slot.parameter.dtype).removeprefix("torch.")
            tensors[slot.name] = f"{dtype} {list(slot.shape)} by {slot.route}, step {slot.step}"
        return {
            "format version": FORMAT_VERSION,
            "ranks": self._collectives.size,
            "seed": self._seed,
            "warmup_steps": self._warmup_steps,
            "gradient of": tensors,
        }
