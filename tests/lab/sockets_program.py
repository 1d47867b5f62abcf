"""Measures the link between two hosts by sockets: ``python -m tests.lab.sockets_program WHAT``.

Host 0 connects and sends, and reports as JSON; host 1 accepts and receives.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time

ANSWERING = ("198.18.0.2", 5000)
ASKING = ("198.18.0.1", 5000)
CONNECTIONS = 9
DATAGRAMS = 2000
_END = b"end"
_SO_RCVBUFFORCE = 33


def distant() -> None:
    """Measures the times of connections, and the bits per second at the lab's rate and at 20 Mbit/s."""
    if not _asks():
        with socket.create_server(ANSWERING) as server:
            for _ in range(CONNECTIONS + 2):
                _count(server.accept()[0])
        return
    seconds = []
    for _ in range(CONNECTIONS):
        start = time.perf_counter()
        _connect().close()
        seconds.append(time.perf_counter() - start)
    found = {"seconds": seconds, "bits": _send(30_000_000)}
    subprocess.run([sys.executable, "-m", "benchmarks.lab.change_rate", "20mbit"], check=True)
    _report({**found, "fewer": _send(4_000_000)})


def lossy() -> None:
    """Counts the datagrams that arrive in each direction."""
    mine, theirs = (ASKING, ANSWERING) if _asks() else (ANSWERING, ASKING)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as port:
        port.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 1 << 23)
        port.bind(mine)
        if _asks():
            _connect().close()  # Datagrams sent before the other host is ready would be lost, too.
            _shoot(port, theirs)
            _report({"back": _arrived(port)})
        else:
            with socket.create_server(ANSWERING) as server:
                server.accept()[0].close()
            _report({"there": _arrived(port)})
            _shoot(port, theirs)


def _asks() -> bool:
    return os.environ["HOROVOD_RANK"] == "0"


def _connect() -> socket.socket:
    deadline = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection(ANSWERING)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise


def _send(size: int) -> float:
    with _connect() as connection:
        start = time.perf_counter()
        connection.sendall(bytes(size))
        connection.shutdown(socket.SHUT_WR)
        assert int(connection.recv(100)) == size
        return 8 * size / (time.perf_counter() - start)


def _count(connection: socket.socket) -> None:
    with connection:
        size = 0
        while data := connection.recv(1 << 20):
            size += len(data)
        if size:
            connection.sendall(str(size).encode())


def _shoot(port: socket.socket, to: tuple[str, int]) -> None:
    for _ in range(DATAGRAMS):
        port.sendto(b"one", to)
        time.sleep(2e-4)
    for _ in range(100):
        port.sendto(_END, to)


def _arrived(port: socket.socket) -> int:
    count = 0
    while (data := port.recv(100)) != _END:
        count += data == b"one"
    return count


def _report(found: dict[str, object]) -> None:
    print(json.dumps({"rank": int(os.environ["HOROVOD_RANK"]), **found}))


if __name__ == "__main__":
    globals()[sys.argv[1]]()
