"""Rates of links, in the notation of ``tc``."""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_LOWEST, _HIGHEST = 10**5, 10**11
_SEGMENT = 1 << 16
_BURST_SECONDS = 2e-3


@dataclass(frozen=True)
class Rate:
    """The rate of a link.

    Attributes:
        text: the rate as it was written.
        bits: the rate in bits per second; None is no limit.
    """

    text: str
    bits: int | None

    @property
    def burst(self) -> int:
        """The bytes that an idle link lets through at once.

        This is two milliseconds' worth, so that a busy processor need not serve the link more often, but at
        least the 64 KiB, with headers, that TCP passes on as one segment. Shorter messages are not delayed.
        """
        return max(_SEGMENT + (_SEGMENT >> 4), round((self.bits or 0) / 8 * _BURST_SECONDS))


def parse(text: str) -> Rate:
    """Reads ``1gbit``, ``200mbit``, ``2.5gbit`` or ``none``.

    Raises:
        ValueError: anything else, or a rate outside of 100 kbit/s to 100 Gbit/s.
    """
    expected = "expected a rate such as 1gbit, 200mbit or none"
    if text.lower() == "none":
        return Rate("none", None)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?bit)", text.lower())
    if not match:
        raise ValueError(f"{expected}, got {text!r}")
    bits = round(float(match[1]) * _UNITS[match[2]])
    if not _LOWEST <= bits <= _HIGHEST:
        raise ValueError(f"{expected}, between 100kbit and 100gbit, got {text!r}")
    return Rate(text.lower(), bits)
