"""Builds hosts, a switch, and cables with a limited rate between them.

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
"""The name of a host's only interface."""

MOST_HOSTS = 1000
"""The largest number of hosts; a bridge has at most 1,023 ports."""

_SUBNET = ipaddress.ip_network("198.18.0.0/15")
SWITCH = "switch"
"""The name of the lab's bridge."""

FOLDER = Path("/run/netns")
"""The folder in which ``ip netns`` keeps names; in a lab, a private file system in memory."""

_HOSTS_FILE = Path("/etc/hosts")
_SETTINGS = "/proc/sys/net/ipv4"


@dataclass(frozen=True)
class Host:
    """A host: its name, which its namespace and its port share, and its address."""

    name: str
    address: str


def switch_address() -> str:
    """The address at which hosts reach the lab's own process.

    The subnet is the one that RFC 2544 reserves for benchmarks. Labs are not connected to each other, so
    two labs may use the same addresses at the same time.
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
        _set(host, "tcp_congestion_control", _congestion_control())
        _set(host, "tcp_slow_start_after_idle", "01"[not link.keeps_windows])
    limit(made, link)
    return made


def limit(on: list[Host], link: Link) -> None:
    """Sets the rate of both ends of every cable, and the memory that TCP needs for the link.

    Raises:
        LabError: ``tc`` failed, for example because the kernel was built without ``tbf``.
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


def _set(host: Host, name: str, value: str) -> None:
    command("ip", "netns", "exec", host.name, "sh", "-c", f"echo {value} > {_SETTINGS}/{name}")


def _give_buffers(host: Host, size: int) -> None:
    """Raises the largest memory of a TCP connection to ``size`` bytes, unless it is larger already."""
    for name in ("tcp_rmem", "tcp_wmem"):
        setting = f"{_SETTINGS}/{name}"
        larger = f'[ "$most" -ge {size} ] || echo "$least $usual {size}" > {setting}'
        grow = f"read least usual most < {setting}; {larger}"
        command("ip", "netns", "exec", host.name, "sh", "-c", grow)


def _congestion_control() -> str:
    """The congestion control: cubic, as on most machines, or reno if namespaces may not use cubic."""
    allowed = Path(f"{_SETTINGS}/tcp_allowed_congestion_control").read_text().split()
    return "cubic" if "cubic" in allowed else "reno"


def _ends(on: list[Host]) -> Iterator[tuple[tuple[str, ...], str]]:
    for host in on:
        yield (), host.name
        yield ("-n", host.name), INTERFACE


def _name_hosts(named: list[Host]) -> None:
    # Mounts a file system in memory, visible only in the lab, on the folder in which `ip netns` keeps
    # names, and a file on /etc/hosts, whose own name is then removed. Gloo needs the hosts' names: groups
    # of ranks listen at the address of the host's name, whatever the interface.
    lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in named)]
    FOLDER.mkdir(parents=True, exist_ok=True)
    command("mount", "-t", "tmpfs", "lab", str(FOLDER))
    draft = FOLDER / "hosts"
    draft.write_text("".join(f"{line}\n" for line in lines))
    command("mount", "--bind", str(draft), str(_HOSTS_FILE))
    draft.unlink()


def _with_prefix(address: str) -> str:
    return f"{address}/{_SUBNET.prefixlen}"
