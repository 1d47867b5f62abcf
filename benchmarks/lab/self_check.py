"""Measures a round trip and a short transfer in a lab before a job relies on its links."""

from __future__ import annotations

import selectors
import socket
import statistics
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.lab.errors import LabError
from benchmarks.lab.isolation import command, network, prompt
from benchmarks.lab.link import Link
from benchmarks.lab.network import FOLDER, Host

TOLERANCE_SECONDS, TOLERANCE = 1e-3, 0.05
"""The permitted error of the median round trip: a millisecond, or 5% if that is more."""

_ROUND_TRIPS = 11
_PATIENCE = 0.2
_MOST_SENT = 1000
_WARMING_TRIPS = _MEASURED_TRIPS = 10
_LEAST_SECONDS = 1.0
_CHUNK = 1 << 16
_TCP_INFO = struct.Struct("@8B24I4Q6I")  # linux/tcp.h, struct tcp_info, as far as data_segs_out
_SENT_AGAIN, _RECEIVED, _SENT = 8 + 23, 8 + 24 + 3, 8 + 24 + 4 + 5


@dataclass(frozen=True)
class Transfer:
    """The measurements of one TCP connection.

    Attributes:
        bits: the bits received per second, after a warm-up.
        packets: the number of packets sent.
        again: the number of these that were sent again.
    """

    bits: float
    packets: int
    again: int


def check(hosts: list[Host], link: Link) -> None:
    """Measures between the first two hosts, and prints the results.

    Raises:
        LabError: the round trip differs from that of the link.
    """
    one, other = hosts[:2]
    trips = round_trips(one, other, link.rtt.seconds)
    median = statistics.median(trips)
    _say(
        f"round trip {one.name} to {other.name}: {_ms(median)} "
        f"({_ms(min(trips))} to {_ms(max(trips))} in {len(trips)}), asked for {link.rtt.text}"
    )
    tolerance = max(TOLERANCE_SECONDS, TOLERANCE * link.rtt.seconds)
    if abs(median - link.rtt.seconds) > tolerance:
        raise LabError(
            f"expected a round trip of {_ms(link.rtt.seconds)}, at most {_ms(tolerance)} off, got "
            f"{_ms(median)}: this machine is too busy, stop other work on it"
        )
    found = transfer(one, other, link.rtt.seconds)
    _say(
        f"one TCP connection {one.name} to {other.name}: {found.bits / 1e6:.3g} Mbit/s, {found.again} of "
        f"{found.packets} packets sent again, at rate {link.rate.text}, loss {link.loss.text}"
    )


def round_trips(one: Host, other: Host, expected: float) -> list[float]:
    """Measures the round trips of small datagrams; returns their seconds.

    Raises:
        LabError: too few datagrams arrive.
    """
    found: list[float] = []
    with (
        prompt(),  # So that the time does not include waiting for a processor.
        _opened(one, socket.SOCK_DGRAM) as near,
        _opened(other, socket.SOCK_DGRAM) as far,
    ):
        # The first datagrams wait until the hosts know each other's hardware addresses.
        patience = expected + _PATIENCE
        for number in range(_MOST_SENT):
            start = time.perf_counter()
            near.sendto(number.to_bytes(4, "big"), far.getsockname())
            if not _arrives(far, number, patience):
                continue
            far.sendto(number.to_bytes(4, "big"), near.getsockname())
            if not _arrives(near, number, patience):
                continue
            found.append(time.perf_counter() - start)
            if len(found) > _ROUND_TRIPS:
                return found[1:]
    raise LabError(
        f"expected {_ROUND_TRIPS} datagrams to go from {one.name} to {other.name} and back, got "
        f"{len(found)} of {_MOST_SENT}"
    )


def transfer(one: Host, other: Host, rtt: float) -> Transfer:
    """Sends as much as the link takes for some round trips, and returns the measurements.

    Raises:
        LabError: the connection failed or ended.
    """
    seconds = [max(_LEAST_SECONDS, trips * rtt) for trips in (_WARMING_TRIPS, _MEASURED_TRIPS)]
    try:
        with _connected(one, other) as (sender, receiver):
            _pump(sender, receiver, seconds[0])
            start, before = time.perf_counter(), _info(receiver)[_RECEIVED]
            _pump(sender, receiver, seconds[1])
            took, after = time.perf_counter() - start, _info(receiver)[_RECEIVED]
            sent = _info(sender)
    except OSError as error:
        raise LabError(
            f"expected a connection from {one.name} to {other.name}, got: {error}"
        ) from error
    finally:
        # Otherwise, Linux would begin the job's connections with metrics learned from this one.
        for host in (one, other):
            command("ip", "-n", host.name, "tcp_metrics", "flush")
    return Transfer(8 * (after - before) / took, sent[_SENT], sent[_SENT_AGAIN])


def _info(connection: socket.socket) -> tuple[int, ...]:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    return _TCP_INFO.unpack(info)


def _pump(sender: socket.socket, receiver: socket.socket, seconds: float) -> None:
    """Keeps the connection full for some seconds."""
    data = bytes(_CHUNK)
    deadline = time.perf_counter() + seconds
    with selectors.DefaultSelector() as selector:
        selector.register(sender, selectors.EVENT_WRITE)
        selector.register(receiver, selectors.EVENT_READ)
        while (rest := deadline - time.perf_counter()) > 0:
            for key, _ in selector.select(rest):
                if key.fileobj is sender:
                    sender.send(data)
                else:
                    receiver.recv(_CHUNK)


def _arrives(at: socket.socket, number: int, patience: float) -> bool:
    """Whether the datagram with a number arrives in time; late ones with other numbers are ignored."""
    deadline = time.perf_counter() + patience
    while (rest := deadline - time.perf_counter()) > 0:
        at.settimeout(rest)
        try:
            if int.from_bytes(at.recv(4), "big") == number:
                return True
        except TimeoutError:
            break
    return False


@contextmanager
def _connected(one: Host, other: Host) -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        _opened(other, socket.SOCK_STREAM) as listener,
        _opened(one, socket.SOCK_STREAM) as sender,
    ):
        listener.listen(1)
        sender.connect(listener.getsockname())
        receiver, _ = listener.accept()
        with receiver:
            for end in (sender, receiver):
                end.setblocking(False)
                # Queued data is dropped at the end, so that the job finds the link empty.
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            yield sender, receiver


@contextmanager
def _opened(on: Host, kind: socket.SocketKind) -> Iterator[socket.socket]:
    with network(FOLDER / on.name):
        opened = socket.socket(socket.AF_INET, kind)
    with opened:
        opened.bind((on.address, 0))
        yield opened


def _say(what: str) -> None:
    print(f"lab: {what}", file=sys.stderr, flush=True)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
