"""Which tensors are encoded, with what, and which go as they are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from hvd_compress.codecs import SCHEMES, Codec, ErrorFeedback, NoCompression
from hvd_compress.codecs.base import check_choice, check_number
from hvd_compress.codecs.registry import OFF, scheme_of

ENCODABLE = ("float32", "float16", "bfloat16")
MAX_GATHERED_BYTES = 2**31 - 1
"""Horovod counts a gather's bytes in C ints."""

DEFAULT_THRESHOLD = 1024

EXCHANGES = ("allgather", "two_shot", "hierarchical", "integer_sum")
"""How payloads get from rank to rank; the first is the default."""

_DENSE_DTYPES = {"none": None, "fp16": "float16"}
"""Codecs whose output Horovod's own allreduce can add, and the dtype that it then adds."""


@dataclass(frozen=True)
class Route:
    """How one tensor travels.

    Attributes:
        codec: what it is encoded with.
        feedback: coefficients of error feedback.
        exchange: one of :data:`EXCHANGES`.
    """

    codec: Codec
    feedback: ErrorFeedback
    exchange: str = EXCHANGES[0]

    def __post_init__(self) -> None:
        check_choice("Compressor", "exchange", self.exchange, EXCHANGES)

    @property
    def dense(self) -> bool:
        """Whether Horovod reduces the tensor itself, in :attr:`dense_dtype`."""
        return self.codec.name in _DENSE_DTYPES and not self.feedback.enabled

    @property
    def dense_dtype(self) -> str | None:
        """What a dense tensor is cast to first; None leaves it as it is."""
        return _DENSE_DTYPES[self.codec.name]

    def __str__(self) -> str:
        feedback = f" with alpha={self.feedback.alpha}, beta={self.feedback.beta}"
        through = "" if self.dense else f" through {self.exchange}"
        return f"{self.codec}{feedback if self.feedback.enabled else ''}{through}"


DENSE = Route(NoCompression(), OFF)


class Router:
    """Chooses a route by a tensor's name and size.

    Args:
        route: what most tensors take.
        threshold: tensors of fewer elements go dense: Horovod fuses them into one message.
        exclude: patterns (``fnmatch``) of names that go dense.
        layers: codecs by name pattern, the first match winning over ``route``: a codec, the name of a
            scheme, or None for dense. Error feedback is that of the codec's paper, the exchange that of
            ``route``.

    Raises:
        TypeError, ValueError: "expected X, got Y".
    """

    def __init__(
        self,
        route: Route,
        threshold: int = DEFAULT_THRESHOLD,
        exclude: Sequence[str] = (),
        layers: Mapping[str, Codec | str | None] | None = None,
    ) -> None:
        check_number("Compressor", "threshold", threshold, 0, 2**63 - 1, integer=True)
        if not isinstance(exclude, Sequence) or isinstance(exclude, str) or not _strings(exclude):
            raise TypeError(f"Compressor.exclude: expected a sequence of patterns, got {exclude!r}")
        if not isinstance(layers, Mapping | None) or not _strings(layers or ()):
            raise TypeError(f"Compressor.layers: expected codecs by name pattern, got {layers!r}")
        self._route = route
        self._threshold = threshold
        self._exclude = tuple(exclude)
        self._layers = {
            p: _layer_route(p, codec, route.exchange) for p, codec in (layers or {}).items()
        }

    def choose(self, name: str, shape: tuple[int, ...], dtype: str) -> Route:
        """The route of one tensor.

        Raises:
            ValueError: error feedback would not be stable for a tensor of that size.
            TypeError: a tensor of that dtype cannot be encoded.
        """
        if math.prod(shape) < max(1, self._threshold) or self._matches(name, self._exclude):
            return DENSE
        pattern = self._matches(name, tuple(self._layers))
        route = self._layers[pattern] if pattern else self._route
        if route.dense:
            return route
        if dtype not in ENCODABLE:
            raise TypeError(
                f"{name}: expected dtype {', '.join(ENCODABLE)}, got {dtype}; exclude it by name to send "
                f"it uncompressed"
            )
        try:
            route.feedback.check(route.codec, shape)
        except ValueError as error:
            raise ValueError(f"{name}, shape {shape}: {error}") from None
        return route

    def with_route(self, route: Route) -> Router:
        """The same thresholds and exclusions around another route, for all layers alike."""
        return Router(route, self._threshold, self._exclude)

    def unused_patterns(self, names: Sequence[str]) -> list[str]:
        """Patterns that match no name: most likely a slip of the pen."""
        patterns = (*self._exclude, *self._layers)
        return [p for p in patterns if not any(fnmatchcase(name, p) for name in names)]

    @staticmethod
    def _matches(name: str, patterns: Sequence[str]) -> str | None:
        return next((p for p in patterns if fnmatchcase(name, p)), None)


def _strings(values: Iterable[object]) -> bool:
    return all(isinstance(value, str) for value in values)


def _layer_route(pattern: str, codec: Codec | str | None, exchange: str) -> Route:
    if codec is None:
        return DENSE
    if isinstance(codec, str):
        check_choice("Compressor", f"layers[{pattern!r}]", codec, tuple(SCHEMES))
        return Route(SCHEMES[codec].codec(), SCHEMES[codec].feedback, exchange)
    if not isinstance(codec, Codec):
        raise TypeError(
            f"Compressor.layers[{pattern!r}]: expected a codec, a name or None, got {codec!r}"
        )
    return Route(codec, scheme_of(codec).feedback, exchange)


def check_gather(name: str, payload_bytes: int, size: int) -> None:
    """Raises ``ValueError`` where all ranks' payloads together are too large for one gather."""
    if payload_bytes * size > MAX_GATHERED_BYTES:
        raise ValueError(
            f"{name}: expected at most {MAX_GATHERED_BYTES} bytes in one gather, got {size} ranks times "
            f"{payload_bytes}; use a codec with fewer bits or exclude the tensor"
        )
