"""Delays a lab's packets and loses some of them, by ``netem``, or by a relay if the kernel lacks it.

The packets of all hosts enter the switch at the hosts' ports. A filter redirects them to one interface,
``far``, which delays them. So a packet from one host to another passes ``far`` once, after the sender's
bucket and before the receiver's; a round trip passes it twice.

With ``netem``, the kernel's part for this purpose, ``far`` is an ``ifb`` interface: packets that leave it
continue at the port that they came from. Otherwise, ``far`` is a TAP interface and a port of the switch;
the program ``relay.c`` delays its frames, and returns them to the switch there.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from benchmarks.lab.errors import LabError
from benchmarks.lab.isolation import command, hurry
from benchmarks.lab.link import Link
from benchmarks.lab.network import FOLDER, INTERFACE, SWITCH, Host

_FAR = "far"
_TUN = Path("/dev/net/tun")
_SOURCE = Path(__file__).with_name("relay.c")
_QUEUED = 100_000
_EVERY_PACKET = ("protocol", "all", "u32", "match", "u32", "0", "0")
_NOTHING_FOR_OTHERS = (
    *("learning", "off", "flood", "off"),
    *("mcast_flood", "off", "bcast_flood", "off"),
)


def build(hosts: list[Host], link: Link) -> subprocess.Popen[str] | None:
    """Adds the link's delay and loss to hosts that are connected already.

    Returns:
        The relay's process, which the network needs as long as it is used; None with ``netem``.

    Raises:
        LabError: this machine can run neither ``netem`` nor the relay, or a step failed.
    """
    reason = _netem(link)
    relay = _relay(link, reason) if reason else None
    for host in hosts:
        # Segments that TCP leaves to the network card to divide would wait, and be lost, as one packet.
        command("ip", "-n", host.name, "link", "set", INTERFACE, "gso_max_segs", "1")
        if relay is not None:
            command("bridge", "fdb", "replace", _mac(host), "dev", host.name, "master", "static")
        command("tc", "qdisc", "add", "dev", host.name, "ingress")
        redirect = ("action", "mirred", "egress", "redirect", "dev", _FAR)
        command("tc", "filter", "add", "dev", host.name, "ingress", *_EVERY_PACKET, *redirect)
    return relay


def _netem(link: Link) -> str:
    """Makes ``far`` with ``netem``; returns an empty string, or the reason why that failed."""
    try:
        command("ip", "link", "add", _FAR, "type", "ifb")
    except LabError as error:
        return str(error)
    try:
        # The queue holds the packets of all hosts during their delay, and must not drop any.
        limit = max(_QUEUED, link.window)
        behaviour = ("delay", f"{_microseconds(link)}us", "loss", f"{100 * link.loss.share:.9f}%")
        queue = ("root", "netem", "limit", str(limit), *behaviour)
        command("tc", "qdisc", "add", "dev", _FAR, *queue)
        command("ip", "link", "set", _FAR, "up")
    except LabError as error:
        command("ip", "link", "delete", _FAR)
        return str(error)
    return ""


def _relay(link: Link, reason: str) -> subprocess.Popen[str]:
    """Makes ``far`` with the relay; ``reason`` says why ``netem`` failed. Returns the relay's process."""
    _check(reason)
    program = FOLDER / "relay"
    command("cc", "-std=gnu11", "-O2", "-o", str(program), str(_SOURCE))
    settings = (str(_microseconds(link)), str(round(link.loss.share * 2**32)))
    relay = subprocess.Popen(
        [program, _FAR, *settings],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert relay.stdout
    if (said := relay.stdout.readline().strip()) != "ready":
        raise LabError(f"expected the relay to make the interface {_FAR}, got: {said}")
    # If the relay waited for a processor like the ranks, it would delay every packet.
    hurry(relay.pid)
    # The queue of frames for the relay. The usual 1,000 full frames are 12 ms at 1 Gbit/s.
    command("ip", "link", "set", _FAR, "txqueuelen", str(_QUEUED))
    command("ip", "link", "set", _FAR, "master", SWITCH, "up")
    command("ip", "link", "set", _FAR, "type", "bridge_slave", *_NOTHING_FOR_OTHERS)
    return relay


def _check(reason: str) -> None:
    instead = "or use a kernel with netem (modprobe sch_netem), which this one is not"
    if not _TUN.exists():
        raise LabError(
            f"expected netem or {_TUN} for --rtt and --loss, got neither ({reason}): modprobe tun "
            f"(in a container: --device {_TUN}), {instead}"
        )
    if not shutil.which("cc"):
        raise LabError(
            f"expected netem or the program cc for --rtt and --loss, got neither: apt-get install gcc, "
            f"{instead}"
        )


def _microseconds(link: Link) -> int:
    """The delay of one way in microseconds."""
    return round(link.rtt.seconds * 1e6 / 2)


def _mac(host: Host) -> str:
    (found,) = json.loads(command("ip", "-n", host.name, "-json", "link", "show", INTERFACE))
    return str(found["address"])
