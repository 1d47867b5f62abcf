"""The choice of a codec and an exchange, or no compression, for each tensor."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, NoReturn

from hvd_compress.codecs import Codec, ErrorFeedback, NoCompression, PowerSGD, codec_class
from hvd_compress.codecs.base import Shape
from hvd_compress.codecs.checks import check_choice, check_number
from hvd_compress.codecs.feedback import OFF
from hvd_compress.codecs.refusal import refuse
from hvd_compress.codecs.registry import codec_of
from hvd_compress.exchanges import registry
from hvd_compress.exchanges.comm import Group
from hvd_compress.exchanges.default import AUTO, exchange_for

ENCODABLE = ("float32", "float16", "bfloat16")
DEFAULT_THRESHOLD = 1024

EXCHANGE_NAMES = tuple(name for name in registry.EXCHANGES if name != PowerSGD.exchange)
"""The names of the exchanges of payloads between ranks."""

PLANNED_NAMES = tuple(n for n in EXCHANGE_NAMES if not registry.EXCHANGES[n].experimental)
"""The names of the exchanges among which planners choose."""

EXCHANGE_CHOICES = (AUTO, *registry.EXCHANGES)
"""The values of the option ``exchange``; the first is the default."""

_CAST_DTYPES = {"none": None, "fp16": "float16"}
"""The codecs whose output Horovod's own allreduce can add, with the dtype of that allreduce."""


@dataclass(frozen=True)
class Route:
    """The compression of one tensor: a codec, its error feedback and an exchange.

    Attributes:
        codec: the codec that encodes the tensor.
        feedback: the error feedback coefficients; by default, those of the codec's paper.
        exchange: one of :data:`EXCHANGE_CHOICES`; the default, an empty string, means the exchange of the
            compressor that receives the route.
        inner: the codec with which the ranks of a host average their gradients before ``codec`` encodes the
            average, for ``"hierarchical"`` only; the default, None, sends them uncompressed. It must have
            payloads of a fixed size that do not depend on rows and columns. Its error is fed back with the
            same coefficients.
        reason: the reason why ``"auto"`` has become this exchange; empty if the exchange was named. Routes
            that differ only in it are equal.

    Raises:
        TypeError, ValueError: "expected X, got Y".
    """

    codec: Codec
    feedback: ErrorFeedback = None  # type: ignore[assignment]
    exchange: str = ""
    inner: Codec | None = None
    reason: str = field(default="", init=False, compare=False)

    def __post_init__(self) -> None:
        codec: Any = self.codec
        if not isinstance(codec, Codec):
            raise TypeError(f"Route.codec: expected a codec, got {codec!r}")
        given: Any = self.feedback
        if given is None:
            object.__setattr__(self, "feedback", self.codec.feedback)
        elif not isinstance(given, ErrorFeedback):
            raise TypeError(f"Route.feedback: expected an ErrorFeedback, got {given!r}")
        codec.check_feedback(self.feedback)
        if self.exchange:
            check_choice("Route", "exchange", self.exchange, EXCHANGE_CHOICES)
        if self.inner is not None:
            self._check_inner(codec_of("Route", "inner", self.inner))
        if self.exchange not in ("", AUTO) and not self.uncompressed:
            self._check_pair()

    @classmethod
    def compress(cls, tensor: Any) -> NoReturn:
        """Raises ``TypeError``: Horovod calls it where a route was given in place of a compressor."""
        refuse("a Route", "Route(...)")

    @cached_property
    def uncompressed(self) -> bool:
        """Whether Horovod reduces the tensor itself, in :attr:`cast_dtype`."""
        return self.codec.name in _CAST_DTYPES and not self.feedback.enabled

    @cached_property
    def cast_dtype(self) -> str | None:
        """The dtype to which an uncompressed tensor is cast first; None means no cast."""
        return _CAST_DTYPES[self.codec.name]

    @cached_property
    def residuals(self) -> bool:
        """Whether ranks keep residuals of their whole gradients, with error feedback."""
        return registry.EXCHANGES[self.exchange].residuals or self.inner is not None

    @cached_property
    def kind(self) -> str:
        """The key of a bucket, whose gradients share it: the exchange, and whether ``inner`` is set."""
        return f"{self.exchange}{' by two codecs' if self.inner else ''}"

    def check(self, name: str, shape: Shape, element_bytes: int, group: Group) -> None:
        """Raises ``ValueError`` if the exchange cannot carry a tensor; see :attr:`Exchange.check`."""
        inner = {} if self.inner is None else {"inner": self.inner}
        named = registry.EXCHANGES[self.exchange]
        exchange = registry.UNCOMPRESSED if self.uncompressed else named
        exchange.check(name, shape, self.codec, element_bytes, group, **inner)

    def _check_inner(self, inner: Codec) -> None:
        object.__setattr__(self, "inner", inner)
        inner.check_feedback(self.feedback)
        if self.exchange not in ("", "hierarchical"):
            raise ValueError(
                f"Route.inner: expected exchange='hierarchical' with a codec within hosts, got "
                f"{self.exchange!r}"
            )
        if inner.varies or inner.shaped:
            raise ValueError(
                f"Route.inner: expected a codec whose payloads have a fixed size and whose groups are not "
                f"rows or columns, got {inner}"
            )
        if self.uncompressed:
            raise ValueError(
                f"Route.inner: expected a codec between hosts that is not uncompressed, got {self.codec}"
            )

    def among(self, ranks: int, *, divisible: bool = True) -> Route:
        """The route in which ``"auto"`` is the exchange for a number of ranks; a named exchange stays.

        Args:
            ranks: the number of ranks that exchange the tensor.
            divisible: whether the ranks can divide the tensor; if not, ``"auto"`` is the allgather.
        """
        if self.exchange != AUTO and not self.reason:
            return self
        if self.uncompressed:
            return replace(self, exchange=EXCHANGE_NAMES[0])
        if self.codec.exchange is not None:
            return replace(self, exchange=self.codec.exchange)
        exchange, reason = exchange_for(ranks, divisible=divisible)
        route = replace(self, exchange=exchange)
        object.__setattr__(route, "reason", reason)
        return route

    def _check_pair(self) -> None:
        """Raises ``ValueError`` if the codec has another exchange of its own."""
        own = self.codec.exchange
        if own not in (None, self.exchange):
            raise ValueError(
                f"Route.exchange: expected {own!r} for {self.codec!r}, which writes no payloads, got "
                f"{self.exchange!r}: write exchange='auto'; or, for some of the layers, "
                f"Route({self.codec!r}, exchange={own!r})"
            )

    def __str__(self) -> str:
        feedback = f" with alpha={self.feedback.alpha}, beta={self.feedback.beta}"
        if self.feedback.residual_dtype != "float32":
            feedback += f", residuals in {self.feedback.residual_dtype}"
        through = "" if self.uncompressed else f" through {self.exchange}"
        if self.inner is not None:
            through += f" with {self.inner} within hosts"
        if self.reason and through:
            through += f" ({self.reason})"
        return f"{self.codec}{feedback if self.feedback.enabled else ''}{through}"


UNCOMPRESSED_ROUTE = Route(NoCompression(), OFF, EXCHANGE_NAMES[0])

CodecLike = Codec | Route | str | None
"""The values that users may write for a tensor: a codec, a route, a codec's name, or None: uncompressed."""


def route_of(given: CodecLike, exchange: str, where: str) -> Route:
    """The route that a user's value stands for.

    Args:
        given: the value from the user.
        exchange: the compressor's exchange, for a route without one.
        where: the parameter, for the message, such as ``"Compressor.codec"``.

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
        route: the route of most tensors, with an exchange.
        threshold: the smallest number of elements that is compressed: Horovod fuses smaller tensors into
            one message.
        exclude: the name patterns (``fnmatch``) of tensors that are sent uncompressed.
        layers: exceptions from ``route`` by name pattern: a codec, a :class:`Route`, a codec's name, or
            None for uncompressed. The first match wins.

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
        """The route of most tensors."""
        return self._route

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that ranks compare, as JSON types."""
        return {
            "codec": str(self._route),
            "threshold": self._threshold,
            "exclude": list(self._exclude),
            "layers": {pattern: str(route) for pattern, route in self._layers.items()},
        }

    @property
    def codecs(self) -> list[Codec]:
        """The codecs that may encode some tensor."""
        both = ((route.codec, route.inner) for route in self.encoding)
        return [codec for pair in both for codec in pair if codec is not None]

    @property
    def encoding(self) -> list[Route]:
        """The routes with a codec that some tensor may take."""
        routes = [self._route, *self._layers.values()]
        return [route for route in routes if not route.uncompressed]

    def choose(self, name: str, shape: tuple[int, ...], dtype: str) -> Route:
        """The route of one tensor; uncompressed for a dtype that is not in :data:`ENCODABLE`.

        Raises:
            ValueError: error feedback would not be stable for a tensor of this size.
        """
        route = self.wanted(name, shape)
        if not route.uncompressed and dtype not in ENCODABLE:
            return UNCOMPRESSED_ROUTE
        check_feedback(name, shape, route)
        return route

    def wanted(self, name: str, shape: tuple[int, ...]) -> Route:
        """The route of one tensor, without a check of its dtype or of the stability of error feedback."""
        route = self.asked(name)
        encodes = math.prod(shape) >= max(1, self._threshold) and route.codec.encodes(shape)
        return route if encodes else UNCOMPRESSED_ROUTE

    def asked(self, name: str) -> Route:
        """The route of a tensor that is large enough for it, by the patterns of names."""
        if self._matches(name, self._exclude):
            return UNCOMPRESSED_ROUTE
        pattern = self._matches(name, tuple(self._layers))
        return self._layers[pattern] if pattern else self._route

    def with_route(self, route: Route) -> Router:
        """A router with the same threshold and exclusions, and with another route for all layers."""
        return Router(route, self._threshold, self._exclude)

    def check_patterns(self, names: Sequence[str]) -> None:
        """Raises ``ValueError`` if a pattern matches none of the parameters' names."""
        for pattern in (*self._exclude, *self._layers):
            matching(pattern, names, "Compressor")

    @staticmethod
    def _matches(name: str, patterns: Sequence[str]) -> str | None:
        return next((p for p in patterns if fnmatchcase(name, p)), None)


def check_feedback(name: str, shape: tuple[int, ...], route: Route) -> None:
    """Raises ``ValueError`` if error feedback would not be stable for a tensor of this size."""
    if route.uncompressed:
        return
    try:
        for codec in (route.codec, *([route.inner] if route.inner else [])):
            codec.check_feedback(route.feedback, shape)
    except ValueError as error:
        raise ValueError(f"{name}, shape {shape}: {error}") from None


def warn_of_dtypes(dtypes: Mapping[str, str]) -> None:
    """Warns of tensors, given by name, that are sent uncompressed because their dtype cannot be encoded."""
    if dtypes:
        shown = ", ".join(f"{name} ({dtype})" for name, dtype in dtypes.items())
        warnings.warn(
            f"expected dtype {', '.join(ENCODABLE)} to compress a gradient; these go uncompressed in their "
            f"own dtype: {shown}",
            stacklevel=3,
        )


def warn_of_growth(name: str, shape: tuple[int, ...], route: Route, width: int) -> None:
    """Warns if a payload is longer than the gradient, for example if each row has one element.

    There is no warning for small tensors, as their headers are longer than their elements. ``width`` is the
    bytes of an element.
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


def warn_of_nothing(router: Router, shapes: Mapping[str, Shape]) -> bool:
    """Warns, and returns True, if some of the tensors should be encoded, and all of them are too small.

    There is no warning if a script asks for no compression, or excludes all tensors.

    Args:
        router: the router that chooses the tensors' routes.
        shapes: the shapes of all tensors of a dtype that codecs encode, by name.
    """
    asked = {name: shape for name, shape in shapes.items() if not router.asked(name).uncompressed}
    if not asked or not all(router.wanted(*one).uncompressed for one in asked.items()):
        return False
    name, shape = max(asked.items(), key=lambda one: math.prod(one[1]))
    warnings.warn(
        f"expected a gradient of at least threshold={router.settings['threshold']} elements that "
        f"{router.asked(name).codec} encodes, got none: the largest, {name}, has shape {shape}; all "
        f"gradients go uncompressed: lower threshold=, or train without a compressor",
        stacklevel=3,
    )
    return True


def matching(pattern: str, names: Sequence[str], what: str) -> list[str]:
    """The names that match a pattern for ``fnmatch``; ``what`` is the caller, for the message.

    Raises:
        ValueError: no name matches.
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
