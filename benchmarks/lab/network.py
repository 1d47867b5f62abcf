"""Hosts, a switch, and cables with a limited rate between them.

Each host is a network namespace with one interface, ``eth0``. The other end of its cable is a port of a
bridge in the lab's own namespace. Both ends of a cable limit what they send, by a token bucket.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lab.isolation import command
from benchmarks.lab.link import Link

INTERFACE = "eth0"
"""What a host calls its only interface."""

MOST_HOSTS = 1000
"""A bridge takes 1,023 ports."""

_SUBNET = ipaddress.ip_network("198.18.0.0/15")
SWITCH = "switch"
"""What the lab calls its bridge."""

FOLDER = Path("/run/netns")
"""Where ``ip netns`` keeps names; in a lab, a memory file system that nobody else sees."""

_HOSTS_FILE = Path("/etc/hosts")
_SETTINGS = "/proc/sys/net/ipv4"


@dataclass(frozen=True)
class Host:
    """One host: its name, which is its namespace's and its port's too, and its address."""

    name: str
    address: str


def switch_address() -> str:
    """Where hosts reach the lab's own process.

    The subnet is the one that RFC 2544 reserves for benchmarks. Labs are not connected to
    anything, so that two may use the same addresses at the same time.
    """
    return str(_SUBNET[-2])


def hosts(count: int) -> list[Host]:
    """The names and addresses of a lab's hosts."""
    return [Host(f"host{number}", str(_SUBNET[number + 1])) for number in range(count)]


def build(count: int, link: Link) -> list[Host]:
    """Makes ``count`` hosts; the calling process must be in namespaces of its own.

    Raises:
        LabError: a step failed.
    """
    made = hosts(count)
    _name_hosts(made)
    command("ip", "link", "set", "lo", "up")
    command("ip", "link", "add", SWITCH, "type", "bridge")
    command("ip", "address", "add", _with_prefix(switch_address()), "dev", SWITCH)
    command("ip", "link", "set", SWITCH, "up")
    for host in made:
        command("ip", "netns", "add", host.name)
        peer = ("peer", "name", INTERFACE, "netns", host.name)
        command("ip", "link", "add", host.name, "type", "veth", *peer)
        command("ip", "link", "set", host.name, "master", SWITCH, "up")
        command("ip", "-n", host.name, "link", "set", "lo", "up")
        there = ("dev", INTERFACE)
        command("ip", "-n", host.name, "address", "add", _with_prefix(host.address), *there)
        command("ip", "-n", host.name, "link", "set", INTERFACE, "up")
        choose = f"echo {_congestion_control()} > {_SETTINGS}/tcp_congestion_control"
        command("ip", "netns", "exec", host.name, "sh", "-c", choose)
    limit(made, link)
    return made


def limit(on: list[Host], link: Link) -> None:
    """Gives both ends of every cable the link's rate, in place of the one they had, and TCP the memory
    to use it over the link's distance.

    Raises:
        LabError: ``tc`` failed; where it knows no ``tbf``, the kernel was built without it.
    """
    rate, queue = link.rate, f"{round(1e6 * link.queue_seconds)}us"
    for where, device in _ends(on):
        if rate.bits is None:
            if "tbf" in command("tc", *where, "qdisc", "show", "dev", device):
                command("tc", *where, "qdisc", "del", "dev", device, "root")
            continue
        bucket = ("tbf", "rate", f"{rate.bits}bit", "burst", f"{rate.burst}b", "latency", queue)
        command("tc", *where, "qdisc", "replace", "dev", device, "root", *bucket)
    if link.is_distant:
        for host in on:
            _give_buffers(host, link.socket_buffer)


def _give_buffers(host: Host, size: int) -> None:
    """The most that TCP may take for a connection, at least what the host has; it takes what it needs."""
    for name in ("tcp_rmem", "tcp_wmem"):
        setting = f"{_SETTINGS}/{name}"
        larger = f'[ "$most" -ge {size} ] || echo "$least $usual {size}" > {setting}'
        grow = f"read least usual most < {setting}; {larger}"
        command("ip", "netns", "exec", host.name, "sh", "-c", grow)


def _congestion_control() -> str:
    """The one that most machines use, whatever this one does; reno where namespaces may not use it."""
    allowed = Path(f"{_SETTINGS}/tcp_allowed_congestion_control").read_text().split()
    return "cubic" if "cubic" in allowed else "reno"


def _ends(on: list[Host]) -> Iterator[tuple[tuple[str, ...], str]]:
    for host in on:
        yield (), host.name
        yield ("-n", host.name), INTERFACE


def _name_hosts(named: list[Host]) -> None:
    # A memory file system on the folder where `ip netns` keeps names, visible in the lab alone. The
    # file for /etc/hosts has no name of its own any more once it is mounted there. Gloo needs it: groups
    # of ranks listen at the address that the host's name stands for, whatever the interface.
    lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in named)]
    FOLDER.mkdir(parents=True, exist_ok=True)
    command("mount", "-t", "tmpfs", "lab", str(FOLDER))
    draft = FOLDER / "hosts"
    draft.write_text("".join(f"{line}\n" for line in lines))
    command("mount", "--bind", str(draft), str(_HOSTS_FILE))
    draft.unlink()


def _with_prefix(address: str) -> str:
    return f"{address}/{_SUBNET.prefixlen}"
