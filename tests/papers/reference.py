"""The results of a small network of two parallel layers on every rank, computed in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from hvd_compress.codecs import Codec, NoiseKey
from hvd_compress.kernels.batch import Entry
from hvd_compress.kernels.reference import ReferenceBatch
from tests.torch_models import DEVICE

FEATURES, HIDDEN, OUTPUTS = 20, 32, 12
BATCH = 8
"""Samples: of all ranks together, or of each rank."""

Results = dict[str, torch.Tensor]
"""One rank's ``output``, ``inputs`` (their gradient), ``weight1``, ``bias1``, ``weight2``, ``bias2``."""


def whole_layers() -> tuple[nn.Linear, nn.Linear]:
    """The unsharded layers."""
    torch.manual_seed(3)
    return nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, OUTPUTS)


def samples(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets."""
    generator = torch.Generator(DEVICE).manual_seed(50 + rank)
    return (
        torch.randn(BATCH, FEATURES, generator=generator),
        torch.randn(BATCH, OUTPUTS, generator=generator),
    )


@dataclass(frozen=True)
class Network:
    """Ranks of the same settings.

    Attributes:
        size: the number of ranks.
        codec: the codec of activations.
        error_codec: the codec of error signals.
        exact_own: whether a rank takes its own tensors unencoded.
    """

    size: int
    codec: Codec
    error_codec: Codec
    exact_own: bool

    def by_features(self) -> list[Results]:
        """A column-parallel layer whose outputs are gathered, ReLU, and a row-parallel layer.

        The loss is half of the squared error's sum; all ranks have the samples of rank 0.
        """
        one, two = whole_layers()
        x, target = samples(0)
        ranks = range(self.size)
        w1, b1 = one.weight.detach().chunk(self.size), one.bias.detach().chunk(self.size)
        w2, b2 = two.weight.detach().chunk(self.size, 1), two.bias.detach()
        hidden = self._gathered([F.linear(x, w1[r], b1[r]) for r in ranks], self.codec, step=1)
        own = [hidden[r].relu().chunk(self.size, -1)[r].contiguous() for r in ranks]
        partial = [F.linear(own[r], w2[r], b2 if r == 0 else None) for r in ranks]
        outputs = self._added(partial, self.codec, step=2)
        errors = [output - target for output in outputs]
        back = self._gathered([errors[r] @ w2[r] for r in ranks], self.error_codec, step=3)
        masked = [(back[r] * (hidden[r] > 0)).chunk(self.size, -1)[r].contiguous() for r in ranks]
        inputs = self._added([masked[r] @ w1[r] for r in ranks], self.error_codec, step=4)
        return [_results(outputs[r], inputs[r], masked[r], x, errors[r], own[r], r) for r in ranks]

    def by_samples(self) -> list[Results]:
        """Both layers between data-parallel ones: each rank has samples, and a loss, of its own."""
        one, two = whole_layers()
        ranks = range(self.size)
        x, targets = zip(*(samples(r) for r in ranks), strict=True)
        w1, b1 = one.weight.detach().chunk(self.size), one.bias.detach().chunk(self.size)
        w2, b2 = two.weight.detach().chunk(self.size, 1), two.bias.detach()
        everywhere = [
            g.reshape(self.size * BATCH, -1) for g in self._by_rank(x, self.codec, step=1)
        ]
        before = [F.linear(everywhere[r], w1[r], b1[r]) for r in ranks]
        own = [one.relu() for one in before]
        partial = [F.linear(own[r], w2[r], b2 if r == 0 else None) for r in ranks]
        outputs = self._shares(partial, self.codec, step=2)
        errors = [outputs[r] - targets[r] for r in ranks]
        back = [
            g.reshape(self.size * BATCH, -1)
            for g in self._by_rank([e / self.size for e in errors], self.error_codec, step=3)
        ]
        masked = [(back[r] @ w2[r]) * (before[r] > 0) for r in ranks]
        shares = self._shares([masked[r] @ w1[r] for r in ranks], self.error_codec, step=4)
        return [
            _results(
                outputs[r], shares[r] * self.size, masked[r], everywhere[r], back[r], own[r], r
            )
            for r in ranks
        ]

    def _by_rank(
        self, parts: Sequence[torch.Tensor], codec: Codec, step: int
    ) -> list[torch.Tensor]:
        """For each rank, all ranks' tensors as it has them."""
        decoded = [sent(codec, part, r, 0, step) for r, part in enumerate(parts)]
        return [
            torch.stack(
                [parts[k] if self._is_exact(r, k) else decoded[k] for k in range(self.size)]
            )
            for r in range(self.size)
        ]

    def _gathered(
        self, parts: Sequence[torch.Tensor], codec: Codec, step: int
    ) -> list[torch.Tensor]:
        return [torch.cat(list(one), -1) for one in self._by_rank(parts, codec, step)]

    def _added(self, parts: Sequence[torch.Tensor], codec: Codec, step: int) -> list[torch.Tensor]:
        return [_in_order(list(one)) for one in self._by_rank(parts, codec, step)]

    def _shares(self, parts: Sequence[torch.Tensor], codec: Codec, step: int) -> list[torch.Tensor]:
        """Each rank's share of the sum."""
        shares = [part.chunk(self.size) for part in parts]
        return [
            _in_order(
                [
                    shares[k][r] if self._is_exact(r, k) else sent(codec, shares[k][r], k, r, step)
                    for k in range(self.size)
                ]
            )
            for r in range(self.size)
        ]

    def _is_exact(self, rank: int, of: int) -> bool:
        return self.exact_own and rank == of


def _results(
    output: torch.Tensor,
    inputs: torch.Tensor,
    first: torch.Tensor,
    x: torch.Tensor,
    second: torch.Tensor,
    hidden: torch.Tensor,
    rank: int,
) -> Results:
    found = {
        "output": output,
        "inputs": inputs,
        "weight1": first.t() @ x,
        "bias1": first.sum(0),
        "weight2": second.t() @ hidden,
    }
    if rank == 0:
        found["bias2"] = second.sum(0)
    return found


def _in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros_like(parts[0])
    for part in parts:
        total = total + part
    return total


def sent(
    codec: Codec, x: torch.Tensor, rank: int, number: int, step: int, seed: int = 0
) -> torch.Tensor:
    """Returns the tensor that the other ranks get for a rank's tensor."""
    shape, flat = tuple(x.shape), x.float().contiguous().cpu().numpy().reshape(-1)
    payload = np.empty((1, codec.payload_bytes(shape)), np.uint8)
    decoded = np.empty(flat.size, np.float32)
    batch = ReferenceBatch([Entry(codec, shape, noise=NoiseKey(seed, rank, number))])
    batch.encode([flat], [None], [None], [step], payload[0])
    batch.decode_sum([decoded], [step], payload)
    return torch.from_numpy(decoded).to(x.device).reshape(shape)
