"""torch.distributed's collectives for CUDA tensors."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from hvd_compress.engine.comm import Collective
from hvd_compress.process_group.collectives import Collectives, Over, is_unregistered
from hvd_compress.process_group.streams import Beside, NoStream, SideStream


def collectives_of(group: dist.ProcessGroup | None, device: torch.device) -> Collectives:
    """Collectives of a process group for tensors on a device.

    Raises:
        ExchangeError: as for :class:`~hvd_compress.process_group.collectives.Collectives`.
        ValueError: the group has no backend for tensors there.

    A group that torch.distributed does not know cannot be doubled: its collectives are waited for one after
    the other, by the thread that starts them, so that one group is enough.
    """
    collectives = Collectives(group)
    if is_unregistered(group):
        assert group is not None
        if device.type == "cpu":
            return InStream(group, device, NoStream())
        gloo = group._get_backend(device).name() == "gloo"
        return (ThroughHost if gloo else InStream)(group, device, SideStream(device))
    backends = _backends(dist.get_backend_config(group))
    needed = [device.type, "cpu"] if backends.get(device.type) == "gloo" else [device.type]
    for place in needed:
        if backends and place not in backends:
            found = ", ".join(f"{backend} for {kind}" for kind, backend in backends.items())
            raise ValueError(
                f"Compressor.process_group: expected one with a backend for {place} tensors, got {found}: "
                f"use init_process_group('cpu:gloo,cuda:nccl')"
            )
    if device.type == "cpu":
        return collectives
    chosen = ThroughHost if backends.get(device.type) == "gloo" else InStream
    return chosen(group, device, SideStream(device))


def meeting_place(group: dist.ProcessGroup | None) -> torch.device:
    """Where tensors can be that a group gathers: in the memory of the CPU, unless it has CUDA's only.

    Raises:
        ExchangeError: there is no process group, or this rank is not in it.
    """
    if not is_unregistered(group):
        Collectives(group)
        backends = _backends(dist.get_backend_config(group))
        if backends and "cpu" not in backends and "cuda" in backends:
            return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class InStream(Collectives):
    """Collectives that streams wait for, and the host does not, as NCCL's.

    All of a bucket's collectives are started by its hook, one behind the other: those that follow the first
    one are put behind it in a stream beside the backward pass, and so is what decodes. So they are started
    in the order of the buckets, which is the same on every rank, and one process group is enough.

    Args:
        group: as DDP's; None is the default group.
        device: where tensors are.
        side: the stream for what comes behind collectives.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, side: Beside) -> None:
        super().__init__(group, device)
        self._side = side
        self._parts: dict[tuple[int, ...], Collectives] = {tuple(range(self.size)): self}

    def start(self, collective: Collective) -> tuple[torch.Tensor, dist.Work]:
        result, work = super().start(collective)
        self._take(collective.message, result)
        return result, work

    def all_gather(self, message: torch.Tensor) -> tuple[torch.Tensor, dist.Work]:
        rows, work = super().all_gather(message)
        self._take(message, rows)
        return rows, work

    def among(self, ranks: Sequence[int]) -> Collectives:
        """See :meth:`Collectives.among`; the same ranks have one process group for all rounds."""
        key = tuple(ranks)
        if key not in self._parts:
            self._parts[key] = super().among(ranks)
        return self._parts[key]

    def when_over(self, work: dist.Work, over: Over) -> None:
        """See :meth:`Collectives.when_over`: at once, in the stream that waits for the collective."""
        with self._side.entered():
            try:
                work.wait()
            except Exception as error:
                over(error)
            else:
                over(None)

    def behind(self) -> AbstractContextManager[None]:
        return self._side.entered()

    def begin_step(self) -> None:
        self._side.caught_up()

    def _of(self, group: dist.ProcessGroup) -> Collectives:
        return type(self)(group, self.device, self._side)

    def _take(self, *tensors: torch.Tensor) -> None:
        # Only the side stream waits for the collective: when what was sent may be reused is known there.
        for tensor in tensors:
            self._side.takes(tensor)


class ThroughHost(InStream):
    """Messages by gloo, through the memory of the CPU: the host waits for each of them.

    For ranks that NCCL cannot connect, such as two that share a GPU. Ranks cannot wait for each other in
    a circle, since all of them start and await the same collectives in the same order.
    """

    def start(self, collective: Collective) -> tuple[torch.Tensor, dist.Work]:
        on_host = dataclasses.replace(collective, message=collective.message.cpu())
        result, work = Collectives.start(self, on_host)
        return self._landing(result, work)

    def all_gather(self, message: torch.Tensor) -> tuple[torch.Tensor, dist.Work]:
        return self._landing(*Collectives.all_gather(self, message.cpu()))

    def _landing(self, received: torch.Tensor, work: dist.Work) -> tuple[torch.Tensor, dist.Work]:
        there = torch.empty_like(received, device=self.device)
        return there, self._over(there, received, work)

    def _over(self, there: torch.Tensor, received: torch.Tensor, work: dist.Work) -> dist.Work:
        self._take(there)
        super(InStream, self).when_over(
            work, lambda _: None
        )  # Held until gloo's thread is done with it.
        return _Landing(there, received, work)


class _Landing(dist.Work):
    """A collective on the host, and a copy of its result to the device when it is waited for."""

    def __init__(self, there: torch.Tensor, received: torch.Tensor, work: dist.Work) -> None:
        super().__init__()
        self._there, self._received, self._work = there, received, work

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """Waits for the collective, and puts the copy into the current stream."""
        self._work.wait(timeout)
        self._there.copy_(self._received)
        return True


def _backends(configured: str) -> dict[str, str]:
    """Backends by the kind of device, of ``"cpu:gloo,cuda:nccl"``; none where it is written otherwise."""
    pairs = [pair.split(":", 1) for pair in configured.split(",")]
    return dict(pairs) if all(len(pair) == 2 for pair in pairs) else {}
