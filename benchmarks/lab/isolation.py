"""Isolates a process in namespaces, which the kernel removes when that process ends.

Processes, mounts and the network of a lab are in namespaces of their own, which have no name outside. When
the first process of a PID namespace ends, however it ends, the kernel kills all others in it, and then
removes the namespaces with their interfaces, addresses, queues and mounts. So nothing is left to clean up.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from benchmarks.lab.errors import LabError

_CLONE_NEWNS, _CLONE_NEWNET, _CLONE_NEWPID = 0x00020000, 0x40000000, 0x20000000
_PR_SET_PDEATHSIG = 1
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_libc = ctypes.CDLL(None, use_errno=True)


def run_isolated(body: Callable[[], int]) -> int:
    """Runs ``body`` as the first process of new PID, mount and network namespaces.

    In that process, mounts are private, ``/proc`` shows only the namespace's processes, and the network
    has only a loopback interface. The process and all that it starts die with the calling process, even if
    that is killed by ``SIGKILL``. ``SIGINT``, ``SIGTERM`` and ``SIGHUP`` are forwarded to it.

    Returns:
        The exit status of that process, or 128 plus the number of the signal that ended it. By then, all
        processes that it started have ended.

    Raises:
        LabError: the kernel refuses.
    """
    _unshare(_CLONE_NEWPID)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        status = _first_process(read_end, body)
        sys.stderr.flush()
        os._exit(status)  # Only the parent returns to the caller.
    os.close(read_end)
    for number in _FORWARDED:
        signal.signal(number, lambda received, _: os.kill(child, received))
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _first_process(parent_lives: int, body: Callable[[], int]) -> int:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if select.select([parent_lives], [], [], 0)[0]:
        return 1  # The parent ended before prctl tied this process to it.
    try:
        _unshare(_CLONE_NEWNS | _CLONE_NEWNET)
        for arguments in (["--make-rprivate", "/"], ["-t", "proc", "proc", "/proc"]):
            command("mount", *arguments)
        return body()
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    return 1


@contextmanager
def prompt() -> Iterator[None]:
    """Gives the calling thread real-time priority within the context, if the kernel allows that."""
    usual, settings = os.sched_getscheduler(0), os.sched_getparam(0)
    hurry(0)
    try:
        yield
    finally:
        os.sched_setscheduler(0, usual, settings)


def hurry(process: int) -> None:
    """Gives a process real-time priority, if the kernel allows that; some containers do not."""
    with suppress(OSError):
        os.sched_setscheduler(process, os.SCHED_RR, os.sched_param(1))


def enter_first_network() -> None:
    """Moves the calling thread from the network of one of the lab's hosts to that of the lab's own process.

    Raises:
        LabError: the thread is not in a lab.
    """
    with open("/proc/1/ns/net") as first:
        _enter(first)


@contextmanager
def network(path: Path) -> Iterator[None]:
    """Moves the calling thread to a network within the context; sockets made there stay in that network.

    Raises:
        LabError: the thread is not in a lab.
    """
    with open("/proc/thread-self/ns/net") as home, open(path) as there:
        _enter(there)
        try:
            yield
        finally:
            _enter(home)


def command(*words: str) -> str:
    """Runs a program and returns its output.

    Raises:
        LabError: the program failed.
    """
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise LabError(
            f"expected `{' '.join(words)}` to succeed, got status {done.returncode}: {done.stderr.strip()}"
        )
    return done.stdout


def _enter(network: IO[str]) -> None:
    if _libc.setns(network.fileno(), _CLONE_NEWNET):
        raise LabError(f"expected to be in a lab, got: {os.strerror(ctypes.get_errno())}")


def _unshare(flags: int) -> None:
    if _libc.unshare(flags):
        reason = os.strerror(ctypes.get_errno())
        raise LabError(
            f"expected the right to make namespaces, got: {reason}; in a container, the lab needs "
            f"CAP_SYS_ADMIN and CAP_NET_ADMIN (docker run --privileged)"
        )
