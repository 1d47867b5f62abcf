"""Collectives of torch.distributed for CUDA tensors."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from hvd_compress.exchanges.comm import Collective
from hvd_compress.process_group.collectives import Collectives, Over
from hvd_compress.process_group.private import backend_for, is_unregistered
from hvd_compress.process_group.streams import NoStream, SideStream


def collectives_of(
    group: dist.ProcessGroup | None, device: torch.device | None = None
) -> Collectives:
    """Collectives of a process group for tensors on a device; None is the group's :func:`meeting_place`.

    A group that torch.distributed does not know cannot be duplicated. The thread that starts its
    collectives waits for each before it starts the next, so that one group is enough.

    Raises:
        ExchangeError: see :class:`~hvd_compress.process_group.collectives.Collectives`.
        ValueError: the group has no backend for tensors on the device.
    """
    device = device or meeting_place(group)
    collectives = Collectives(group)
    known = not is_unregistered(group)
    backends = _backends(group)
    needed = [device.type, "cpu"] if backends.get(device.type) == "gloo" else [device.type]
    for place in needed:
        if backends and place not in backends:
            found = ", ".join(f"{backend} for {kind}" for kind, backend in backends.items())
            raise ValueError(
                f"Compressor.process_group: expected one with a backend for {place} tensors, got {found}: "
                f"use init_process_group('cpu:gloo,cuda:nccl')"
            )
    if device.type == "cpu":
        return collectives if known else InStream(group, device, NoStream())
    backend = backends.get(device.type) if known else backend_for(collectives.group, device).name()
    return (ThroughHost if backend == "gloo" else InStream)(group, device, SideStream(device))


def meeting_place(group: dist.ProcessGroup | None) -> torch.device:
    """A device whose tensors a group can gather: the CPU, unless the group has no backend for it.

    Raises:
        ExchangeError: there is no process group, or this rank is not in it.
    """
    Collectives(group)
    backends = _backends(group)
    if backends and "cpu" not in backends:
        kind = next(iter(backends))
        return torch.device(kind, torch.get_device_module(kind).current_device())
    return torch.device("cpu")


class InStream(Collectives):
    """Collectives such as NCCL's, for which streams wait and the host does not.

    The hook of a bucket starts the bucket's first collective, and then the second one of the bucket before:
    while the owners compute averages, the next bucket's parts are on their way. What follows a collective
    is put into a stream beside the backward pass. So the order of all collectives depends only on the order
    of the buckets, which is the same on every rank, and one process group is enough.

    Args:
        group: the process group; None is the default group.
        device: the device of the tensors.
        side: the stream for the work that follows collectives.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, side: NoStream
    ) -> None:
        super().__init__(group, device)
        if "cpu" in _backends(group):
            # There, the host reads what arrives without waiting for the device's earlier work.
            self.meeting = torch.device("cpu")
        self._side = side
        self._parts: dict[tuple[int, ...], Collectives] = {tuple(range(self.size)): self}

    def start(self, collective: Collective) -> tuple[torch.Tensor, dist.Work]:
        """Starts a collective, and keeps its tensors until the side stream is done with them."""
        result, work = super().start(collective)
        if result.device.type != "cpu":
            # Only the side stream waits for the collective: it knows when what was sent may be reused.
            self._side.takes(collective.message, result)
        return result, work

    def among(self, ranks: Sequence[int]) -> Collectives:
        """See :meth:`Collectives.among`; the same ranks have one process group for all rounds."""
        key = tuple(ranks)
        if key not in self._parts:
            self._parts[key] = super().among(ranks)
        return self._parts[key]

    def when_over(self, work: dist.Work, over: Over) -> None:
        """See :meth:`Collectives.when_over`; calls ``over`` at once, in the stream that waits."""
        with self._side.entered():
            try:
                work.wait()
            except Exception as error:
                over(error)
            else:
                over(None)

    def lags(self, last: bool) -> bool:
        """Whether a result can be taken later; a stream waits for a bucket's last one at once."""
        return not last or self._side.host_waits

    def behind(self) -> AbstractContextManager[None]:
        """Returns the context of the side stream, which waits for the collectives."""
        return self._side.entered()

    def begin_step(self) -> None:
        """Makes the current stream wait for what the side stream does for earlier steps."""
        self._side.caught_up()

    def _of(self, group: dist.ProcessGroup) -> Collectives:
        return type(self)(group, self.device, self._side)


class ThroughHost(InStream):
    """Collectives by Gloo, with messages in CPU memory; the host waits for each message.

    This is for ranks that NCCL cannot connect, such as two ranks that share a GPU. A deadlock is
    impossible, because all ranks start the same collectives, and wait for them, in the same order. The hook
    of a bucket waits only for collectives of earlier buckets.
    """

    def lags(self, last: bool) -> bool:
        """Always: the host would wait."""
        return True

    def start(self, collective: Collective) -> tuple[torch.Tensor, dist.Work]:
        """Starts a collective of messages in CPU memory; the work copies the result to their device."""
        on_host = dataclasses.replace(collective, message=collective.message.cpu())
        received, work = Collectives.start(self, on_host)
        if collective.message.device.type == "cpu":
            return received, work
        there = torch.empty_like(received, device=self.device)
        self._side.takes(there)
        # Held until gloo's thread is done with it.
        Collectives.when_over(self, work, lambda _: None)
        return there, _Landing(there, received, work)


class _Landing(dist.Work):
    """A collective on the host whose result is copied to the device in :meth:`wait`."""

    def __init__(self, there: torch.Tensor, received: torch.Tensor, work: dist.Work) -> None:
        super().__init__()
        self._there, self._received, self._work = there, received, work

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """Waits for the collective, and copies its result in the current stream."""
        self._work.wait(timeout)
        self._there.copy_(self._received)
        return True


def _backends(group: dist.ProcessGroup | None) -> dict[str, str]:
    """A group's backends by device type, as in ``"cpu:gloo,cuda:nccl"``; empty if PyTorch knows none."""
    if is_unregistered(group):
        return {}
    pairs = [pair.split(":", 1) for pair in dist.get_backend_config(group).split(",")]
    return dict(pairs) if all(len(pair) == 2 for pair in pairs) else {}
