"""Short measurements of the links and the codecs, with a framework's arrays and collectives."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from hvd_compress.codecs import Codec, ErrorFeedback, LevelCodec
from hvd_compress.codecs.base import HEADER_BYTES, Shape
from hvd_compress.codecs.lengths import bits_of
from hvd_compress.codecs.payload import payload_length
from hvd_compress.planner.measured import Coding

BARRIER, SMALL = "barrier before probe", "probe"
"""The names of two sums of a few bytes: an untimed one, after which all ranks start together, and a timed
one."""

SMALL_BYTES = 16

_BYTES = 2**19
"""The bytes that each rank sends in a probe: far more than the burst that a rate limit allows."""

_ELEMENTS, _COLUMNS = 2**20, 256
"""The elements of the tensor for measuring codecs, which is too large for the CPU's inner caches, and the
elements of its rows, for codecs that depend on rows."""

_REPEATS = 2


class Prober:
    """Measures on this rank; the planner shares the numbers.

    Args:
        size: the number of ranks.
        counts: the number of elements in each gradient that may be encoded. Messages are no larger than
            the largest gradient, and the tensor for measuring codecs is no larger than all of them.
        array: a function that makes a framework's array from a number of elements and a dtype,
            ``float32``, ``float16`` or ``uint8``. Floats must be random, because zeros would be encoded
            and added faster.
        batch: a function that makes the kernels for such arrays and one tensor, a
            :class:`hvd_compress.kernels.batch.Batch`.
        collective: a function that runs a collective among all ranks to its end; its arguments are the
            kind, the message and the name.
        wait: a function that waits until a device has finished its work; None if there is no device.

    Attributes:
        elements: the number of elements in the tensor for measuring codecs.
        sent: the bytes that each rank sends in each large collective.
    """

    def __init__(
        self,
        size: int,
        counts: Sequence[int],
        *,
        array: Callable[[int, str], Any],
        batch: Callable[[Codec, Shape, ErrorFeedback], Any],
        collective: Callable[[str, Any, str], object],
        wait: Callable[[], object] | None = None,
    ) -> None:
        self._size, self._array, self._batch = size, array, batch
        self._collective, self._wait = collective, wait or (lambda: None)
        # As in a bucket: the start of a call counts once for all of its tensors.
        self.elements = min(_ELEMENTS, _COLUMNS * max(1, sum(counts) // _COLUMNS))
        largest = max(counts, default=1)
        # Parts of a multiple of 16 bytes, so that each collective sends exactly as much as the others:
        # a rank gathers two parts, sums one for each rank, and in an all_to_all sends two to each.
        others = max(1, size - 1)
        self._part = 16 * -(-min(_BYTES, 4 * largest) // (32 * others))
        self.sent = 2 * self._part * others

    def message_bytes(self, what: str) -> int:
        """The bytes of a rank's input to a collective, named :data:`BARRIER`, :data:`SMALL`, or by kind."""
        parts = {"all_gather": 2, "all_to_all": 2 * self._size}.get(what, self._size)
        return SMALL_BYTES if what in (BARRIER, SMALL) else parts * self._part

    def measure(self, kinds: Sequence[str], codings: Sequence[Coding]) -> list[float]:
        """Measures one burst, in which all ranks take part.

        Returns:
            The seconds of a small all_reduce; the seconds of a large collective of each kind; for each
            coding, the seconds to encode and to decode an element, and the bits of an element's code; and
            the seconds of the whole burst.
        """
        started = time.perf_counter()
        self._run(BARRIER)
        times = [self._run(what) for what in (SMALL, *kinds)]
        for coding in codings:
            times += self._code(coding)
        return [*times, time.perf_counter() - started]

    def _run(self, what: str) -> float:
        """The seconds that a collective takes."""
        kind, name = what.split()[0], f"probe {what}"
        if what in (BARRIER, SMALL):
            kind, name = "all_reduce", what
        dtype, width = ("float16", 2) if "float16" in what else ("float32", 4)
        if kind != "all_reduce":
            dtype, width = "uint8", 1
        message = self._array(self.message_bytes(what) // width, dtype)
        return self._timed(lambda: self._collective(kind, message, name))

    def _code(self, coding: Coding) -> list[float]:
        """The seconds to encode and decode an element, and the bits of its code, 0 if they never vary."""
        codec, feedback = coding
        shape: Shape = (self.elements,)
        if codec.shaped and self.elements % _COLUMNS == 0:
            shape = (self.elements // _COLUMNS, _COLUMNS)
        batch = self._batch(codec, shape, feedback)
        gradients, sums = ([self._array(self.elements, "float32")] for _ in range(2))
        dtype = feedback.residual_dtype
        residuals = [self._array(self.elements, dtype) if feedback.enabled else None]
        payload = self._array(codec.payload_bytes(shape), "uint8")

        def encode() -> None:
            batch.encode(gradients, residuals, residuals, [0], payload)

        def decode() -> None:
            batch.decode_sum(sums, [0], payload[None])

        times = [min(self._timed(work) for _ in range(_REPEATS)) for work in (encode, decode)]
        bits = 0.0
        if isinstance(codec, LevelCodec) and codec.varies:
            header = bytes(int(byte) for byte in payload[:HEADER_BYTES])
            bits = bits_of(codec, shape, payload_length(header, codec.payload_bytes(shape)))
        return [*(seconds / self.elements for seconds in times), bits]

    def _timed(self, work: Callable[[], object]) -> float:
        self._wait()
        started = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - started
