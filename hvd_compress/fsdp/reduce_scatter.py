"""FSDP2's reduce-scatter with payloads: each rank sends its gradients to the ranks with their shards."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from hvd_compress.codecs import Codec, PayloadError
from hvd_compress.codecs.checks import check_number
from hvd_compress.engine.state_checks import expect_state
from hvd_compress.engine.use import TorchUse
from hvd_compress.fsdp.collective import CompressedCollective
from hvd_compress.fsdp.passes import BackwardPass
from hvd_compress.process_group.encoded import EncodedCollectives
from hvd_compress.process_group.environment import ranks_of_job
from hvd_compress.ranks.counters import Counters

_VERSION = 1

REMEDY = (
    "train the model that it was made for, and call set_requires_gradient_sync(True) and "
    "set_requires_all_reduce(True) before the backward pass that exchanges"
)


class CompressedReduceScatter(CompressedCollective):
    """Makes FSDP2 sum gradients among the ranks of a shard group in encoded form.

    FSDP2 calls the reduce-scatter of a module when the module's gradients are computed. Each rank then
    encodes, for every rank, the part of its gradients that belongs to that rank's shards, and sends the
    payloads in one all_to_all. A rank decodes the payloads that it receives, including its own, and adds
    them up in float32, in rank order. There is no error feedback: a rank would need a residual as large as
    the unsharded model.

    All ranks of the shard group make it together: they compare their settings, make a process group of
    their own, and set the reduce-scatter of all modules. FSDP2's all-gathers of parameters do not change.
    With replicas, also make a :class:`Compressor` or use FSDP2's own HSDP.

    Before every exchange the ranks compare sizes. A module's gradients with an Inf or a NaN, or with a
    number beyond the range of ``FP16()``, become NaN in the module's shards on all ranks.
    ``Int8("static")`` and ``Int8("mantissa")`` cut numbers off at the end of their range.

    Args:
        model: a model, or a part of one, whose modules went through ``fully_shard``.
        codec: the encoding of gradients, such as ``Int8()`` of :mod:`hvd_compress.codecs`, or its name;
            not :class:`~hvd_compress.codecs.OneBit`, which needs error feedback, and not
            ``coding="entropy"``.
        seed: the seed of the stochastic codecs' noise, the same on every rank.
        threads: kernel threads; None is ``torch.get_num_threads()``.

    Raises:
        TypeError, ValueError: an argument is wrong, "expected X, got Y"; or the model is not FSDP2's, or
            already has another reduce-scatter. Nothing is set then.
        ExchangeError: the ranks' settings differ, or one rank has raised another error (then raised on
            every rank); or there is no process group.
        NotImplementedError: the FSDP2 of this version of PyTorch is different.
    """

    _replaced = "reduce_scatter"
    _tensors = "gradients", "reduce_dtype"
    _collectives: _Collectives

    def __init__(
        self,
        model: torch.nn.Module,
        codec: Codec | str,
        *,
        seed: int = 0,
        threads: int | None = None,
    ) -> None:
        super().__init__(model, codec, seed, threads, _Collectives)
        self._seed = seed
        name = f"{type(self).__name__} {self._codec}"
        self._use = TorchUse(name, REMEDY, model.parameters(), ranks_of_job)
        self._passes = 0
        self._pass = BackwardPass(self._end)
        for one in self._modules:
            content = f"gradients of {one.name}"
            self._replace(one, functools.partial(self._reduce, content))

    @property
    def counters(self) -> Counters:
        """A copy of this rank's counts of traffic in the shard group; ``steps`` counts backward passes."""
        return replace(self._collectives.counters, steps=self._passes)

    def reset_counters(self) -> None:
        """Starts all counts at zero again."""
        self._collectives.counters = Counters()
        self._passes = 0

    def state_dict(self) -> dict[str, Any]:
        """The position in the noise, the same on every rank; later exchanges depend on nothing else."""
        return {"version": _VERSION, "seed": self._seed, "exchanges": self._collectives.exchanges}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where :meth:`state_dict` was called; every rank has to load.

        Raises:
            TypeError: the argument is not a value of ``state_dict()``, or a field is of another type.
            ValueError: the state is of another version, or has another seed, or no position in the noise.
        """
        expect_state("load_state_dict", state, ("version", "seed", "exchanges"))
        for field, want in (("version", _VERSION), ("seed", self._seed)):
            if state.get(field) != want:
                raise ValueError(
                    f"load_state_dict: expected {field} {want}, got {state.get(field)}"
                )
        check_number("load_state_dict", "exchanges", state["exchanges"], 0, 2**63 - 1, integer=True)
        self._collectives.exchanges = state["exchanges"]

    def _check(self, codec: Codec) -> None:
        if codec.feedback.alpha == 1:
            raise ValueError(
                f"{type(self).__name__}.codec: expected a codec that trains without error feedback, such "
                f"as Int8(), got {codec}"
            )
        super()._check(codec)

    def _reduce(
        self, content: str, own: torch.Tensor, whole: torch.Tensor, _: dist.ProcessGroup, op: Any
    ) -> None:
        """Reduces ``whole``, shape=(ranks * n,), of a module into ``own``, shape=(n,)."""
        if not self._use.exchanged:
            self._use.begin()
        if self._pass.watch():  # The one before has ended with an error, which was raised then.
            self._collectives.failure = None
        with self._collectives.telling(whole.device):
            scale = _factor(op, self._collectives.size)
        own.copy_(self._collectives.reduce_scatter(whole, content, self._codec, scale=scale))
        if self._collectives.failure is not None:
            own.fill_(torch.nan)

    def _end(self) -> None:
        """Called by every rank at the end of a backward pass; raises on all ranks what has failed in it."""
        self._passes += 1
        with self._collectives.keeping():
            self._collectives.settle()
        failure, self._collectives.failure = self._collectives.failure, None
        self._collectives.raise_everywhere("end of a backward pass", failure, self._device)


class _Collectives(EncodedCollectives):
    """Stores errors within an exchange: other ranks may not reach the next one before this rank does.

    Attributes:
        failure: the first error.
    """

    failure: Exception | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        # Replicas of a shard group draw other noise.
        super().__init__(*arguments, noise_rank=dist.get_rank(), **options)

    def _receiving(self, device: torch.device) -> AbstractContextManager[None]:
        return self.keeping()

    def _raise_earlier(self) -> None:
        try:
            super()._raise_earlier()
        except PayloadError as error:
            self.failure = self.failure or error

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Stores an exception that is raised in this context."""
        try:
            yield
        except Exception as error:
            self.failure = self.failure or error


def _factor(op: Any, ranks: int) -> float:
    """The factor by which an operation of torch.distributed multiplies a sum."""
    kinds: Any = dist.ReduceOp.RedOpType
    operation: Any = dist.ReduceOp(op) if isinstance(op, kinds) else op
    kind, factor = operation.__getstate__()
    if kind == kinds.PREMUL_SUM:  # set_gradient_divide_factor makes it.
        return float(factor)
    if kind in (kinds.SUM, kinds.AVG):
        return 1.0 if kind == kinds.SUM else 1 / ranks
    raise ValueError(f"expected the reduce operation SUM, AVG or PREMUL_SUM, got {kind}")
