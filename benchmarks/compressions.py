"""Compressions in the form of command lines: ``NAME`` or ``NAME:key=value,key=value``."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from hvd_compress.codecs import ErrorFeedback, codec_class
from hvd_compress.exchanges.routing import Route

Options = dict[str, Any]

TERNARY = "ternary"

AUTO = "auto"
"""The compressor that measures the network and chooses codecs."""

_TIMED = ("fp16", "int8", "onebit")
"""The codecs from which :data:`AUTO` chooses unless ``codecs=`` is set: benchmarks time the planner among
codecs of 16, 8 and 1 bits, and a script's ``Auto`` leaves out the last one unless the script names it."""

LOCAL = "local"
"""Every rank trains alone: the time without any exchange."""

STOCK = "stock"
"""The framework's own exchange in every step: Horovod, DDP or HSDP without a compressor."""

POWERSGD_HOOK = "powersgd-hook"
"""PyTorch's ``powerSGD_hook`` of rank 4 under DDP, for step times."""

_LISTS = ("exclude", "codecs", "exchanges")
"""The settings that are lists, with values separated by ``|``."""


@dataclass(frozen=True)
class Compression:
    """A codec's name and its settings.

    Attributes:
        text: the specification, by which tables and records name the compression.
        name: the name of a codec, or :data:`AUTO`, :data:`LOCAL`, :data:`STOCK` or
            :data:`POWERSGD_HOOK`.
        options: the codec's fields, ``alpha`` and ``beta``, and a compressor's options, by name.
    """

    text: str
    name: str
    options: Options = field(default_factory=dict)

    def split(self) -> tuple[Route, Options]:
        """The route (codec, feedback and exchange), and the other options of a compressor.

        Raises:
            ValueError, TypeError: wrong fields of the codec, or wrong coefficients.
        """
        return _split(self.name, self.options)


def make(frontend: Any, name: str, /, *model: Any, **options: Any) -> Any:
    """Makes a compressor.

    Args:
        frontend: a frontend's module, such as :mod:`hvd_compress.ddp`.
        name: the name of a codec, or :data:`AUTO`.
        model: the positional arguments of the frontend's compressors before the route.
        options: the options of a :class:`Compression`.

    Raises:
        TypeError: an option that neither the codec nor the compressor has.
    """
    if name == AUTO:
        return frontend.Auto(*model, **{"codecs": _TIMED, **options})
    route, rest = _split(name, options)
    try:
        return frontend.Compressor(*model, route, **rest)
    except TypeError as error:
        own = [one.name for one in fields(route.codec)]
        if own and "unexpected keyword" in str(error):
            raise TypeError(f"{error}; of {name}: {', '.join(own)}") from error
        raise


def _split(name: str, options: Options) -> tuple[Route, Options]:
    kind, rest = codec_class("compression", "codec", name), dict(options)
    codec = kind(**{one.name: rest.pop(one.name) for one in fields(kind) if one.name in rest})
    given = {one.name: rest.pop(one.name) for one in fields(ErrorFeedback) if one.name in rest}
    exchange, inner = rest.pop("exchange", ""), rest.pop("inner", None)
    return Route(codec, replace(codec.feedback, **given), exchange, inner), rest


def parse(text: str, common: Options, last_layer: str) -> Compression:
    """Reads a specification.

    TernGrad does not compress the last layer, because one-hot labels skew its gradients (section 4 of the
    paper); neither does ``ternary`` unless ``exclude`` is set.

    Args:
        text: the specification.
        common: the settings for every codec, which the specification overrides.
        last_layer: the name pattern of the model's classifier.

    Raises:
        ValueError: a setting without ``=``, or any setting of what is not a compressor.
    """
    name, _, rest = text.partition(":")
    defaults = {"exclude": (last_layer,)} if name == TERNARY else {}
    own = dict(option(part) for part in rest.split(",") if part)
    if name in (LOCAL, STOCK, POWERSGD_HOOK):
        if own:
            raise ValueError(f"expected {name} without settings, got {text!r}")
        return Compression(text, name)
    return Compression(text, name, {**defaults, **common, **own})


def option(text: str) -> tuple[str, Any]:
    """Reads one ``key=value``; the values of lists, such as ``exclude``, are separated by ``|``.

    Raises:
        ValueError: there is no ``=``.
    """
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise ValueError(f"expected key=value, got {text!r}")
    if key in _LISTS:
        return key, tuple(value.split("|")) if value else ()
    return key, _value(value)


def _value(text: str) -> Any:
    words: dict[str, Any] = {"none": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
