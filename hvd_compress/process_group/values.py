"""Exchanges of values and states, in addition to gradients, among the ranks of a process group."""

from __future__ import annotations

import contextlib
import io
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from hvd_compress.process_group.collectives import Collectives, contents, message
from hvd_compress.process_group.device_collectives import collectives_of
from hvd_compress.ranks.errors import ExchangeError
from hvd_compress.ranks.values import MOST_BYTES, check_lengths, deserialize, serialize

_STATE_BYTES = 64
"""The maximum bytes of a state for each element of the model: sixteen numbers of 32 bits."""

_PART_BYTES = 64 << 20
"""The maximum bytes of states in the memory of a device at a time."""

_PAUSES = (0.001, 1.0)
"""The first and the longest time in seconds between two looks at a condition that ends a wait."""


def tell(ranks: Collectives, value: Any, problem: Exception | None = None) -> list[Any]:
    """Exchanges values: returns every rank's value, by rank; an error on one rank is raised on all ranks.

    Args:
        ranks: the collectives among the ranks, all of which have to call it.
        value: this rank's value, JSON-serializable (:func:`hvd_compress.ranks.values.serialize`).
        problem: the error of this rank, or None; it is raised after the other ranks have been told.

    Raises:
        ExchangeError: something is wrong on another rank; or a value is too long, or was altered.
    """
    said = None if problem is None else f"{type(problem).__name__}: {problem}"
    content = serialize([value, said])
    lengths = _lengths(ranks, len(content), MOST_BYTES)
    rows, work = ranks.all_gather(message(content, max(lengths), ranks.device))
    work.wait()
    told = deserialize(contents(rows, lengths))
    if problem is not None:
        raise problem
    for rank, (_, error) in enumerate(told):
        if error is not None:
            raise ExchangeError(f"rank {rank}: {error}")
    return [one for one, _ in told]


@contextlib.contextmanager
def problem_told(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Tells the other ranks, which call :func:`tell` after this block, of an error in it.

    Without a process group, there is no one to tell.
    """
    try:
        yield
    except Exception as problem:
        with contextlib.suppress(Exception):
            tell(collectives_of(group), None, problem)
        raise


@contextlib.contextmanager
def together(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Raises an error in the block on all ranks, all of which run the block at the same time.

    Raises:
        ExchangeError: something is wrong on another rank.
    """
    with problem_told(group):
        yield
    if dist.is_initialized():
        tell(collectives_of(group), None)


def gather_states(
    ranks: Collectives,
    state: Any,
    elements: int,
    given_up: Callable[[], bool] | None = None,
) -> list[Any] | None:
    """Gathers states: returns every rank's state, by rank, on the first rank, and None on the others.

    Args:
        ranks: the collectives among the ranks, all of which have to call it.
        state: this rank's state, which ``torch.load`` can read with ``weights_only=True``.
        elements: the number of the model's elements, which limits a state's length.
        given_up: returns whether to wait no longer for ranks that have not begun to gather.

    Raises:
        ExchangeError: a state is too long (raised on every rank); or this rank waits no longer; or
            ``torch.load`` cannot read a state with ``weights_only=True``, for example an altered one
            (raised on the first rank).
    """
    content = state_bytes(state)
    lengths = _lengths(ranks, len(content), _most(elements), given_up)
    gathered = [bytearray() for _ in lengths]
    for part in _parts(max(lengths), _PART_BYTES // ranks.size):
        rows = ranks.gather(message(content[part], part.stop - part.start, ranks.device))
        if rows is not None:
            for one, row in zip(gathered, rows.cpu().numpy(), strict=True):
                one += row.data
    if ranks.rank:
        return None
    return [_read(one[:length]) for one, length in zip(gathered, lengths, strict=True)]


def broadcast_state(ranks: Collectives, state: Any, source: int, elements: int) -> Any:
    """Returns the state of the rank ``source`` on every rank; the others' are not used.

    For the other arguments, see :func:`gather_states`.

    Raises:
        ExchangeError: the state is too long, or ``torch.load`` cannot read it with ``weights_only=True``
            (raised on every rank).
    """
    content = state_bytes(state) if ranks.rank == source else b""
    length = _lengths(ranks, len(content), _most(elements))[source]
    received = bytearray()
    for part in _parts(length, _PART_BYTES):
        sent = message(content[part], part.stop - part.start, ranks.device)
        ranks.broadcast(sent, source)
        received += sent.cpu().numpy().data
    return _read(received)


def wait_until(over: Callable[[], bool], seconds: float = math.inf) -> bool:
    """Waits until ``over()`` is true, at most so many seconds; returns whether it was."""
    end = time.monotonic() + seconds
    pause, longest = _PAUSES
    while not over():
        left = end - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(2 * pause, longest)
    return True


def _lengths(
    ranks: Collectives, own: int, most: int, given_up: Callable[[], bool] | None = None
) -> list[int]:
    rows, work = ranks.all_gather(torch.tensor([own], dtype=torch.int64, device=ranks.device))
    if given_up is not None:
        wait_until(lambda: work.is_completed() or given_up())
        if not work.is_completed():
            raise ExchangeError("expected the states of all ranks, got none from one or more")
    work.wait()
    lengths: list[int] = rows.view(-1).tolist()
    check_lengths(lengths, most)
    return lengths


def _parts(length: int, most: int) -> list[slice]:
    """The parts in which so many bytes are sent, each of at most ``most`` bytes."""
    size = max(most, 1)
    return [slice(begin, min(begin + size, length)) for begin in range(0, length, size)]


def _most(elements: int) -> int:
    return MOST_BYTES + _STATE_BYTES * elements


def state_bytes(state: Any) -> bytes:
    """A state as ``torch.save`` writes it."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def state_from(content: bytes | bytearray) -> Any:
    """The state of :func:`state_bytes`, on the host; code in the content is refused."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _read(content: bytes | bytearray) -> Any:
    try:
        return state_from(content)
    except Exception as error:  # Its type depends on the fault in the bytes.
        raise ExchangeError(
            f"expected a state of tensors, numbers, strings and containers of them, which torch.load reads "
            f"with weights_only=True, got another: name its classes to torch.serialization."
            f"add_safe_globals() on every rank; {error}"
        ) from None
