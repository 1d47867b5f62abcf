"""Horovod's compressor interface over the codecs and the gather of payloads."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch.compression import Compressor as HorovodCompressor

from hvd_compress.codecs import Codec, ErrorFeedback, NoiseKey, PayloadError
from hvd_compress.codecs.base import check_number
from hvd_compress.codecs.payload import FLAG_NONFINITE, FORMAT_VERSION, HEADER_BYTES, read_header
from hvd_compress.exchange import agreement, token
from hvd_compress.exchange.counters import Counters
from hvd_compress.exchange.errors import ExchangeError
from hvd_compress.exchange.routing import DEFAULT_THRESHOLD, Route, Router, check_gather
from hvd_compress.kernels.cpu import CpuKernels
from hvd_compress.torch.collectives import Collectives
from hvd_compress.torch.slots import Slot, Slots
from hvd_compress.torch.state import restore, snapshot

NamedParameters = torch.nn.Module | Iterable[tuple[str, torch.Tensor]]

_PREFIX = "hvd_compress"


@dataclass(eq=False)
class _Dense:
    """Context of a gradient that Horovod reduces itself."""

    slot: Slot
    gradient: torch.Tensor


@dataclass(eq=False)
class _Encoded:
    """Context of a gradient whose payload is being gathered."""

    slot: Slot
    route: Route
    step: int
    gradient: torch.Tensor
    flat: torch.Tensor
    payload: torch.Tensor
    handle: int | None
    gathered: torch.Tensor | None = None
    dropped: bool = False


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
    ) -> None:
        check_number("Compressor", "warmup_steps", warmup_steps, 0, 2**63 - 1, integer=True)
        check_number("Compressor", "seed", seed, 0, 2**32 - 1, integer=True)
        if threads is not None:
            check_number("Compressor", "threads", threads, 1, 1024, integer=True)
        if grad_scaler is not None and not hasattr(grad_scaler, "get_scale"):
            raise TypeError(
                f"Compressor.grad_scaler: expected a GradScaler, got {type(grad_scaler).__name__}"
            )
        self._collectives = Collectives(process_set)
        self._kernels = CpuKernels(threads or torch.get_num_threads())
        self._slots = Slots(named_parameters)
        self._router = Router(Route(codec, feedback), threshold, exclude, layers)
        unused = self._router.unused_patterns([slot.name for slot in self._slots])
        if unused:
            raise ValueError(f"Compressor: expected patterns that match a parameter, got {unused}")
        self._warmup_steps = warmup_steps
        self._seed = seed
        self._grad_scaler = grad_scaler
        self._generation = 0
        self._agreement: int | None = None
        self._agreed = False
        self._pending: list[_Encoded] = []
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
        if not self._agreed:
            self._compare_configurations()
        self.counters.uncompressed_bytes += tensor.numel() * tensor.element_size()
        self._exchanging = True
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
        self._await_agreement()
        if self._exchanging:
            self.counters.steps += 1
            self._exchanging = False
        if isinstance(ctx, _Dense):
            return tensor if tensor.dtype == ctx.gradient.dtype else tensor.to(ctx.gradient.dtype)
        scale = token.reduction_scale(tensor.tolist(), self._collectives.size, ctx.slot.name)
        if ctx.gathered is None:
            self._collect()
        self._decode(ctx, scale)
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

        if self._pending or any(slot.pending for slot in self._slots):
            raise ExchangeError("set_codec: expected no gradient on its way; call it after step()")
        route = Route(codec, scheme_of(codec).feedback if feedback is None else feedback)
        chosen = [slot for slot in self._slots if fnmatchcase(slot.name, layers)]
        if not chosen:
            raise ValueError(f"set_codec: expected a pattern that matches a parameter, got {layers!r}")
        self._choose_routes(chosen, self._router.with_route(route))
        self._agreed, self._agreement = False, None
        self._generation += 1

    def routes(self) -> dict[str, Route]:
        """How each parameter's gradient travels, by name."""
        return {slot.name: slot.route for slot in self._slots}

    def residual_norm(self) -> float:
        """The l2 norm of all residuals of this rank together."""
        residuals = [slot.residual for slot in self._slots if slot.residual is not None]
        return sum(self._kernels.square_sum(residual) for residual in residuals) ** 0.5

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

    def _start_encoded(
        self, slot: Slot, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, _Encoded]:
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
        handle = self._collectives.gather(payload, f"{_PREFIX}.{slot.name}")
        ctx = _Encoded(slot, route, slot.step, gradient, flat, payload, handle)
        slot.step += 1
        slot.pending = True
        self._pending.append(ctx)
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

    def _collect(self) -> None:
        """Waits for all gathers of this step, and sees whether the step will have to be dropped.

        Every gradient has been given to compress by the time of the first decompress. One non-finite
        gradient makes the whole step worthless, so that no residual may count it as sent.
        """
        pending, self._pending = self._pending, []
        for ctx in pending:
            gathered = self._collectives.wait(ctx.handle)
            ctx.handle = None
            expected = self._collectives.size * ctx.payload.numel()
            if gathered.numel() != expected:
                raise PayloadError(
                    f"{ctx.slot.name}: expected {expected} bytes from {self._collectives.size} ranks, "
                    f"got {gathered.numel()}"
                )
            ctx.gathered = gathered.view(self._collectives.size, -1)
        dropped = any(_nonfinite(ctx.gathered) for ctx in pending)
        for ctx in pending:
            ctx.dropped = dropped

    def _decode(self, ctx: _Encoded, scale: float) -> None:
        slot, route = ctx.slot, ctx.route
        started = time.perf_counter()
        if ctx.dropped and slot.residual is not None:
            self._kernels.take_back(
                route.codec,
                slot.shape,
                ctx.flat,
                slot.residual,
                ctx.payload,
                feedback=route.feedback,
                step=ctx.step,
            )
        try:
            self._kernels.decode_sum(
                route.codec, slot.shape, ctx.gathered, ctx.flat, step=ctx.step, scale=scale
            )
        except PayloadError as error:
            raise PayloadError(f"{slot.name}: {error}") from None
        if not ctx.gradient.is_contiguous():
            ctx.gradient.copy_(ctx.flat.view(slot.shape))
        self.counters.decode_seconds += time.perf_counter() - started
        ctx.gathered = None
        slot.pending = False

    def _compare_configurations(self) -> None:
        if self._agreement is not None:
            return
        line = agreement.serialize(self._configuration())
        message = torch.frombuffer(bytearray(line), dtype=torch.uint8)
        name = f"{_PREFIX}.configuration.{self._generation}"
        self._agreement = self._collectives.gather(message, name)
        # Nothing may wait in a hook, whose order differs between ranks; the end of the backward pass is
        # the first place that all ranks reach, and Horovod has not waited for anything before it.
        try:
            torch.autograd.Variable._execution_engine.queue_callback(self._await_agreement)
        except RuntimeError:  # Not in a backward pass: no hook, and waiting is safe.
            self._await_agreement()

    def _await_agreement(self) -> None:
        if self._agreed:
            return
        gathered = self._collectives.wait(self._agreement)
        try:
            agreement.check(gathered.numpy().tobytes())
        except ExchangeError:
            self._let_all_ranks_see()
            raise
        self._agreed = True

    def _let_all_ranks_see(self) -> None:
        # The first rank to leave tears down the others' connections, and they would report only that.
        with contextlib.suppress(HorovodInternalError):
            self._collectives.wait(
                self._collectives.gather(torch.zeros(1, dtype=torch.uint8), f"{_PREFIX}.seen")
            )

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


def _nonfinite(gathered: torch.Tensor | None) -> bool:
    assert gathered is not None
    headers = gathered[:, :HEADER_BYTES].numpy()
    return any(read_header(header).flags & FLAG_NONFINITE for header in headers)
