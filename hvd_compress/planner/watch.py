"""Whether the network is still what a plan was made for."""

from __future__ import annotations

BANDWIDTH = "bandwidth"

_BANDWIDTH = 1.6
_STEP = 1.4
"""By which factor a bandwidth, or a step's time, has to change before it counts."""

_LOOKS = 3
"""How often in a row, and in the same direction: one look may have met a busy moment."""


class Watch:
    """Compares what is measured now and then with what it was.

    Args:
        bandwidth: bytes a second, when the plan was made.
        seconds: of a step; None takes the first look's.
    """

    def __init__(self, bandwidth: float, seconds: float | None = None) -> None:
        self.bandwidth, self.seconds = bandwidth, seconds
        self.reason = ""
        self._direction = ""
        self._times = 0

    @property
    def suspicious(self) -> bool:
        """Whether the last look found a change, so that the next one should come soon."""
        return self._times > 0

    @property
    def suspects_links(self) -> bool:
        """Whether it was a change of bandwidth, which only a measurement of the links can confirm."""
        return self.reason.startswith(BANDWIDTH)

    def accept(self, bandwidth: float) -> None:
        """Compares with this bandwidth from now on."""
        self.bandwidth = bandwidth
        self._direction, self._times = "", 0

    def changed(self, seconds: float, bandwidth: float | None = None) -> bool:
        """Takes a look; whether something has changed for good. :attr:`reason` says what.

        Args:
            seconds: of a step.
            bandwidth: bytes a second; None where it was not measured.
        """
        self.seconds = seconds if self.seconds is None else self.seconds
        direction = _direction("a step's time", seconds / self.seconds, _STEP)
        if bandwidth is not None:
            changed = _direction(BANDWIDTH, bandwidth / self.bandwidth, _BANDWIDTH)
            direction = changed or direction
        self._times = (
            self._times + 1 if direction and direction == self._direction else bool(direction)
        )
        self._direction = self.reason = direction
        return self._times >= _LOOKS


def _direction(what: str, ratio: float, factor: float) -> str:
    if ratio > factor:
        return f"{what} rose"
    return f"{what} fell" if ratio < 1 / factor else ""
