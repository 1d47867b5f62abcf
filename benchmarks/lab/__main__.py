"""Runs a Horovod job on the hosts of a lab, with a real network between them.

``python -m benchmarks.lab --hosts 4 --rate 100mbit --rtt 40ms --loss 0.1% -- COMMAND...``
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable

from benchmarks.command_line import Parser, positive
from benchmarks.lab import distance, link, patience, rate
from benchmarks.lab.errors import LabError
from benchmarks.lab.isolation import run_isolated
from benchmarks.lab.link import Link
from benchmarks.lab.network import FOLDER, MOST_HOSTS, build
from benchmarks.lab.self_check import check

_PROGRAMS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "bridge": "iproute2",
    "mount": "mount",
    "unshare": "util-linux",
}


def main(command_line: list[str] | None = None) -> int:
    """Builds the network, runs the command on every host, and removes the network."""
    args = _parse(command_line)
    try:
        _check(args.patient)
        return run_isolated(lambda: _inside(args))
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _inside(args: argparse.Namespace) -> int:
    # Horovod's runner is imported here: nothing may start a thread before the lab forks.
    from benchmarks.lab.job import Job, run

    promised = Link(args.rate, args.rtt, args.loss, args.keep_windows)
    hosts = build(args.hosts, promised)
    relay = None
    if promised.is_distant:
        relay = distance.build(hosts, promised)
        check(hosts, promised)
    preload = patience.build(FOLDER) if args.patient else None
    return run(Job(args.command, args.slots, promised, args.grace, preload, relay), hosts)


def _check(patient: bool) -> None:
    """Checks that a lab can be made on this machine.

    Raises:
        LabError: the user is not root, or a program is missing.
    """
    if os.geteuid() != 0:
        raise LabError(
            f"expected root, which network namespaces need, got user {os.geteuid()}: use sudo"
        )
    needed = {**_PROGRAMS, "cc": "gcc"} if patient else _PROGRAMS
    for program, package in needed.items():
        if not shutil.which(program):
            raise LabError(f"expected the program {program}, got none: apt-get install {package}")


def _parse(command_line: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m benchmarks.lab",
        usage="%(prog)s [options] -- COMMAND...",
        description="Run COMMAND as a Horovod job on the hosts of a lab: network namespaces with limited "
        "links between them. Needs root. Nothing of the lab is left when the job ends, however it ends.",
    )
    add = parser.add_argument
    add("--hosts", type=_hosts, default=2, metavar="N", help="default: 2")
    add("--slots", type=positive, default=1, metavar="N", help="ranks a host; default: 1")
    add("--rate", type=_reader(rate.parse), default="none", metavar="RATE",
        help="rate of every host's link, each way: 1gbit, 200mbit, ... or none (the default)")  # fmt: skip
    add("--rtt", type=_reader(link.parse_rtt), default="none", metavar="TIME",
        help="round trip between any two hosts: 40ms, 0.1s, ... or none (the default)")  # fmt: skip
    add("--loss", type=_reader(link.parse_loss), default="none", metavar="PERCENT",
        help="packets lost each way between any two hosts: 0.1%%, ... or none (the default)")  # fmt: skip
    add("--keep-windows", action="store_true",
        help="let TCP keep its windows during pauses (tcp_slow_start_after_idle 0)")  # fmt: skip
    add("--grace", type=_seconds, default=5.0, metavar="SECONDS",
        help="how long ranks may continue after another one failed; default: 5")  # fmt: skip
    add("--patient", action="store_true",
        help="let ranks that wait for Horovod sleep, not spin: for more ranks than cores")  # fmt: skip
    add("command", nargs="+", metavar="COMMAND", help="after --: what each rank runs")
    args = parser.parse_args(command_line)
    if args.hosts < 2 and Link(args.rate, args.rtt, args.loss).is_distant:
        parser.error("--rtt, --loss: expected two hosts or more, got --hosts 1")
    return args


def _reader(parse: Callable[[str], object]) -> Callable[[str], object]:
    """Returns an argument type that reads by ``parse``, whose ``ValueError`` becomes the message."""

    def read(text: str) -> object:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read


def _hosts(text: str) -> int:
    value = positive(text)
    if value > MOST_HOSTS:
        raise argparse.ArgumentTypeError(f"expected at most {MOST_HOSTS} hosts, got {text}")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected seconds, 0 or more, got {text!r}")
    return value


if __name__ == "__main__":
    sys.exit(main())
