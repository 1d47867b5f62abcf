"""Gradients to payloads and back, and everything that has to be kept for it from step to step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch

from hvd_compress.codecs import Codec, ErrorFeedback, NoiseKey, PayloadError
from hvd_compress.codecs.base import check_number
from hvd_compress.codecs.payload import FLAG_NONFINITE, FORMAT_VERSION, HEADER_BYTES, read_header
from hvd_compress.codecs.registry import scheme_of
from hvd_compress.exchange.counters import Counters
from hvd_compress.exchange.errors import ExchangeError
from hvd_compress.exchange.routing import DEFAULT_THRESHOLD, Route, Router
from hvd_compress.kernels.cpu import CpuKernels
from hvd_compress.torch_common.slots import Slot
from hvd_compress.torch_common.state import restore, snapshot


@dataclass(eq=False)
class Coded:
    """A gradient that has been encoded, until it is decoded.

    Attributes:
        slot: whose gradient.
        route: how it was encoded.
        step: the position in the noise that it was encoded at.
        gradient: the gradient itself; the result is written over it.
        flat: its elements in row-major order, shape=(n,), sharing its memory where it is contiguous.
        payload: this rank's payload, shape=(bytes,), uint8.
    """

    slot: Slot
    route: Route
    step: int
    gradient: torch.Tensor
    flat: torch.Tensor
    payload: torch.Tensor


class GradientCoder:
    """One rank's codecs, residuals, noise positions and counters: the base of the frontends' compressors.

    Knows no collective. The arguments are those of the frontends' ``Compressor``, and so are the errors.

    Args:
        slots: the parameters.
        codec: what gradients are encoded with.
        feedback: coefficients of error feedback.
        rank: this rank within its process set or group.
        size: ranks in it.
    """

    def __init__(
        self,
        slots: Iterable[Slot],
        codec: Codec,
        feedback: ErrorFeedback,
        *,
        rank: int,
        size: int,
        threshold: int = DEFAULT_THRESHOLD,
        exclude: Sequence[str] = (),
        layers: Mapping[str, Codec | str | None] | None = None,
        warmup_steps: int = 0,
        seed: int = 0,
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
        self._slots = slots
        self._rank = rank
        self._size = size
        self._kernels = CpuKernels(threads or torch.get_num_threads())
        self._router = Router(Route(codec, feedback), threshold, exclude, layers)
        unused = self._router.unused_patterns([slot.name for slot in self._slots])
        if unused:
            raise ValueError(f"Compressor: expected patterns that match a parameter, got {unused}")
        self._warmup_steps = warmup_steps
        self._seed = seed
        self._grad_scaler = grad_scaler
        self.counters = Counters()
        self._choose_routes(list(self._slots))

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
        if self._busy():
            raise ExchangeError("set_codec: expected no gradient on its way; call it after step()")
        route = Route(codec, scheme_of(codec).feedback if feedback is None else feedback)
        chosen = [slot for slot in self._slots if fnmatchcase(slot.name, layers)]
        if not chosen:
            raise ValueError(
                f"set_codec: expected a pattern that matches a parameter, got {layers!r}"
            )
        self._choose_routes(chosen, self._router.with_route(route))
        self._forget_agreement()

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
        return snapshot(self._slots, self._rank, self._size, self._seed)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where :meth:`state_dict` of the same rank left off.

        Raises:
            ValueError: another rank, number of ranks, seed or model; nothing is changed then.
        """
        restore(self._slots, state, self._rank, self._size, self._seed)

    def _busy(self) -> bool:
        """Whether gradients are on their way."""
        raise NotImplementedError

    def _forget_agreement(self) -> None:
        """Has the ranks compare their configurations again."""
        raise NotImplementedError

    def _check_payload(self, slot: Slot, payload_bytes: int) -> None:
        """Raises ``ValueError`` where the frontend cannot send such a payload."""

    def _choose_routes(self, slots: list[Slot], router: Router | None = None) -> None:
        router = router or self._router
        chosen = []
        for slot in slots:
            dtype = str(slot.parameter.dtype).removeprefix("torch.")
            route = router.choose(slot.name, slot.shape, dtype)
            if not route.dense:
                self._check_payload(slot, route.codec.payload_bytes(slot.shape))
            chosen.append((slot, route))
        for slot, route in chosen:
            slot.route = route

    def _configuration(self) -> dict[str, Any]:
        tensors = {}
        for slot in self._slots:
            dtype = str(slot.parameter.dtype).removeprefix("torch.")
            tensors[slot.name] = f"{dtype} {list(slot.shape)} by {slot.route}, step {slot.step}"
        return {
            "format version": FORMAT_VERSION,
            "ranks": self._size,
            "seed": self._seed,
            "warmup_steps": self._warmup_steps,
            "gradient of": tensors,
        }

    def _encode(self, slot: Slot, gradient: torch.Tensor, payload: torch.Tensor) -> Coded:
        """Encodes a gradient by its slot's route; residual and noise position move on.

        Args:
            slot: whose gradient.
            gradient: of the slot's shape, in any order of memory. Not changed.
            payload: shape=(payload bytes of the route's codec,), uint8, overwritten.
        """
        route = slot.route
        flat = gradient.reshape(-1)
        residual = self._prepare_residual(slot) if route.feedback.enabled else None
        noise = NoiseKey(self._seed, self._rank, slot.index, slot.step)
        started = time.perf_counter()
        self._kernels.encode(
            route.codec,
            slot.shape,
            flat,
            payload,
            feedback=route.feedback,
            residual=residual,
            noise=noise,
        )
        self.counters.encode_seconds += time.perf_counter() - started
        self.counters.encoded_elements += flat.numel()
        slot.step += 1
        return Coded(slot, route, noise.step, gradient, flat, payload)

    def _prepare_residual(self, slot: Slot) -> torch.Tensor:
        """The slot's residual in the units of the next gradient."""
        scale = self._loss_scale()
        if slot.residual is None:
            slot.residual = torch.zeros(slot.parameter.numel())
        elif scale != slot.residual_scale:
            slot.residual.mul_(scale / slot.residual_scale)
        slot.residual_scale = scale
        return slot.residual

    def _release_residual(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Adds what an earlier codec left unsent to the gradient, and forgets it."""
        if slot.residual is not None:
            rest = slot.residual * (self._loss_scale() / slot.residual_scale)
            gradient.add_(rest.view(slot.shape).to(gradient.dtype))
            slot.residual = None

    @staticmethod
    def _dense_dtype(slot: Slot, gradient: torch.Tensor, warming_up: bool) -> torch.dtype:
        """In what an uncompressed gradient travels."""
        wanted = None if warming_up else slot.route.dense_dtype
        if wanted is not None and gradient.dtype == torch.float32:
            return getattr(torch, wanted)
        return gradient.dtype

    def _loss_scale(self) -> float:
        return 1.0 if self._grad_scaler is None else float(self._grad_scaler.get_scale())

    def _take_back(self, coded: Coded) -> None:
        """Undoes what :meth:`_encode` did to the residual; ``coded.flat`` still holds the gradient."""
        if coded.route.feedback.enabled:
            self._kernels.take_back(
                coded.route.codec,
                coded.slot.shape,
                coded.flat,
                coded.slot.residual,
                coded.payload,
                feedback=coded.route.feedback,
                step=coded.step,
            )

    def _decode(self, coded: Coded, gathered: torch.Tensor | None, scale: float) -> None:
        """Writes ``scale`` times the sum of all ranks' payloads, shape=(ranks, bytes), to ``coded.flat``.

        Raises:
            PayloadError: naming the parameter and the rank.
        """
        slot = coded.slot
        try:
            self._kernels.decode_sum(
                coded.route.codec, slot.shape, gathered, coded.flat, step=coded.step, scale=scale
            )
        except PayloadError as error:
            raise PayloadError(f"{slot.name}: {error}") from None


def any_nonfinite(payloads: np.ndarray) -> bool:
    """Whether one of the payloads, shape=(ranks, bytes), was encoded from an Inf or a NaN."""
    headers = payloads[:, :HEADER_BYTES]
    return any(read_header(header).flags & FLAG_NONFINITE for header in headers)
