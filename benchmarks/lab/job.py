"""One Horovod job on the hosts of a lab."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horovod.runner import gloo_run
from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
from horovod.runner.http.http_server import RendezvousServer

from benchmarks.lab.link import Link
from benchmarks.lab.network import INTERFACE, Host, switch_address
from benchmarks.lab.streams import Prefixed

KILL_AFTER = 3.0
"""The time between SIGTERM and SIGKILL in seconds."""

_LAST_WORDS = 1.0
"""The seconds for which output is read after the last rank ended, if another process still has the pipe."""

_MASTER_PORT = 29500
_STOPPED_BY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# `ip netns exec` sets the host's network, and this the host's name.
_WITH_HOSTNAME = 'echo "$1" > /proc/sys/kernel/hostname; shift; exec "$@"'


@dataclass(frozen=True)
class Job:
    """The settings of a job.

    Attributes:
        command: each rank's program and arguments.
        slots: the number of ranks on each host.
        link: the link, which ranks find in ``LAB_RATE``, ``LAB_RTT`` and ``LAB_LOSS``.
        grace: the seconds for which ranks continue after another one failed, so that they report errors.
        preload: a library for the ranks' ``LD_PRELOAD``.
        relay: the relay's process, without which the job fails.
    """

    command: list[str]
    slots: int
    link: Link
    grace: float
    preload: Path | None = None
    relay: subprocess.Popen[str] | None = None


def run(job: Job, hosts: list[Host]) -> int:
    """Starts the ranks and waits for them.

    Returns:
        0, the status of the first rank that failed (128 plus the signal if one ended it), or 128 plus the
        signal that stopped this process.
    """
    rendezvous = RendezvousServer()
    port = rendezvous.start()
    plan = get_host_assignments(
        [HostInfo(h.name, job.slots) for h in hosts], len(hosts) * job.slots
    )
    rendezvous.init(plan)
    with selectors.DefaultSelector() as selector:
        supervisor = _Supervisor(selector, job.grace)
        if job.relay is not None:
            supervisor.depend_on(job.relay)
        for slot in plan:
            environment = _environment(slot, port, job, hosts)
            supervisor.start(slot.rank, slot.hostname, job.command, environment)
        return supervisor.wait()


def _environment(slot: Any, port: int, job: Job, hosts: list[Host]) -> dict[str, str]:
    """A rank's environment: this process's variables, and those of Horovod, torchrun and the lab."""
    horovod = {
        **gloo_run.create_slot_env_vars(slot),
        **gloo_run.create_run_env_vars(switch_address(), [INTERFACE], port),
    }
    torchrun = {
        "RANK": slot.rank,
        "WORLD_SIZE": slot.size,
        "LOCAL_RANK": slot.local_rank,
        "LOCAL_WORLD_SIZE": slot.local_size,
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": _MASTER_PORT,
        "GLOO_SOCKET_IFNAME": INTERFACE,
    }
    lab: dict[str, object] = {"LAB_HOSTS": len(hosts), **job.link.environment()}
    if job.preload is not None:
        already = filter(None, [os.environ.get("LD_PRELOAD")])
        lab.update(LAB_PATIENT=1, LD_PRELOAD=":".join([str(job.preload), *already]))
    # One thread for each rank unless the caller sets another number: hosts share this machine's cores.
    base = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1"}
    added = {**horovod, **torchrun, **lab}
    return {**base, **{name: str(value) for name, value in added.items()}}


class _Supervisor:
    """Forwards the ranks' output, and ends all ranks when one fails."""

    def __init__(self, selector: selectors.BaseSelector, grace: float) -> None:
        self._selector = selector
        self._grace = grace
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._open = 0
        self._status: int | None = None
        self._terminate_at = self._kill_at = float("inf")
        self._watch_signals()

    def start(self, rank: int, host: str, command: list[str], environment: dict[str, str]) -> None:
        """Starts one rank."""
        named = ("unshare", "--uts", "sh", "-c", _WITH_HOSTNAME, "sh", host)
        process = subprocess.Popen(
            ["ip", "netns", "exec", host, *named, *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdout and process.stderr
        self._forward(process.stdout, Prefixed(sys.stdout.buffer, rank, "stdout"))
        self._forward(process.stderr, Prefixed(sys.stderr.buffer, rank, "stderr"))
        self._running[rank] = process
        ended = os.pidfd_open(process.pid)
        self._selector.register(ended, selectors.EVENT_READ, lambda: self._ended(rank, host, ended))

    def depend_on(self, relay: subprocess.Popen[str]) -> None:
        """Makes the job fail when the relay ends, because no packet arrives without it."""

        def ended() -> None:
            self._selector.unregister(pidfd)
            os.close(pidfd)
            assert relay.stdout
            status, said = relay.wait(), relay.stdout.read().strip()
            if self._status is None:
                self._fail(1, 0.0, f"the relay between the hosts ended with status {status} {said}")

        pidfd = os.pidfd_open(relay.pid)
        self._selector.register(pidfd, selectors.EVENT_READ, ended)

    def wait(self) -> int:
        """Waits for all ranks to end; returns the status of :func:`run`."""
        last_words = float("inf")
        while self._running or (self._open and time.monotonic() < last_words):
            deadline = min(self._terminate_at, self._kill_at, last_words)
            timeout = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
            for key, _ in self._selector.select(timeout):
                key.data()
            self._enforce()
            if not self._running:
                last_words = min(last_words, time.monotonic() + _LAST_WORDS)
        return self._status or 0

    def _forward(self, pipe: Any, lines: Prefixed) -> None:
        def read() -> None:
            data = os.read(pipe.fileno(), 1 << 16)
            if data:
                lines.write(data)
                return
            lines.close()
            self._selector.unregister(pipe)
            pipe.close()
            self._open -= 1

        self._open += 1
        self._selector.register(pipe, selectors.EVENT_READ, read)

    def _ended(self, rank: int, host: str, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        code = self._running.pop(rank).wait()
        status = code if code >= 0 else 128 - code
        if status and self._status is None:
            self._fail(status, self._grace, f"rank {rank} on {host} ended with status {status}")

    def _fail(self, status: int, grace: float, what: str) -> None:
        self._status = status
        self._terminate_at = time.monotonic() + grace
        rest = f"; ending the others in {grace:g} s" if self._running else ""
        print(f"lab: {what}{rest}", file=sys.stderr, flush=True)

    def _enforce(self) -> None:
        now = time.monotonic()
        if now >= self._terminate_at:
            self._terminate_at, self._kill_at = float("inf"), now + KILL_AFTER
            self._signal(signal.SIGTERM)
        if now >= self._kill_at:
            self._kill_at = float("inf")
            self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        for process in self._running.values():
            os.killpg(process.pid, number)

    def _watch_signals(self) -> None:
        receiver, sender = socket.socketpair()
        for end in (receiver, sender):
            end.setblocking(False)
        signal.set_wakeup_fd(sender.fileno())
        self._sender = sender  # Kept open: without a reference, the socket would be closed.
        for number in _STOPPED_BY:
            signal.signal(number, self._stop)
        self._selector.register(receiver, selectors.EVENT_READ, lambda: receiver.recv(64))

    def _stop(self, number: int, _: Any) -> None:
        if self._status is None:
            self._fail(128 + number, 0.0, f"stopped by {signal.Signals(number).name}")
        else:
            self._terminate_at = min(self._terminate_at, time.monotonic())
