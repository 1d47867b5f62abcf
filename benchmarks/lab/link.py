"""The links of a lab: a rate, a round-trip time and a share of lost packets."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from benchmarks.lab.rate import Rate

_UNITS = {"ms": 1e-3, "s": 1.0}
_SHORTEST, _LONGEST = 1e-3, 2.0
_MOST_LOST = 0.5
_NUMBER = r"(\d+(?:\.\d+)?)"
_QUEUE_SECONDS = 0.05
_FASTEST = 10**10
_BUFFERS_A_WINDOW = 4


@dataclass(frozen=True)
class RoundTrip:
    """The round-trip time between two hosts.

    Attributes:
        text: the time as it was written.
        seconds: the time in seconds; 0 adds no delay.
    """

    text: str
    seconds: float


@dataclass(frozen=True)
class Loss:
    """The share of packets that are lost between any two hosts, each way.

    Attributes:
        text: the share as it was written.
        share: the share, between 0 and 1.
    """

    text: str
    share: float


@dataclass(frozen=True)
class Link:
    """The properties of every host's link to the others.

    Attributes:
        rate: the rate of each end of a cable.
        rtt: the round trip between two hosts.
        loss: the share of packets that are lost.
        keeps_windows: whether TCP keeps a connection's window while nothing is sent; by default, it begins
            slowly again after a pause.
    """

    rate: Rate
    rtt: RoundTrip = RoundTrip("none", 0.0)
    loss: Loss = Loss("none", 0.0)
    keeps_windows: bool = False

    @property
    def is_distant(self) -> bool:
        """Whether packets are delayed or lost in addition to the effects of the rate."""
        return self.rtt.seconds > 0 or self.loss.share > 0

    @property
    def queue_seconds(self) -> float:
        """The longest queue at each end of a cable in seconds; further packets are dropped.

        This is 50 ms, or a round trip if that is longer. TCP halves its window when a packet is lost
        (cubic reduces it by 30%), and a queue of one round trip keeps the link busy meanwhile
        (Appenzeller, Keslassy and McKeown, "Sizing router buffers", section 2).
        """
        return max(_QUEUE_SECONDS, self.rtt.seconds)

    @property
    def window(self) -> int:
        """The most bytes of one connection in transit: those that the link and a full queue hold.

        A link without a limit counts as one of 10 Gbit/s.
        """
        bits = _FASTEST if self.rate.bits is None else self.rate.bits
        return round(bits / 8 * (self.rtt.seconds + self.queue_seconds))

    @property
    def socket_buffer(self) -> int:
        """The bytes of memory for TCP's window, of which the kernel needs a part for each packet's
        bookkeeping, and reserves another for the reader."""
        return _BUFFERS_A_WINDOW * self.window

    def environment(self) -> dict[str, str]:
        """The variables that describe the link to ranks; see :func:`from_environment`."""
        return {"LAB_RATE": self.rate.text, "LAB_RTT": self.rtt.text, "LAB_LOSS": self.loss.text}


def from_environment(rate: Rate) -> Link:
    """The link of the lab in which this process is a rank, with another rate."""
    return Link(rate, parse_rtt(os.environ["LAB_RTT"]), parse_loss(os.environ["LAB_LOSS"]))


def parse_rtt(text: str) -> RoundTrip:
    """Reads ``40ms``, ``0.1s`` or ``none``.

    Raises:
        ValueError: anything else, or a time outside of 1 ms to 2 s.
    """
    expected = "expected a round trip such as 40ms, 0.1s or none"
    if text.lower() == "none":
        return RoundTrip("none", 0.0)
    match = re.fullmatch(_NUMBER + "(ms|s)", text.lower())
    if not match:
        raise ValueError(f"{expected}, got {text!r}")
    seconds = float(match[1]) * _UNITS[match[2]]
    if not _SHORTEST <= seconds <= _LONGEST:
        raise ValueError(f"{expected}, between 1ms and 2s, got {text!r}")
    return RoundTrip(text.lower(), seconds)


def parse_loss(text: str) -> Loss:
    """Reads ``0.1%`` or ``none``.

    Raises:
        ValueError: anything else, or a share above 50%.
    """
    expected = "expected a share of packets such as 0.1% or none"
    if text.lower() == "none":
        return Loss("none", 0.0)
    match = re.fullmatch(_NUMBER + "%", text)
    if not match:
        raise ValueError(f"{expected}, got {text!r}")
    share = float(match[1]) / 100
    if share > _MOST_LOST:
        raise ValueError(f"{expected}, at most 50%, got {text!r}")
    return Loss(text, share)
