"""FSDP2's all-gather of parameters with payloads: ranks send what has changed since the last gather."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from hvd_compress.codecs import Codec, ErrorFeedback
from hvd_compress.exchanges.routing import Route, check_feedback
from hvd_compress.fsdp.collective import CompressedCollective
from hvd_compress.fsdp.sharding import Shared
from hvd_compress.process_group.encoded import EncodedCollectives
from hvd_compress.ranks.counters import Counters
from hvd_compress.ranks.errors import ExchangeError

_UNCHANGED, _CHANGED, _WHOLE, _FAILED = range(4)
"""The requests of a rank in a gather; the ranks carry out the largest one."""

_LARGE = 0.5
"""A change by this share of a shard's norm is no optimizer's step, and a codec would round it coarsely."""


class CompressedAllGather(CompressedCollective):
    """Makes FSDP2 gather parameters as encoded differences from the last gathered ones.

    All ranks of a shard group keep the same copy of the unsharded parameters. When FSDP2 gathers a module,
    each rank encodes the difference between its shard and the copy, and sends the payload to all ranks,
    which add the decoded differences to their copies. Forward and backward passes use the copy. What a
    payload leaves out is part of the next difference, so that nothing is lost: this is error feedback
    without a residual. The optimizer changes the exact shards, and ``state_dict()`` of the model has these.

    Each gather begins with 32 bytes from every rank. Nothing else is sent if no shard has changed since the
    last gather, as in the backward pass, in the accumulation of gradients and in evaluation. Parameters
    travel unencoded in the first gather of a module, where a shard has changed by more than half of its
    norm, as by loading a checkpoint, and where one has an Inf or a NaN.

    All ranks of the shard group make it together: they compare their settings, make a process group of
    their own, and set the all-gather of all modules. It needs the memory of the unsharded parameters once,
    in the dtype in which they are gathered, and of this rank's shards once more. A copy is not saved: a job
    that continues from a checkpoint begins with whole parameters.

    Args:
        model: a model, or a part of one, whose modules went through ``fully_shard``.
        codec: the encoding of differences, such as ``Int8()`` of :mod:`hvd_compress.codecs`, or its name;
            not ``coding="entropy"``, and not a codec for which full error feedback is unstable.
        seed: the seed of the stochastic codecs' noise, the same on every rank.
        threads: kernel threads; None is ``torch.get_num_threads()``.

    Raises:
        TypeError, ValueError: an argument is wrong, "expected X, got Y"; or the model is not FSDP2's, or
            already has another all-gather. Nothing is set then.
        ExchangeError: the ranks' settings differ, or one rank has raised another error (then raised on
            every rank); or there is no process group.
        NotImplementedError: the FSDP2 of this version of PyTorch is different.
    """

    _replaced = "all_gather"
    _tensors = "parameters", "param_dtype"
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
        for number, one in enumerate(self._modules):
            copy = _Copy(number, one)
            self._collectives.copies.append(copy)
            self._replace(one, functools.partial(self._gather, copy))

    @property
    def counters(self) -> Counters:
        """A copy of this rank's counts; ``steps`` counts the gathers of modules, including empty ones."""
        return replace(self._collectives.counters)

    def reset_counters(self) -> None:
        """Starts all counts at zero again."""
        self._collectives.counters = Counters()

    def _check(self, codec: Codec) -> None:
        super()._check(codec)
        ranks = dist.get_world_size(self._modules[0].process_group)
        for one in self._modules:
            shape = (-(-one.elements // ranks),)
            check_feedback(
                f"{type(self).__name__}: {one.name}", shape, Route(codec, ErrorFeedback())
            )

    def _gather(
        self,
        copy: _Copy,
        output: torch.Tensor,
        own: torch.Tensor,
        group: dist.ProcessGroup,
        _: Any,
    ) -> None:
        """Gathers the ranks' ``own``, shape=(n,), into ``output``, shape=(ranks * n,)."""
        if group is not copy.module.process_group:
            # With reshard_after_forward=<number>, what was gathered in the forward pass is gathered again.
            dist.all_gather_into_tensor(output, own, group=group)
            return
        output.copy_(self._collectives.update(copy, own, self._codec).view(-1))


@dataclass(eq=False)
class _Copy:
    """The copy of a module's parameters that all ranks hold.

    Attributes:
        number: the module's number among the modules.
        module: the module.
        values: the last gathered parameters, shape=(ranks, n); None before the first gather.
        shard: this rank's exact shard in that gather, shape=(n,); None if the next one has to be whole.
    """

    number: int
    module: Shared
    values: torch.Tensor | None = None
    shard: torch.Tensor | None = None

    @property
    def content(self) -> str:
        """A description for messages."""
        return f"parameters of {self.module.name}"


class _Collectives(EncodedCollectives):
    """Gathers with payloads of differences.

    Attributes:
        copies: the copies, in the order of the modules.
        failure: an error of this rank that the other ranks do not know of yet.
    """

    failure: Exception | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.copies: list[_Copy] = []

    def update(self, copy: _Copy, own: torch.Tensor, codec: Codec) -> torch.Tensor:
        """Brings a copy up to date with all ranks' shards, and returns its values.

        Raises:
            ExchangeError: another rank has failed, or the ranks gather different modules.
            Exception: this rank's own error; the other ranks learn of it in this gather.
        """
        self._kernels.order(own)
        self.exchanges += 1
        self.counters.steps += 1
        self.counters.uncompressed_bytes += own.numel() * own.element_size()
        asked, message = _FAILED, None
        try:
            if self.failure is None:
                self._kernels.check()
                asked, message = self._prepare(copy, own, codec)
        except Exception as error:
            self.failure = error
        self._act(copy, own, codec, self._meet(copy, asked, own), message)
        assert copy.values is not None
        return copy.values

    def _prepare(
        self, copy: _Copy, own: torch.Tensor, codec: Codec
    ) -> tuple[int, torch.Tensor | None]:
        """Returns this rank's request, and its payload if its shard has changed a little."""
        if own.dtype != copy.module.dtype:
            raise TypeError(
                f"{copy.content}: expected {copy.module.dtype}, as when the CompressedAllGather was made, "
                f"got {own.dtype}"
            )
        if copy.values is None or copy.shard is None:
            return _WHOLE, None
        if torch.equal(own, copy.shard):
            return _UNCHANGED, None
        whole = own.float()
        change = (whole - copy.values[self.rank]).norm()
        if not bool(change <= _LARGE * whole.norm()):  # Also of a NaN.
            return _WHOLE, None
        message = self._payload(copy, own, codec)
        return (_WHOLE, None) if self._flagged(message.view(1, -1)) else (_CHANGED, message)

    def _payload(self, copy: _Copy, own: torch.Tensor, codec: Codec) -> torch.Tensor:
        """This rank's encoded difference from a copy."""
        assert copy.values is not None
        size = codec.payload_bytes(tuple(own.shape))
        message = torch.empty(size, dtype=torch.uint8, device=own.device)
        self._encode(codec, [own - copy.values[self.rank].float()], message)
        return message

    def _meet(self, copy: _Copy, asked: int, own: torch.Tensor) -> int:
        """Waits for the requests of all ranks, and returns the largest one.

        Raises:
            ExchangeError: see :meth:`update`.
        """
        words = torch.tensor(
            [copy.number, self.exchanges, own.numel(), asked], dtype=torch.int64, device=own.device
        )
        collective = self._comm.all_gather(words.view(torch.uint8))
        rows = self._transport.run(collective, "requests").view(torch.int64).tolist()
        failure, self.failure = self.failure, None
        failed = [rank for rank, row in enumerate(rows) if row[-1] == _FAILED]
        if failed:
            for one in self.copies:  # They may differ between ranks.
                one.shard = None
        if failure is not None:
            raise failure
        if failed:
            raise ExchangeError(
                f"{copy.content}: expected a gather of all ranks, but rank {failed[0]} has failed, whose "
                f"own error says why"
            )
        if any(row[:-1] != rows[0][:-1] for row in rows):
            told = ", ".join(
                f"{row[2]} elements of module {row[0]} in gather {row[1]} on rank {rank}"
                for rank, row in enumerate(rows)
            )
            raise ExchangeError(f"expected the same gather on all ranks, got {told}")
        return max(row[-1] for row in rows)

    def _act(
        self,
        copy: _Copy,
        own: torch.Tensor,
        codec: Codec,
        asked: int,
        message: torch.Tensor | None,
    ) -> None:
        if asked == _UNCHANGED:
            return
        if copy.values is None:
            with torch.inference_mode(False):  # Later gathers, outside of that mode, write to it.
                copy.values = own.new_empty(self.size, own.numel())
        if asked == _WHOLE:
            copy.values.copy_(self._sent(own.view(torch.uint8)).view(own.dtype))
        else:
            if message is None:
                message = self._late(copy, own, codec)
            self.counters.encoded_elements += own.numel()
            self._add(copy, codec, self._sent(message))
        copy.shard = own.clone()

    def _late(self, copy: _Copy, own: torch.Tensor, codec: Codec) -> torch.Tensor:
        """The payload of a rank whose shard has not changed; zeros, which is none, after an error."""
        try:
            return self._payload(copy, own, codec)
        except Exception as error:
            self.failure = error
            return own.new_zeros(codec.payload_bytes(tuple(own.shape)), dtype=torch.uint8)

    def _add(self, copy: _Copy, codec: Codec, rows: torch.Tensor) -> None:
        """Adds the ranks' decoded differences to a copy."""
        assert copy.values is not None
        change = torch.empty(copy.values.shape[1], dtype=torch.float32, device=rows.device)
        try:
            for rank, values in enumerate(copy.values):
                self._decode(codec, rows[rank : rank + 1], change, copy.content, rank)
                values.copy_(change.add_(values))
        except Exception as error:
            # The others go on, and hear of it in the next gather.
            self.failure = self.failure or error
            copy.values.fill_(torch.nan)

    def _sent(self, message: torch.Tensor) -> torch.Tensor:
        return self._send(self._comm.all_gather(message), "parameters")
