"""Checks a lab for a round trip of 40 ms that it does not have; run by ``python -m``."""

from __future__ import annotations

import sys

from benchmarks.lab import link, rate, self_check
from benchmarks.lab.isolation import run_isolated
from benchmarks.lab.link import Link
from benchmarks.lab.network import build


def _inside() -> int:
    hosts = build(2, Link(rate.parse("none")))
    self_check.check(hosts, Link(rate.parse("none"), link.parse_rtt("40ms")))
    return 0


if __name__ == "__main__":
    sys.exit(run_isolated(_inside))
