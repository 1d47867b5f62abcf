"""A frontend's ``OneBit``, ``Int8`` and so on, made of its compressor and the table of schemes.

A class for each entry of :data:`hvd_compress.codecs.SCHEMES`. Its constructor takes what the frontend's
compressor takes, with the codec's fields and the coefficients of error feedback by name in place of a
codec and an :class:`~hvd_compress.codecs.ErrorFeedback`. Signature, annotations and docstring are read
from the compressor and the codec, so that a new codec, or a compressor's new argument, needs nothing here.

Type checkers and editors see the same in ``__init__.pyi``, which ``scripts/stubs.py`` writes.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from hvd_compress.codecs.base import check_choice
from hvd_compress.codecs.calls import guard
from hvd_compress.codecs.docstrings import compose, entries_of, summary_of, text_of
from hvd_compress.codecs.feedback import ErrorFeedback
from hvd_compress.codecs.registry import SCHEMES, Scheme

C = TypeVar("C")


class ByName(Generic[C]):
    """Compressors by name, for command-line flags.

    Attributes:
        names: of all schemes; :meth:`by_name` knows ``"auto"``, too, where the frontend has ``Auto``.
    """

    names: ClassVar[tuple[str, ...]] = tuple(SCHEMES)
    _module: ClassVar[str]
    _base: ClassVar[type]
    _made: ClassVar[Mapping[str, type]]

    @classmethod
    def by_name(cls, name: str, /, *model: Any, **options: Any) -> C:
        """Makes the compressor of that name; the other arguments are those of its class.

        Raises:
            ValueError: no such name.
            TypeError: arguments that its class does not take.
        """
        # SCHEMES may have got an entry since.
        others = (other for other in cls._made if other not in cls.names)
        check_choice("Compression", "by_name", name, (*SCHEMES, *others))
        made = cls._made.get(name) or compressor_class(cls._module, cls._base, SCHEMES[name])
        return made(*model, **options)


def compressors(
    module: str,
    base: type,
    auto: type | None = None,
    *,
    methods: Sequence[str] = (),
    write: str = "{}",
) -> dict[str, Any]:
    """What a frontend offers under the names of the schemes, to be put into its module.

    Args:
        module: the frontend's name, ``__name__`` there.
        base: its compressor, whose constructor has ``codec`` and ``feedback`` behind what it has to know
            of the model, and options by name alone.
        auto: its compressor that chooses by itself, for ``Compression.by_name("auto")``.
        methods: those that a framework calls; called on the class itself, they say what to write.
        write: how a compressor is handed over, ``"compression={}"``, for these messages.

    Returns:
        A class for each scheme by the class's name, and :class:`ByName` of them as ``Compression``.
        ``base`` and ``auto`` are changed in place to answer for themselves as the classes do
        (:func:`hvd_compress.codecs.calls.guard`).
    """
    if auto is not None:
        _take_options(auto, base)
    for own in (base, auto):
        if own is not None:
            guard(own, methods, write)
    made = {name: compressor_class(module, base, scheme) for name, scheme in SCHEMES.items()}
    by_name = {**made, "auto": auto} if auto is not None else made

    def fill(namespace: dict[str, Any]) -> None:
        namespace.update(__module__=module, __doc__=inspect.getdoc(ByName))
        namespace.update(_module=module, _base=base, _made=by_name)

    compression = types.new_class("Compression", (ByName,), {}, fill)
    return {"Compression": compression, **{cls.__name__: cls for cls in made.values()}}


def _take_options(auto: type, base: type) -> None:
    """Has the signature of ``auto`` list the options of ``base`` that it passes on.

    Args:
        auto: its constructor ends with ``**options``; ``auto.chosen`` names what it decides itself.
        base: the compressor that it is derived from.
    """
    own = list(_signature(auto.__init__, True).parameters.values())  # type: ignore[misc]
    if own[-1].kind is not inspect.Parameter.VAR_KEYWORD:
        return
    known = {p.name for p in own} | set(auto.chosen)  # type: ignore[attr-defined]
    options = _signature(inspect.unwrap(base.__init__), True).parameters.values()  # type: ignore[misc]
    passed_on = [p for p in options if p.kind is p.KEYWORD_ONLY and p.name not in known]
    auto.__init__.__signature__ = inspect.Signature([*own[:-1], *passed_on])  # type: ignore[misc]


def title_of(scheme: Scheme) -> str:
    """The name of a frontend's class for a scheme."""
    return scheme.title or scheme.codec.__name__


def compressor_class(module: str, base: type, scheme: Scheme) -> type:
    """A frontend's class for one scheme.

    Raises:
        TypeError: the codec has a field that is called as one of the compressor's arguments.
    """
    fields = [field.name for field in dataclasses.fields(scheme.codec)]
    signature = signature_of(base, scheme)

    def __init__(self: Any, /, *args: Any, **options: Any) -> None:
        codec = scheme.codec(**{name: options.pop(name) for name in fields if name in options})
        feedback = dataclasses.replace(
            scheme.feedback,
            **{name: options.pop(name) for name in _COEFFICIENTS if name in options},
        )
        initialize(self, *args, codec=codec, feedback=feedback, **options)

    initialize = base.__init__  # type: ignore[misc]
    title = title_of(scheme)
    __init__.__signature__ = signature  # type: ignore[attr-defined]
    __init__.__annotations__ = {
        p.name: p.annotation for p in signature.parameters.values() if p.annotation is not p.empty
    } | {"return": None}
    __init__.__qualname__, __init__.__module__ = f"{title}.__init__", module

    def fill(namespace: dict[str, Any]) -> None:
        namespace.update(__init__=__init__, __module__=module, __doc__=docstring_of(base, scheme))

    return guard(types.new_class(title, (base,), {}, fill))


_COEFFICIENTS = tuple(field.name for field in dataclasses.fields(ErrorFeedback))


def signature_of(base: type, scheme: Scheme, *, evaluate: bool = True) -> inspect.Signature:
    """The signature of a class's constructor, with ``self``.

    Args:
        base: as for :func:`compressors`.
        scheme: whose codec.
        evaluate: whether annotations are the types, and not the source's text.

    Raises:
        TypeError: the codec has a field that is called as one of the compressor's arguments.
    """
    own = _signature(inspect.unwrap(base.__init__), evaluate)  # type: ignore[misc]
    front = [p for p in own.parameters.values() if p.kind is not p.KEYWORD_ONLY]
    options = [p for p in own.parameters.values() if p.kind is p.KEYWORD_ONLY]
    made = [
        *(p for p in front if p.name not in ("codec", "feedback")),
        *_options_of(scheme.codec, evaluate),
        *_options_of(ErrorFeedback, evaluate, scheme.feedback),
        *options,
    ]
    names = [p.name for p in made]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise TypeError(
            f"{scheme.codec.__name__}: expected fields that {base.__name__} has no arguments for, got "
            f"{', '.join(twice)}"
        )
    return own.replace(parameters=made)


def docstring_of(base: type, scheme: Scheme) -> str:
    """The docstring of a class: the codec's text, and every argument's."""
    arguments = entries_of(base, "Args")
    own = entries_of(scheme.codec, "Attributes") | entries_of(ErrorFeedback, "Attributes")
    parameters = list(signature_of(base, scheme, evaluate=False).parameters)[1:]
    documented = {name: (own | arguments).get(name) for name in parameters}
    return compose(
        [
            scheme.summary or summary_of(scheme.codec),
            summary_of(scheme.codec) if scheme.summary else "",
            text_of(scheme.codec),
            summary_of(base),
        ],
        {
            "Args": {name: text for name, text in documented.items() if text},
            "Raises": entries_of(base, "Raises"),
        },
    )


def _signature(function: Any, evaluate: bool) -> inspect.Signature:
    try:
        return inspect.signature(function, eval_str=evaluate)
    except NameError:  # A type that only type checkers import.
        return inspect.signature(function)


def _options_of(owner: type, evaluate: bool, values: Any = None) -> list[inspect.Parameter]:
    """A dataclass's fields as keyword arguments; their defaults are an instance's values, if given."""
    types_of_fields = typing.get_type_hints(owner) if evaluate else {}
    empty = inspect.Parameter.empty
    parameters = []
    for field in dataclasses.fields(owner):
        default = empty if field.default is dataclasses.MISSING else field.default
        parameters.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default if values is None else getattr(values, field.name),
                annotation=types_of_fields.get(field.name, field.type),
            )
        )
    return parameters
