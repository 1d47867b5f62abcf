"""Streams of a device that is not there: who must be behind whom, held by vector clocks.

Everything runs on the host at once. But each operation belongs to the stream that is current, and two that
use the same memory, of which one writes it, have to be in one stream or be ordered by what one has waited
for. So has the reuse of memory: it belongs to the stream that it was made in, and to those that were said
to use it.
"""

from __future__ import annotations

import datetime
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hvd_compress.ddp.compressor import Compressor
from hvd_compress.engine import batch, executors, low_rank
from hvd_compress.engine.comm import Collective
from hvd_compress.kernels.cpu_arrays import CheckedOnce
from hvd_compress.kernels.cuda_batch import CudaBatch
from hvd_compress.process_group.collectives import Collectives
from hvd_compress.process_group.device_collectives import InStream
from hvd_compress.process_group.step import Bucket
from tests.cuda.executors import Checked

BACKWARD, SIDE, NETWORK = "backward", "side", "network"
_HOST_LOOKS = ("cpu", "item", "tolist", "numpy", "__bool__")
Clock = dict[str, int]

# Otherwise, lists of this class would be leaves, and their tensors would not be seen.
pytree.register_pytree_node(
    CheckedOnce, lambda one: (list(one), None), lambda tensors, _: CheckedOnce(tensors)
)


class Race(AssertionError):
    """Two operations on the same memory that nothing orders."""


class _Memory:
    """The streams that have used a storage since it was made."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.users = {owner}
        self.write: tuple[str, int, str] | None = None
        self.reads: dict[str, tuple[int, str]] = {}

    def uses(self) -> Iterator[tuple[str, int, str]]:
        """Stream, time and name of all that came last in their streams."""
        if self.write is not None:
            yield self.write
        for stream, (time, what) in self.reads.items():
            yield stream, time, what


class Streams(TorchDispatchMode):
    """The streams of one device; implements :class:`hvd_compress.process_group.streams.Beside`.

    Args:
        kernels: the emulated ones, whose calls are noted, too.

    Attributes:
        looks: the number of times that the host has looked at numbers on the device, and so has to wait.
        crossed: the number of times that operations in different streams have used the same memory.
    """

    def __init__(self, kernels: Checked) -> None:
        super().__init__()
        self._current = BACKWARD
        self._clocks: dict[str, Clock] = {s: {s: 0} for s in (BACKWARD, SIDE, NETWORK)}
        self._memory: dict[int, _Memory] = {}
        self._completed: dict[int, Clock] = {}
        self._kernels = kernels
        self._patches = ExitStack()
        self._busy = self._in_hook = False
        self.looks = 0
        self.crossed = 0
        self.races: list[str] = []

    # What the hook asks for

    @contextmanager
    def entered(self) -> Iterator[None]:
        before, self._current = self._current, SIDE
        self._wait(SIDE, self._clocks[before])
        try:
            yield
        finally:
            self._current = before

    def caught_up(self) -> None:
        self._wait(self._current, self._clocks[SIDE])

    def takes(self, tensor: torch.Tensor) -> None:
        self._of(tensor).users.add(SIDE)

    # What a collective does

    def start(self, reads: torch.Tensor, *writes: torch.Tensor) -> None:
        """A collective, behind what is in the current stream by now."""
        self._wait(NETWORK, self._clocks[self._current])
        self._note(NETWORK, "collective", [reads], writes)
        for tensor in (reads, *writes):
            self._of(tensor).users.add(
                NETWORK
            )  # As NCCL's process group does, until it is waited for.

    def land(self, *tensors: torch.Tensor) -> None:
        """Makes the current stream wait for the collectives so far, and releases their tensors."""
        self._wait(self._current, self._clocks[NETWORK])
        for tensor in tensors:
            self._of(tensor).users.discard(NETWORK)

    # What is watched

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace != "aten" or self._busy:
            return out
        reads, writes = [], []
        schema = func._schema.arguments
        pairs = [*zip(schema, args, strict=False)]
        pairs += [(one, kwargs[one.name]) for one in schema if one.name in kwargs]
        views = any(one.alias_info is not None and not one.alias_info.is_write for one in schema)
        for argument, value in pairs:
            written = argument.alias_info is not None and argument.alias_info.is_write
            found = [one for one in pytree.tree_leaves(value) if isinstance(one, torch.Tensor)]
            if written:
                writes += found
            elif not views:
                reads += found
        if not views:
            writes += [one for one in pytree.tree_leaves(out) if isinstance(one, torch.Tensor)]
        self._note(self._current, str(func), reads, writes)
        return out

    def __enter__(self) -> Streams:
        for where, name, reads, writes in (
            (self._kernels, "encode", (2,), (3, "residual")),
            (self._kernels, "decode_sum", (2,), (3,)),
            (self._kernels, "collect_flags", (0,), (1,)),
            (self._kernels, "restore", (1,), (0,)),
            (CudaBatch, "encode", (1, 2), (3, 5)),
            (CudaBatch, "decode_sum", (3,), (1, 5)),
        ):
            self._watch(where, name, reads, writes)
        self._patch(Bucket, "resolve", self._resolve)
        self._patch(Compressor, "reduce", self._hook)
        self._patch(executors.Executors, "settle", self._synchronize)
        for module in (executors, batch, low_rank):
            self._patches.enter_context(mock.patch.object(module, "keep_from_reuse", self._keep))
        for name in _HOST_LOOKS:
            self._patch(torch.Tensor, name, self._look)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()
        if not any(error) and self.races:
            raise Race("\n".join(dict.fromkeys(self.races)))

    def _watch(
        self, where: Any, name: str, reads: Sequence[int | str], writes: Sequence[int | str]
    ) -> None:
        real = getattr(where, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            def given(keys: Sequence[int | str]) -> list[torch.Tensor]:
                found = [args[k] if isinstance(k, int) else kwargs.get(k) for k in keys]
                leaves = pytree.tree_leaves(found)
                return [one for one in leaves if isinstance(one, torch.Tensor)]

            self._note(self._current, name, given(reads), given(writes))
            self._busy = True
            try:
                return real(*args, **kwargs)
            finally:
                self._busy = False

        self._patches.enter_context(mock.patch.object(where, name, watched))

    def _patch(self, where: type, name: str, instead: Any) -> None:
        real = getattr(where, name)
        patched = lambda one, *args, **kwargs: instead(real, one, *args, **kwargs)  # noqa: E731
        self._patches.enter_context(mock.patch.object(where, name, patched))

    def _resolve(self, real: Any, bucket: Bucket, *args: Any) -> None:
        # A future records what is in the current stream when it is completed.
        self._completed.setdefault(id(bucket), dict(self._clocks[self._current]))
        real(bucket, *args)

    def _keep(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            self._of(tensor).users.add(self._current)

    def _synchronize(self, real: Any, kernels: Any) -> None:
        # The host waits for the device, and all that it starts afterwards is behind everything.
        real(kernels)
        for clock in list(self._clocks.values()):
            self._wait(self._current, clock)

    def _hook(self, real: Any, compressor: Compressor, bucket: Any) -> Any:
        self._in_hook = True
        try:
            future = real(compressor, bucket)
        finally:
            self._in_hook = False
        if bucket.is_last():
            # The next that DDP does is to wait for the futures.
            while self._completed:
                self._wait(self._current, self._completed.popitem()[1])
        return future

    def _look(self, real: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.looks += self._in_hook and not self._busy
        return real(tensor, *args, **kwargs)

    def _wait(self, stream: str, other: Clock) -> None:
        clock = self._clocks[stream]
        for name, time in other.items():
            clock[name] = max(clock.get(name, 0), time)

    def _of(self, tensor: torch.Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._memory:
            self._memory[key] = _Memory(self._current)
            weakref.finalize(storage, self._freed, key)
        return self._memory[key]

    def _freed(self, key: int) -> None:
        # The allocator has the next owner wait for what is in the users' streams by now.
        memory = self._memory.pop(key)
        seen = [self._clocks[user] for user in memory.users]
        for stream, time, what in memory.uses():
            if time > max(clock.get(stream, 0) for clock in seen):
                self.races.append(f"memory of {memory.owner} is reused while {stream} does {what}")

    def _note(
        self, stream: str, what: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        clock = self._clocks[stream]
        clock[stream] += 1
        written = {id(self._of(one)): self._of(one) for one in writes if one.numel()}
        read = {id(self._of(one)): self._of(one) for one in reads if one.numel()}
        for key, memory in {**read, **written}.items():
            earlier = [memory.write] if memory.write is not None else []
            if key in written:
                earlier = [*memory.uses()]
            for other, time, name in earlier:
                self.crossed += other != stream
                if time > clock.get(other, 0):
                    self.races.append(f"{what} in {stream} is not behind {name} in {other}")
        now = clock[stream]
        for memory in read.values():
            memory.reads[stream] = (now, what)
        for memory in written.values():
            memory.write, memory.reads = (stream, now, what), {}


class Nowhere:
    """No streams: implements :class:`hvd_compress.process_group.streams.Beside` by the host alone."""

    def entered(self) -> AbstractContextManager[None]:
        return nullcontext()

    def caught_up(self) -> None:
        return

    def takes(self, tensor: torch.Tensor) -> None:
        return


class Traced(InStream):
    """The collectives of :class:`InStream` with gloo in NCCL's place, and streams that watch them."""

    _side: Streams

    def start(self, collective: Collective) -> tuple[torch.Tensor, dist.Work]:
        result, work = super().start(collective)
        return result, self._traced(work, collective.message, result)

    def all_gather(self, message: torch.Tensor) -> tuple[torch.Tensor, dist.Work]:
        rows, work = super().all_gather(message)
        return rows, self._traced(work, message, rows)

    def _traced(self, work: dist.Work, *tensors: torch.Tensor) -> dist.Work:
        Collectives.when_over(
            self, work, lambda _: None
        )  # Held until gloo's thread is done with it.
        self._side.start(*tensors)
        return _Landing(work, self._side, tensors)


class _Landing(dist.Work):
    def __init__(
        self, work: dist.Work, streams: Streams, tensors: tuple[torch.Tensor, ...]
    ) -> None:
        super().__init__()
        self._work, self._streams, self._tensors = work, streams, tensors

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        done = self._work.wait(timeout)
        self._streams.land(*self._tensors)
        self._tensors = ()
        return done
