"""The log line that says, after the first encoded step, what a compressor sends."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from hvd_compress.engine.parameters import Slot
from hvd_compress.ranks.counters import Counters

_log = logging.getLogger("hvd_compress")


class FirstStep:
    """Logs one line, at the level INFO, about the first step in which gradients were encoded.

    The line comes when the next step begins: by then, all messages of the first one have been counted.
    """

    def __init__(self) -> None:
        self._before = Counters()

    def log(self, slots: Iterable[Slot], counters: Counters) -> bool:
        """Logs the line, and returns True, if gradients were encoded in the step that has ended.

        Called at the beginning of each step until then, with the counts of all steps before it.
        """
        before, self._before = self._before, replace(counters)
        encoded = counters.encoded_elements > before.encoded_elements
        if encoded:
            _log.info("%s", _described(slots, before, counters))
        return encoded


def _described(slots: Iterable[Slot], before: Counters, after: Counters) -> str:
    """The routes of gradients, and the bytes of the messages between two states of the counters."""
    gradients, elements = Counter[str](), Counter[str]()
    for slot in (one for one in slots if not one.frozen):
        gradients[str(slot.route)] += 1
        elements[str(slot.route)] += slot.count
    routes = ", ".join(
        f"{count} gradient{'s' * (count > 1)} ({elements[route]:,} elements) as {route}"
        for route, count in gradients.most_common()
    )
    sent = after.message_bytes - before.message_bytes
    uncompressed = after.uncompressed_bytes - before.uncompressed_bytes
    return f"first encoded step: {routes}; {sent:,.0f} bytes in place of {uncompressed:,}"
