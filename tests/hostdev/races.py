"""Finds what nothing orders in a log of the device, by vector clocks.

On a GPU, each call is work in a stream. Two that use the same memory, of which one writes it, have to be
in one stream, or one has to wait for what the stream of the other one had by then. So has the reuse of
memory: it belongs to the stream that it was made in, and to those that were said to use it. The host's
waits count, too: what it starts afterwards comes later in every stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.hostdev.hostdev import Log, logged

Clock = dict[int, int]
"""For each stream, the number of its calls that come before."""


@dataclass
class Found:
    """The races in a log.

    Attributes:
        races: descriptions of two calls on the same memory, or of a call and the memory's reuse, that
            nothing orders.
        crossed: the number of times that calls in two streams have used the same memory.
    """

    races: list[str] = field(default_factory=list)
    crossed: int = 0


@dataclass
class _Memory:
    """The last calls, with their times in their streams, that have used a storage since it was made."""

    owner: int
    users: set[int]
    write: tuple[int, int, str] | None = None
    reads: dict[int, tuple[int, str]] = field(default_factory=dict)

    def uses(self) -> Iterator[tuple[int, int, str]]:
        """Streams, times and names."""
        if self.write is not None:
            yield self.write
        for stream, (time, what) in self.reads.items():
            yield stream, time, what


class Race(AssertionError):
    """Nothing orders two calls on the same memory, or a call and the memory's reuse."""


@contextmanager
def without_races() -> Iterator[Found]:
    """Raises :class:`Race` at the end of the ``with`` block, with all that it has found."""
    found = Found()
    with logged() as log:
        yield found
    replayed = races(log)
    found.races, found.crossed = replayed.races, replayed.crossed
    if found.races:
        raise Race("\n".join(dict.fromkeys(found.races)))


def races(log: Log) -> Found:
    """Replays a log that began before the memory was made that it tells of."""
    return _Replay(log).found


class _Replay:
    def __init__(self, log: Log) -> None:
        self.found = Found()
        self._clocks: dict[int, Clock] = {}
        self._host: Clock = {}
        self._events: dict[int, Clock] = {}
        self._memory: dict[int, _Memory] = {}
        self._freed: dict[int, list[tuple[_Memory, list[Clock]]]] = {}
        self._call = ""
        for what, number, stream in log:
            act = getattr(self, f"_on_{what}", None)
            if act is not None:
                act(number, stream)
            else:
                self._begin(what, stream)

    def _clock(self, stream: int) -> Clock:
        return self._clocks.setdefault(stream, {stream: 0})

    def _begin(self, what: str, stream: int) -> None:
        clock = self._clock(stream)
        clock[stream] += 1
        _wait(clock, self._host)
        self._call = what

    def _on_record(self, event: int, stream: int) -> None:
        self._events[event] = dict(self._clock(stream))

    def _on_wait(self, event: int, stream: int) -> None:
        _wait(self._clock(stream), self._events.get(event, {}))

    def _on_synchronize_stream(self, _: int, stream: int) -> None:
        _wait(self._host, self._clock(stream))

    def _on_synchronize_event(self, event: int, _: int) -> None:
        _wait(self._host, self._events.get(event, {}))

    def _on_synchronize_device(self, *_: int) -> None:
        for clock in self._clocks.values():
            _wait(self._host, clock)

    def _on_record_stream(self, address: int, stream: int) -> None:
        if address in self._memory:
            self._memory[address].users.add(stream)

    def _on_free(self, address: int, _: int) -> None:
        memory = self._memory.pop(address, None)
        if memory is not None:
            # The allocator has the next owner wait for what is in the streams of the users by now.
            seen = [dict(self._clock(user)) for user in memory.users]
            self._freed.setdefault(memory.owner, []).append((memory, [dict(self._host), *seen]))

    def _on_allocate(self, address: int, stream: int) -> None:
        for memory, seen in self._freed.pop(stream, []):
            clocks = [self._clock(stream), self._host, *seen]
            for other, time, what in memory.uses():
                if time > max(clock.get(other, 0) for clock in clocks):
                    self.found.races.append(
                        f"memory of stream {stream} is reused while stream {other} does {what}"
                    )
        self._memory[address] = _Memory(stream, {stream})

    def _on_reads(self, address: int, stream: int) -> None:
        memory = self._memory.get(address)
        if memory is not None:
            self._check(memory, stream, [memory.write] if memory.write is not None else [])
            memory.reads[stream] = (self._clock(stream)[stream], self._call)

    def _on_writes(self, address: int, stream: int) -> None:
        memory = self._memory.get(address)
        if memory is not None:
            self._check(memory, stream, [*memory.uses()])
            memory.write = (stream, self._clock(stream)[stream], self._call)
            memory.reads = {}

    def _check(self, memory: _Memory, stream: int, earlier: list[tuple[int, int, str]]) -> None:
        clock = self._clock(stream)
        for other, time, what in earlier:
            self.found.crossed += other != stream
            if time > clock.get(other, 0):
                self.found.races.append(
                    f"{self._call} in stream {stream} is not behind {what} in stream {other}"
                )


def _wait(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        clock[stream] = max(clock.get(stream, 0), time)
