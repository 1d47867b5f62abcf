"""The training on each rank of :mod:`benchmarks.papers.int8_parallel`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hvd_compress.distributed as hvdc
from benchmarks.data import batches
from benchmarks.data.samples import Data
from benchmarks.models.torch import chain
from benchmarks.papers import models, training
from benchmarks.papers.experiment import Advance
from hvd_compress import ddp
from hvd_compress.codecs import Codec, Int8, NoCompression
from hvd_compress.codecs.int8 import Kind
from hvd_compress.papers import (
    ColumnParallelLinear,
    ParallelGroup,
    RowParallelLinear,
    gather_from_parallel,
)

PURE, OWN, DEEP = "model", "model, own part in 32 bits", "model, 4 hidden layers"
DATA, HYBRID = "data", "convolutional"
"""Model parallelism where a rank decodes its own part, too, which is what section 3.4 calls pure; where it
does not; with more layers. Data parallelism; convolutions data-parallel and dense layers model-parallel."""

EXACT = "32 bits"
RATE = 0.003
"""The learning rate of RMSProp (section 3.4)."""

_LAST = 10
"""The number of last steps whose loss is recorded."""
_ACTIVATIONS, _ERRORS = 2, 1
"""Exponent offsets of the types that are not normalised. Section 3.1 wants 2 to 4 for model parallelism;
error signals are as small as gradients, for which section 3.4 has 1."""


def train_all(settings: Any, advance: Advance) -> dict[str, dict[str, Any]]:
    """Every kind of parallelism with every type; a tick for each training.

    Args:
        settings: the :class:`benchmarks.papers.int8_parallel.Settings`.
        advance: a function that is called after each training.
    """
    images = training.images("lenet", settings.data)
    found: dict[str, dict[str, Any]] = {}
    for mode in settings.modes:
        for kind in settings.kinds:
            found.setdefault(mode, {})[kind] = _train(mode, kind, settings, images)
            advance()
    return found


def _train(mode: str, kind: str, settings: Any, images: Data) -> dict[str, Any]:
    torch.manual_seed(settings.seed)  # The same weights and the same dropout on every rank.
    net = _NETWORKS[mode](kind, settings.width, images)
    optimizer = torch.optim.RMSprop(net.parameters, lr=RATE)
    losses = []
    for x, y in _batches(settings, images, split=mode in (DATA, HYBRID)):
        optimizer.zero_grad()
        value = nn.functional.cross_entropy(net(x), y)
        value.backward()
        net.average_gradients()
        optimizer.step()
        losses.append(float(value.detach()))
    sent = net.message_bytes()
    accuracy, test_loss = training.score(net.whole(), images, "test")
    last = sum(losses[-_LAST:]) / len(losses[-_LAST:])
    return {
        # Where weights are not finite, all images are of one class: chance.
        "test_accuracy": accuracy if math.isfinite(test_loss) else 1 / images.classes,
        "last_loss": last if math.isfinite(last) else None,
        "message_bytes": sent // settings.steps,
    }


def _batches(
    settings: Any, images: Data, *, split: bool
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Mini-batches, the same on all ranks, or a rank's part of them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    count = len(images.train.labels)
    per_epoch = count // settings.batch
    for step in range(settings.steps):
        epoch, place = divmod(step, per_epoch)
        rows = batches.epoch(count, settings.batch, seed=settings.seed, epoch=epoch)[place]
        yield training.tensors(images, "train", rows[rank::size] if split else rows)


def _codec(kind: str, offset: int) -> Codec:
    if kind == EXACT:
        return NoCompression()
    chosen: Kind = kind  # type: ignore[assignment]
    return Int8(chosen, "tensor", offset)


def _group(kind: str, *, exact_own: bool) -> ParallelGroup:
    return ParallelGroup(
        _codec(kind, _ACTIVATIONS), error_codec=_codec(kind, _ERRORS), exact_own=exact_own
    )


def _dropout(images: Data, hidden: int, width: int) -> nn.Module:
    return chain.build(models.dropout(hidden, width), images.classes, images.image)


class _Dense:
    """The paper's network for MNIST, with dropout, each layer spread over the ranks."""

    def __init__(
        self, kind: str, width: int, images: Data, *, exact_own: bool = False, hidden: int = 2
    ) -> None:
        self._group = _group(kind, exact_own=exact_own)
        self._whole = _dropout(images, hidden, width)
        *first, last = _linears(self._whole)
        self._hidden = [
            ColumnParallelLinear.from_linear(one, self._group, gather_output=False) for one in first
        ]
        self._last = RowParallelLinear.from_linear(last, self._group)
        self.parameters = [p for layer in self._layers for p in layer.parameters()]

    @property
    def _layers(self) -> Sequence[ColumnParallelLinear | RowParallelLinear]:
        return [*self._hidden, self._last]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        drop: Callable[..., torch.Tensor] = nn.functional.dropout
        x = drop(x.flatten(1), 0.2)
        for layer in self._hidden:
            x = drop(gather_from_parallel(layer(x).relu(), self._group), 0.3)
        return self._last(x)

    def average_gradients(self) -> None:
        """Does nothing: every parameter is on one rank."""

    def whole(self) -> nn.Module:
        return _put_back(self._whole, self._layers)

    def message_bytes(self) -> int:
        return self._group.counters.message_bytes


class _DataParallel:
    """The same network on every rank, for a part of the mini-batch."""

    def __init__(self, kind: str, width: int, images: Data) -> None:
        self._whole = _dropout(images, 2, width)
        self.parameters = list(self._whole.parameters())
        self._keys = [name for name, _ in self._whole.named_parameters()]
        self._compressor = hvdc.Compressor(_codec(kind, _ERRORS), threshold=0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._whole(x)

    def average_gradients(self) -> None:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        hvdc.all_reduce(gradients, self._compressor, key=self._keys)

    def whole(self) -> nn.Module:
        return self._whole

    def message_bytes(self) -> int:
        return self._compressor.counters.message_bytes


class _Convolutional:
    """LeNet: convolutions by DDP, each rank for its samples, and dense layers spread over the ranks."""

    def __init__(self, kind: str, width: int, images: Data) -> None:
        self._group = _group(kind, exact_own=True)
        self._whole = models.build("lenet", images.image, images.classes)
        modules = list(self._whole.children())
        dense = next(at for at, one in enumerate(modules) if isinstance(one, nn.Linear))
        convolutions = nn.Sequential(*modules[:dense])
        self._convolutions = DistributedDataParallel(convolutions)
        self._compressor = ddp.Compressor(self._convolutions, _codec(kind, _ERRORS), threshold=0)
        self._convolutions.register_comm_hook(self._compressor, ddp.hook)
        outer = {"batch_parallel": True}
        first, second, last = _linears(self._whole)
        self._layers = (
            ColumnParallelLinear.from_linear(first, self._group, gather_output=False, **outer),
            RowParallelLinear.from_linear(second, self._group, input_is_parallel=True),
            RowParallelLinear.from_linear(last, self._group, **outer),
        )
        self.parameters = [
            *convolutions.parameters(),
            *(p for layer in self._layers for p in layer.parameters()),
        ]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        first, second, last = self._layers
        return last(second(first(self._convolutions(x)).relu()).relu())

    def average_gradients(self) -> None:
        """Does nothing: DDP averages them."""

    def whole(self) -> nn.Module:
        return _put_back(self._whole, self._layers)

    def message_bytes(self) -> int:
        return self._group.counters.message_bytes + self._compressor.counters.message_bytes


def _linears(module: nn.Module) -> list[nn.Linear]:
    return [layer for layer in module.modules() if isinstance(layer, nn.Linear)]


def _put_back(
    whole: nn.Module, layers: Sequence[ColumnParallelLinear | RowParallelLinear]
) -> nn.Module:
    """The unsharded network with the layers' parameters."""
    for linear, layer in zip(_linears(whole), layers, strict=True):
        linear.load_state_dict(layer.to_linear().state_dict())
    return whole


_NETWORKS: dict[str, Callable[[str, int, Data], _Dense | _DataParallel | _Convolutional]] = {
    PURE: _Dense,
    OWN: partial(_Dense, exact_own=True),
    DEEP: partial(_Dense, hidden=4),
    DATA: _DataParallel,
    HYBRID: _Convolutional,
}
