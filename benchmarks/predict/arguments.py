"""Command-line arguments: machines, links, numbers of workers, codecs and exchanges."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks.predict.hardware import Profile, speeds_of_record
from hvd_compress.codecs import codec_class
from hvd_compress.codecs.registry import expect_payloads
from hvd_compress.exchanges.routing import Route
from hvd_compress.planner.machines import Link

P = TypeVar("P", bound=Profile)

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}

_SAME_LINK = 0.06
"""The relative difference of bandwidths below which links have the same nominal rate: only the fraction
that messages can use differs."""

ETHERNET = 1448 / 1514
"""The fraction of a full Ethernet frame that holds a TCP message."""


def bandwidth(text: str) -> float:
    """The bytes per second of ``1gbit``, ``200Mbps``, ``2.5 Gbit/s``; infinite for ``none``.

    Raises:
        ArgumentTypeError: anything else.
    """
    if text.lower() == "none":
        return math.inf
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([kmg]?)(?:bit(?:/s)?|bps)", text.lower())
    if not match or not float(match[1]):
        raise ArgumentTypeError(f"expected a rate such as 1gbit, 200mbit or none, got {text!r}")
    return float(match[1]) * _UNITS[match[2]] / 8


def duration(text: str) -> float:
    """The seconds of ``50us``, ``0.1ms`` or ``2s``.

    Raises:
        ArgumentTypeError: anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e-?\d+)?) *(us|ms|s)", text.lower())
    if not match:
        raise ArgumentTypeError(f"expected a time such as 50us, 0.1ms or 2s, got {text!r}")
    return float(match[1]) * _SECONDS[match[2]]


def positive_bits(text: str) -> float:
    """The number of bits in an element, such as ``1.5``.

    Raises:
        ArgumentTypeError: anything but a number above 0.
    """
    try:
        bits = float(text)
    except ValueError:
        bits = 0.0
    if not 0 < bits < math.inf:
        raise ArgumentTypeError(f"expected bits of an element, above 0, such as 1.5, got {text!r}")
    return bits


def workers(text: str) -> list[int]:
    """The numbers of workers in ``1,2,4..512``; two dots stand for all doublings in between.

    Raises:
        ArgumentTypeError: anything else.
    """
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", part.strip())
        if not match or not int(match[1]):
            raise ArgumentTypeError(f"expected numbers of workers such as 1,2,4..512, got {text!r}")
        count = int(match[1])
        while count <= int(match[2] or match[1]):
            found.append(count)
            count *= 2
    return sorted(set(found))


def routes(codecs: Sequence[str], exchanges: Sequence[str]) -> list[Route]:
    """The routes of every codec with every exchange; just one route for a codec that Horovod reduces.

    Args:
        codecs: the names of codecs, with settings after a colon, as in ``onebit:group=512``.
        exchanges: the names of exchanges.

    Raises:
        ValueError, TypeError: an unknown codec or exchange, or a setting that the codec does not have.
    """
    made: list[Route] = []
    for text in codecs:
        name, _, settings = text.partition(":")
        fields = dict(_setting(part) for part in settings.split(",") if part)
        codec = codec_class("predict", "codec", name)(**fields)
        expect_payloads("predict.codec", codec)
        for exchange in exchanges:
            route = Route(codec, exchange=exchange)
            if not route.uncompressed or route.codec not in [
                known.codec for known in made if known.uncompressed
            ]:
                made.append(route)
    return made


def add_machine(parser: ArgumentParser, profiles: Mapping[str, Profile], default: str) -> None:
    """Adds the arguments that choose a profile, by name, and change it."""
    add = parser.add_argument
    add(
        "--machine",
        choices=profiles,
        default=default,
        help="profile of machines and links; default: %(default)s",
    )
    add("--local", type=int, metavar="N", help="ranks of a machine, in place of the profile's")
    add(
        "--link",
        type=bandwidth,
        metavar="RATE",
        help="link of a machine, such as 1gbit, in place of the profile's",
    )
    add(
        "--efficiency",
        type=float,
        default=ETHERNET,
        metavar="SHARE",
        help="of --link's rate, what is left for messages; default: TCP over Ethernet, %(default).3f",
    )
    add(
        "--latency",
        type=duration,
        metavar="TIME",
        help="of a message, such as 50us",
    )
    add(
        "--within",
        type=bandwidth,
        metavar="RATE",
        help="link of a rank within its machine",
    )
    add(
        "--start",
        type=duration,
        metavar="TIME",
        help="of a collective before its first message",
    )
    add(
        "--speeds",
        type=Path,
        metavar="FILE",
        help="codec speeds, by python -m benchmarks.codec --json",
    )


def machine_of(args: Namespace, profiles: Mapping[str, P]) -> P:
    """The profile that the arguments of :func:`add_machine` describe.

    Raises:
        OSError, ValueError: a wrong file of speeds.
    """
    profile = profiles[args.machine]
    between, within = profile.between, profile.within
    title = profile.title
    if args.link is not None:
        between = Link(args.link * args.efficiency, between.latency)
        if not math.isclose(between.bandwidth, profile.between.bandwidth, rel_tol=_SAME_LINK):
            rate = f"of {8e-6 * args.link:,g} Mbit/s" if args.link < math.inf else "without a limit"
            title += f", but links {rate}"
    if args.local not in (None, profile.local):
        title += f", {args.local} ranks a machine"
    if args.latency is not None:
        between = Link(between.bandwidth, args.latency)
    if args.within is not None:
        within = Link(args.within, within.latency)
    speeds = profile.speeds
    if args.speeds is not None:
        speeds = speeds_of_record(json.loads(args.speeds.read_text()))
    return dataclasses.replace(
        profile,
        title=title,
        between=between,
        within=within,
        local=profile.local if args.local is None else args.local,
        start=profile.start if args.start is None else args.start,
        speeds=speeds,
    )


def _setting(text: str) -> tuple[str, int | float | str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"codec: expected settings as key=value, got {text!r}")
    for number in (int, float):
        try:
            return key, number(value)
        except ValueError:
            continue
    return key, value
