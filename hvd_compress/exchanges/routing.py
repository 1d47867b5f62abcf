"""Which tensors are encoded, with what, and which go as they are."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, NoReturn

from hvd_compress.codecs import Codec, ErrorFeedback, NoCompression, codec_class
from hvd_compress.codecs.checks import check_choice, check_number
from hvd_compress.codecs.feedback import OFF
from hvd_compress.codecs.refusal import refuse
from hvd_compress.exchanges import registry

# Callers import the limits from here, too.
from hvd_compress.exchanges.limits import MAX_GATHERED_BYTES as MAX_GATHERED_BYTES
from hvd_compress.exchanges.limits import check_gather as check_gather
from hvd_compress.exchanges.packing import packs

ENCODABLE = ("float32", "float16", "bfloat16")
DEFAULT_THRESHOLD = 1024

EXCHANGE_NAMES = tuple(registry.EXCHANGES)
"""How payloads get from rank to rank, by name; the first is the default."""

_CAST_DTYPES = {"none": None, "fp16": "float16"}
"""Codecs whose output Horovod's own allreduce can add, and the dtype that it then adds."""


@dataclass(frozen=True)
class Route:
    """How one tensor travels: a codec, its error feedback and an exchange.

    Attributes:
        codec: what the tensor is encoded with.
        feedback: coefficients of error feedback; the default is those of the codec's paper.
        exchange: one of :data:`EXCHANGE_NAMES`; the default, an empty string, is the exchange of the
            compressor that the route is given to.

    Raises:
        TypeError, ValueError: "expected X, got Y".
    """

    codec: Codec
    feedback: ErrorFeedback = None  # type: ignore[assignment]
    exchange: str = ""

    def __post_init__(self) -> None:
        codec: Any = self.codec
        if not isinstance(codec, Codec):
            raise TypeError(f"Route.codec: expected a codec, got {codec!r}")
        given: Any = self.feedback
        if given is None:
            object.__setattr__(self, "feedback", self.codec.feedback)
        elif not isinstance(given, ErrorFeedback):
            raise TypeError(f"Route.feedback: expected an ErrorFeedback, got {given!r}")
        if self.exchange:
            check_choice("Route", "exchange", self.exchange, EXCHANGE_NAMES)

    @classmethod
    def compress(cls, tensor: Any) -> NoReturn:
        """Raises ``TypeError``: Horovod calls it where a route was given in place of a compressor."""
        refuse("a Route", "Route(...)")

    @property
    def uncompressed(self) -> bool:
        """Whether Horovod reduces the tensor itself, in :attr:`cast_dtype`."""
        return self.codec.name in _CAST_DTYPES and not self.feedback.enabled

    @property
    def cast_dtype(self) -> str | None:
        """What an uncompressed tensor is cast to first; None leaves it as it is."""
        return _CAST_DTYPES[self.codec.name]

    def __str__(self) -> str:
        feedback = f" with alpha={self.feedback.alpha}, beta={self.feedback.beta}"
        through = "" if self.uncompressed else f" through {self.exchange}"
        return f"{self.codec}{feedback if self.feedback.enabled else ''}{through}"


UNCOMPRESSED_ROUTE = Route(NoCompression(), OFF, EXCHANGE_NAMES[0])

CodecLike = Codec | Route | str | None
"""What a user may give for a tensor: a codec, a route, a codec's name, or None for uncompressed."""


def route_of(given: CodecLike, exchange: str, where: str) -> Route:
    """The route that a user means.

    Args:
        given: what the user wrote.
        exchange: of the compressor, for a route without one.
        where: the argument, for the message: ``"Compressor.codec"``.

    Raises:
        TypeError, ValueError: "expected X, got Y".
    """
    if isinstance(given, str):
        owner, _, field = where.partition(".")
        given = codec_class(owner, field, given)()
    route = Route(given) if isinstance(given, Codec) else given
    if route is None:
        return UNCOMPRESSED_ROUTE
    if not isinstance(route, Route):
        raise TypeError(
            f"{where}: expected a codec, a Route, a codec's name or None, got {_named(given)}"
        )
    return route if route.exchange else replace(route, exchange=exchange)


def _named(given: object) -> str:
    if isinstance(given, type):
        return f"the class {given.__name__}: write {given.__name__}()"
    router = getattr(given, "_router", None)
    if isinstance(router, Router):
        return f"a compressor: write its codec, {router.route.codec}"
    return repr(given)


class Router:
    """Chooses a route by a tensor's name and size.

    Args:
        route: what most tensors take, with an exchange.
        threshold: tensors of fewer elements go uncompressed: Horovod fuses them into one message.
        exclude: patterns (``fnmatch``) of names that go uncompressed.
        layers: codecs by name pattern, the first match winning over ``route``: a codec, a :class:`Route`,
            the name of a codec, or None for uncompressed.

    Raises:
        TypeError, ValueError: "expected X, got Y".
    """

    def __init__(
        self,
        route: Route,
        threshold: int = DEFAULT_THRESHOLD,
        exclude: Sequence[str] = (),
        layers: Mapping[str, CodecLike] | None = None,
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
            pattern: route_of(given, route.exchange, f"Compressor.layers[{pattern!r}]")
            for pattern, given in (layers or {}).items()
        }

    @property
    def route(self) -> Route:
        """What most tensors take."""
        return self._route

    @property
    def settings(self) -> dict[str, Any]:
        """What ranks compare, fit for JSON."""
        return {
            "codec": str(self._route),
            "threshold": self._threshold,
            "exclude": list(self._exclude),
            "layers": {pattern: str(route) for pattern, route in self._layers.items()},
        }

    @property
    def codecs(self) -> list[Codec]:
        """Those that some tensor may be encoded with."""
        routes = [self._route, *self._layers.values()]
        return [route.codec for route in routes if not route.uncompressed]

    def choose(self, name: str, shape: tuple[int, ...], dtype: str) -> Route:
        """The route of one tensor; uncompressed for a dtype that is not one of :data:`ENCODABLE`.

        Raises:
            ValueError: error feedback would not be stable for a tensor of that size.
        """
        route = self.wanted(name, shape)
        if not route.uncompressed and dtype not in ENCODABLE:
            return UNCOMPRESSED_ROUTE
        check_feedback(name, shape, route)
        return route

    def wanted(self, name: str, shape: tuple[int, ...]) -> Route:
        """The route of one tensor if its dtype can be encoded; whether it can take it is not checked."""
        if math.prod(shape) < max(1, self._threshold) or self._matches(name, self._exclude):
            return UNCOMPRESSED_ROUTE
        pattern = self._matches(name, tuple(self._layers))
        return self._layers[pattern] if pattern else self._route

    def with_route(self, route: Route) -> Router:
        """The same thresholds and exclusions around another route, for all layers alike."""
        return Router(route, self._threshold, self._exclude)

    def check_patterns(self, names: Sequence[str]) -> None:
        """Raises ``ValueError`` where a pattern matches none of the parameters' names."""
        for pattern in (*self._exclude, *self._layers):
            matching(pattern, names, "Compressor")

    @staticmethod
    def _matches(name: str, patterns: Sequence[str]) -> str | None:
        return next((p for p in patterns if fnmatchcase(name, p)), None)


def check_feedback(name: str, shape: tuple[int, ...], route: Route) -> None:
    """Raises ``ValueError`` where error feedback would not be stable for a tensor of that size."""
    if route.uncompressed:
        return
    try:
        route.feedback.check(route.codec, shape)
    except ValueError as error:
        raise ValueError(f"{name}, shape {shape}: {error}") from None


def warn_of_dtypes(dtypes: Mapping[str, str]) -> None:
    """Warns of tensors that go uncompressed because their dtype cannot be encoded.

    Args:
        dtypes: by the tensors' names.
    """
    if dtypes:
        shown = ", ".join(f"{name} ({dtype})" for name, dtype in dtypes.items())
        warnings.warn(
            f"expected dtype {', '.join(ENCODABLE)} to compress a gradient; these go uncompressed in their "
            f"own dtype: {shown}",
            stacklevel=3,
        )


def warn_of_growth(name: str, shape: tuple[int, ...], route: Route, width: int) -> None:
    """Warns where a payload is longer than the gradient, as where each row has one element.

    Small tensors are left out: their headers are longer than they are.

    Args:
        name: the tensor's.
        shape: the tensor's.
        route: how it travels.
        width: bytes of an element.
    """
    count = math.prod(shape)
    if route.uncompressed or count < DEFAULT_THRESHOLD:
        return
    payload = route.codec.payload_bytes(shape)
    if payload > count * width:
        warnings.warn(
            f"{name}, shape {shape}: {route.codec} takes {payload} bytes, more than the {count * width} of "
            f"the gradient itself: exclude it by name, or give it another codec in layers=",
            stacklevel=3,
        )


def warn_of_places(name: str, route: Route, device_type: str) -> None:
    """Warns where an entropy code saves no bytes, because messages carry payloads in their places.

    Args:
        name: the tensor's.
        route: how it travels.
        device_type: where it is: PyTorch's name for the type of the device.
    """
    if not route.uncompressed and route.codec.varies and not packs(route.codec, device_type):
        warnings.warn(
            f"{name}: {route.codec} makes no message shorter for a gradient on a device of type "
            f"{device_type}: coding='plain' gives the same numbers, and takes less work",
            stacklevel=3,
        )


def matching(pattern: str, names: Sequence[str], what: str) -> list[str]:
    """The names that match a pattern.

    Args:
        pattern: as for ``fnmatch``.
        names: of all parameters.
        what: who asks, for the message.

    Raises:
        ValueError: none of them.
    """
    found = [name for name in names if fnmatchcase(name, pattern)]
    if not found:
        nearest = get_close_matches(pattern, names, 3, 0.0)
        raise ValueError(
            f"{what}: expected a pattern that matches a parameter's name, got {pattern!r}; the nearest "
            f"names are {', '.join(nearest)}"
        )
    return found


def _strings(values: Iterable[object]) -> bool:
    return all(isinstance(value, str) for value in values)
