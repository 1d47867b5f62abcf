"""The codecs by name: those of this package, and those that scripts register or other packages offer.

A codec of another package needs no line here. Either the script calls :func:`register`, or the package
declares an entry point with the codec's name in the group :data:`ENTRY_POINTS`.
"""

from __future__ import annotations

import dataclasses
from importlib.metadata import entry_points
from typing import Any

from hvd_compress.codecs.base import Codec
from hvd_compress.codecs.cast import BF16, FP16, NoCompression
from hvd_compress.codecs.checks import check_choice
from hvd_compress.codecs.ecq import ECQ, QSGD
from hvd_compress.codecs.int8 import Int8
from hvd_compress.codecs.onebit import OneBit
from hvd_compress.codecs.power_sgd import PowerSGD
from hvd_compress.codecs.ternary import Ternary
from hvd_compress.codecs.topk import TopK

ENTRY_POINTS = "hvd_compress.codecs"
"""The group of entry points through which installed packages offer codecs."""

CODECS: dict[str, type[Codec]] = {
    "onebit": OneBit,
    "int8": Int8,
    "ternary": Ternary,
    "ecq": ECQ,
    "qsgd": QSGD,
    "topk": TopK,
    "fp16": FP16,
    "bf16": BF16,
    "none": NoCompression,
}
"""The codec classes by name: those of this package, and others that have been registered."""

FACTORS: dict[str, type[Codec]] = {"powersgd": PowerSGD}
"""The codec classes by name that write no payloads, and have an exchange of their own."""

_OTHER_NAMES = {"1bit": "onebit"}
"""Other names that users write, without hyphens and underscores."""


def register(name: str, cls: type[Codec]) -> type[Codec]:
    """Makes a codec available by name in every frontend and command.

    A class that is defined again, as in a notebook, replaces the former one.

    Args:
        name: the name of the codec, the same as ``cls.name``.
        cls: a frozen dataclass derived from :class:`Codec`, with ``codec_id``, ``name``, ``error``,
            ``layout``, ``quantize`` and ``dequantize``. Every field must have a default.

    Returns:
        ``cls``.

    Raises:
        TypeError: any other class.
        ValueError: the name or the codec id belongs to another class.
    """
    check_class(name, cls)
    for taken, other in (CODECS | FACTORS).items():
        if _path(other) == _path(cls):
            continue
        if taken == name:
            raise ValueError(
                f"register: expected a new name, got {name!r} for {_path(cls)}, the name of {_path(other)}"
            )
        if taken in CODECS and other.codec_id == cls.codec_id:
            raise ValueError(
                f"register: expected a new codec_id, got {cls.codec_id} for {_path(cls)}, the id of "
                f"{_path(other)}"
            )
    CODECS[name] = cls
    return cls


def codec_class(owner: str, field: str, name: Any) -> type[Codec]:
    """The codec class with the given name; loads its entry point if it is not registered.

    Names are found in any case, with or without hyphens and underscores: ``"Power_SGD"``, ``"1-bit"``.

    Args:
        owner: the function or class that received the name, for the message.
        field: the parameter that received the name, for the message.
        name: the name from the user.

    Raises:
        ValueError: an unknown name, or an entry point whose name or codec id is taken.
        TypeError: an entry point that is not a codec class.
    """
    known = CODECS | FACTORS
    if name in known:
        return known[name]
    offered = _offered()
    names = {_spelling(one): one for one in (*known, *offered)}
    spelling = _spelling(name) if isinstance(name, str) else name
    if spelling == "auto":
        raise ValueError(
            f"{owner}.{field}: expected a codec's name, got {name!r}, a compressor that chooses codecs: "
            f"write Auto(...) of the same package in place of a compressor with a codec"
        )
    found = names.get(_OTHER_NAMES.get(spelling, spelling), name)
    if found in known:
        return known[found]
    check_choice(owner, field, found, tuple(names.values()))
    return register(found, _load(offered[found]))


def codec_of(owner: str, field: str, given: Any) -> Codec:
    """A user's codec: the value itself, or the codec of a name with its default settings.

    ``owner`` and ``field`` name the argument in the message.

    Raises:
        TypeError: neither a codec nor a name.
        ValueError: an unknown name; see :func:`codec_class`.
    """
    if isinstance(given, str):
        return codec_class(owner, field, given)()
    if not isinstance(given, Codec):
        raise TypeError(
            f"{owner}.{field}: expected a codec of hvd_compress.codecs such as Int8(), or a codec's name, "
            f"got {given!r}"
        )
    expect_payloads(f"{owner}.{field}", given)
    return given


def expect_payloads(where: str, codec: Codec) -> None:
    """Raises ``ValueError`` unless a codec writes payloads; ``where`` names the argument in the message."""
    if codec.exchange is not None:
        raise ValueError(
            f"{where}: expected a codec that writes payloads, such as OneBit() or Int8(), got {codec!r}, "
            f"which needs exchange={codec.exchange!r}: the Compressor of hvd_compress.torch, ddp, fsdp and "
            f"distributed has it"
        )


def codec_names() -> tuple[str, ...]:
    """The names of all codecs, including those of entry points, which are not loaded.

    Raises:
        ValueError: two entry points have the same name.
    """
    return (*CODECS, *FACTORS, *_offered())


def codec_from_config(config: dict[str, Any]) -> Codec:
    """The inverse of :meth:`Codec.to_config`.

    Raises:
        ValueError: an unknown codec, or fields out of range.
        TypeError: fields that the codec does not have.
    """
    fields = dict(config)
    return codec_class("configuration", "codec", fields.pop("codec", None))(**fields)


def _offered() -> dict[str, Any]:
    """The entry points by name, without codecs that are registered already."""
    found: dict[str, Any] = {}
    for point in entry_points(group=ENTRY_POINTS):
        other = found.setdefault(point.name, point)
        if other.value != point.value:
            raise ValueError(
                f"entry points {ENTRY_POINTS}: expected one class named {point.name!r}, got {other.value} "
                f"and {point.value}: uninstall one of the packages"
            )
        known = (CODECS | FACTORS).get(point.name)
        if known is not None and known.__module__.startswith("hvd_compress."):
            raise ValueError(
                f"entry points {ENTRY_POINTS}: expected a new name, got {point.name!r} for {point.value}, "
                f"the name of {_path(known)}: uninstall its package"
            )
    return {name: point for name, point in found.items() if name not in CODECS}


def _load(point: Any) -> Any:
    try:
        return point.load()
    except Exception as error:
        raise ValueError(
            f"entry point {point.name} = {point.value} of {ENTRY_POINTS}: expected a codec class, got "
            f"{type(error).__name__}: {error}: correct the package's metadata, or install it again"
        ) from error


def check_class(name: str, cls: Any) -> None:
    """Raises, as :func:`register` does, unless the class is a complete codec of the given name."""
    if not isinstance(cls, type) or not issubclass(cls, Codec):
        raise TypeError(f"register: expected a class derived from Codec, got {cls!r}")
    if not dataclasses.is_dataclass(cls) or not cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise TypeError(f"register: expected a frozen dataclass, got {_path(cls)}")
    required = [field.name for field in dataclasses.fields(cls) if _required(field)]
    if required:
        raise TypeError(
            f"register: expected a default for every field of {_path(cls)}, got none for "
            f"{', '.join(required)}"
        )
    unbiased = getattr(cls, "error", None) == "unbiased"
    for method in ("layout", "quantize", "dequantize", *("variance_factor",) * unbiased):
        if getattr(cls, method) is getattr(Codec, method):
            raise TypeError(f"register: expected {_path(cls)}.{method}, which it does not define")
    expected = {
        "codec_id": ("an integer from 1 to 255", lambda x: isinstance(x, int) and 0 < x < 256),
        "name": (f"{name!r}, as registered", lambda x: x == name),
        "error": ("'unbiased' or 'contractive'", lambda x: x in ("unbiased", "contractive")),
    }
    for attribute, (what, good) in expected.items():
        got = getattr(cls, attribute, None)
        if not good(got):
            raise ValueError(f"{_path(cls)}.{attribute}: expected {what}, got {got!r}")


def _required(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.init and field.default is missing and field.default_factory is missing


def _spelling(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
