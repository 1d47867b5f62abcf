"""From gradients to payloads: residuals, loss scales, positions in the noise."""

from __future__ import annotations

import time
from typing import Any

import torch

from hvd_compress.codecs import NoiseKey
from hvd_compress.torch_common.executors import Executors
from hvd_compress.torch_common.pieces import Coded
from hvd_compress.torch_common.slots import Owned, Slot


class Encoder:
    """What one rank encodes with, the same for all of its parameters.

    Args:
        kernels: encode and decode.
        seed: of the noise.
        rank: this rank within its process set or group.
        grad_scaler: whose loss scale the gradients are multiplied by; None is none.

    Attributes:
        loss_scale: what the gradients of this step are multiplied by.
    """

    def __init__(self, kernels: Executors, seed: int, rank: int, grad_scaler: Any | None) -> None:
        self.kernels = kernels
        self.seed = seed
        self.rank = rank
        self.loss_scale = 1.0
        self._grad_scaler = grad_scaler

    def begin_step(self) -> None:
        """Called before a step's first gradient: reads the loss scale, once, for that waits for a GPU."""
        if self._grad_scaler is not None:
            self.loss_scale = float(self._grad_scaler.get_scale())

    def encode(self, slot: Slot, gradient: torch.Tensor, payload: torch.Tensor) -> Coded:
        """Encodes a gradient by its slot's route; residual and noise position move on.

        Args:
            slot: whose gradient.
            gradient: of the slot's shape, in any order of memory. Not changed.
            payload: shape=(payload bytes of the route's codec,), uint8, on the gradient's device,
                overwritten.
        """
        self.kernels.order(gradient)
        route = slot.route
        coded = Coded(
            route=route,
            shape=slot.shape,
            step=slot.step,
            flat=gradient.reshape(-1),
            payload=payload,
            residual=self.residual(slot, gradient.device) if route.feedback.enabled else None,
            slot=slot,
            gradient=gradient,
        )
        started = time.perf_counter()
        coded.encode(self.kernels, NoiseKey(self.seed, self.rank, slot.index, slot.step))
        coded.seconds = time.perf_counter() - started
        slot.step += 1
        return coded

    def residual(self, holder: Slot | Owned, device: torch.device) -> torch.Tensor:
        """A residual, zeros at first, in the units of the next gradient; shape=(n,).

        Args:
            holder: whose residual.
            device: where the next gradient is: the model may have moved.
        """
        scale = self.loss_scale
        if holder.residual is None:
            holder.residual = torch.zeros(holder.count, device=device)
            holder.residual_scale = scale
        holder.residual = holder.residual.to(device)
        self.kernels.order(holder.residual)
        if scale != holder.residual_scale:
            holder.residual.mul_(scale / holder.residual_scale)
        holder.residual_scale = scale
        return holder.residual

    def release_residual(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Adds what an earlier codec left unsent to the gradient, and forgets it."""
        if slot.residual is not None:
            self.kernels.order(gradient)
            rest = slot.residual.to(gradient.device) * (self.loss_scale / slot.residual_scale)
            gradient.add_(rest.view(slot.shape).to(gradient.dtype))
            slot.residual = None

    def release_owned(self, slot: Slot, gradient: torch.Tensor) -> None:
        """The same for what this rank has added up for all ranks: now it is this rank's to send."""
        owned = slot.owned
        if owned is not None and owned.residual is not None:
            self.kernels.order(gradient)
            rest = torch.zeros(slot.count, device=gradient.device)
            factor = owned.weight * self.loss_scale / owned.residual_scale
            rest[owned.begin : owned.end] = owned.residual * factor
            gradient.add_(rest.view(slot.shape).to(gradient.dtype))
            owned.residual = None

    def own(self, slot: Slot, gradient: torch.Tensor, owned: Owned | None) -> None:
        """Has ``slot.owned`` be the record of an exchange, with a residual where there is feedback.

        Args:
            slot: of the parameter.
            gradient: gets what was added up for another exchange.
            owned: an empty record of what this rank owns; None where the exchange has no owners.
        """
        if owned is None or owned.replaces(slot.owned):
            self.release_owned(slot, gradient)
            slot.owned = owned
        if slot.owned is not None and slot.route.feedback.enabled:
            self.residual(slot.owned, gradient.device)
        else:
            self.release_owned(slot, gradient)
