"""The errors of constructors and methods that are called with wrong arguments."""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from hvd_compress.codecs.base import MEANT, Codec

_AS_WRITTEN = {"named_parameters": "model", "codec": "Int8()"}
"""The shorter words that examples use for some parameters. One of them may be a parameter itself."""

C = TypeVar("C", bound=type)


def check_call(
    name: str, signature: inspect.Signature, args: Sequence[Any], options: Mapping[str, Any]
) -> None:
    """Raises, with the right call in the message, unless the arguments fit the signature.

    ``signature`` is that of the callable ``name``, without ``self``, ``*args`` or ``**kwargs``.

    Raises:
        TypeError: an unknown keyword, a missing argument, too many arguments, or two for one parameter.
    """
    known = list(signature.parameters)
    keywords = f"Its keywords: {', '.join(known)}"
    for keyword in options:
        if keyword not in known:
            near = difflib.get_close_matches(_AS_WRITTEN.get(keyword, keyword), known, n=1)
            expected = f"expected {near[0]!r}, got" if near else "got"
            meant = f": {MEANT[keyword]}" if keyword in MEANT else ""
            raise TypeError(
                f"{name}: {expected} an unexpected keyword {keyword!r}{meant}. {keywords}"
            )
    positional = [p for p in signature.parameters.values() if p.kind is not p.KEYWORD_ONLY]
    call = written(name, signature)
    if len(args) > len(positional):
        many = f"{len(args)} positional argument{'s' if len(args) > 1 else ''}"
        raise TypeError(f"{name}: expected {call}, with options by name, got {many}. {keywords}")
    given = {p.name for p in positional[: len(args)]} | options.keys()
    missing = [parameter for parameter in _required(signature) if parameter not in given]
    if missing:
        words = ", ".join(f"no {_AS_WRITTEN.get(parameter, parameter)}" for parameter in missing)
        raise TypeError(f"{name}: expected {call}, got {words}")
    try:
        signature.bind(*args, **options)
    except TypeError as error:
        raise TypeError(f"{name}: expected {call}, got {error}") from None


def check_options(name: str, made: type, options: Mapping[str, Any]) -> None:
    """Raises ``TypeError`` for a keyword that a class does not take, before an instance is made.

    ``name`` is the callable that the user has called, for the message.
    """
    known = inspect.signature(made).parameters.values()
    signature = inspect.Signature([p for p in known if p.kind is p.KEYWORD_ONLY])
    check_call(name, signature, (), options)


def written(name: str, signature: inspect.Signature) -> str:
    """The shortest valid call, such as ``OneBit(model)``."""
    required = (_AS_WRITTEN.get(parameter, parameter) for parameter in _required(signature))
    return f"{name}({', '.join(required)})"


def expect_instance(
    where: str, value: Any, kind: type, write: str, example: str = "Compressor(model, Int8())"
) -> None:
    """Raises, with the line to write in the message, unless ``value`` is an instance of ``kind``.

    Args:
        where: the parameter or method that received the value, for the message.
        value: the argument.
        kind: the expected class.
        write: the caller's line, with ``{}`` in place of the value.
        example: the expression to write in place of ``{}``, unless the value is a subclass of ``kind``.

    Raises:
        TypeError: a class in place of an instance, or any other object.
    """
    if isinstance(value, kind):
        return
    if isinstance(value, type) and issubclass(value, kind):
        got = f"the class {value.__name__}"
        example = written(value.__name__, inspect.signature(value))
    elif isinstance(value, Codec):
        got = f"the codec {value}"
        example = example.replace("Int8()", str(value))
    elif type(value).__module__.startswith("hvd_compress."):
        package, name = type(value).__module__, type(value).__name__
        got = f"one of another package, {package}.{name}"
        example = f"{_package_of(kind)}.{example}"
    else:
        got = "None" if value is None else f"an object of type {type(value).__name__}"
    raise TypeError(
        f"{where}: expected an instance of a compressor, got {got}: write {write.format(example)}"
    )


def _package_of(kind: type) -> str:
    """The package that a class belongs to, such as ``hvd_compress.ddp``."""
    return ".".join(kind.__module__.split(".")[:2])


def point_to_codecs(module: str) -> None:
    """Makes ``hvdc.OneBit`` raise, in a module of this ``__name__``, an error that says what to write."""

    def missing(name: str) -> Any:
        from hvd_compress.codecs.registry import CODECS, FACTORS

        words = ""
        if name in {codec.__name__ for codec in (CODECS | FACTORS).values()}:
            words = f": write Compressor(model, {name}()), with `from hvd_compress import {name}`"
        raise AttributeError(f"module {module!r} has no attribute {name!r}{words}")

    # Not by a function of the module: type checkers would believe then that it has every attribute.
    vars(sys.modules[module])["__getattr__"] = missing


def guard(cls: C) -> C:
    """A class decorator that makes the constructor name the right call when its arguments are wrong.

    The constructor's signature, and so ``help()``, lists the options that it passes on to its base.
    """
    if "__init__" in vars(cls):
        cls.__init__ = checked(cls, cls.__init__, _signature_of(cls))  # type: ignore[misc]
    return cls


def guard_methods(*methods: str, write: str) -> Callable[[C], C]:
    """A decorator like :func:`guard`, for classes that users might pass in place of an instance.

    Args:
        methods: the methods that raise as :func:`expect_instance` does when called on the class itself.
        write: the same as in :func:`expect_instance`.
    """

    def decorate(cls: C) -> C:
        for name in methods:
            if name in vars(cls):
                setattr(cls, name, _InstanceMethod(vars(cls)[name], cls, write))
        return guard(cls)

    return decorate


def _required(signature: inspect.Signature) -> list[str]:
    return [p.name for p in signature.parameters.values() if p.default is p.empty]


def _signature_of(cls: type) -> inspect.Signature:
    """The signature of a class's constructor, with the keywords of its base in place of ``**options``.

    The signature omits the options that the class itself sets, which its attribute ``chosen`` lists.
    """
    own = inspect.signature(cls.__init__)  # type: ignore[misc]
    parameters = list(own.parameters.values())
    if parameters[-1].kind is not inspect.Parameter.VAR_KEYWORD:
        return own
    position = next(i for i, base in enumerate(cls.__mro__) if "__init__" in vars(base))
    base = next(base for base in cls.__mro__[position + 1 :] if "__init__" in vars(base))
    known = {p.name for p in parameters} | set(getattr(cls, "chosen", ()))
    inherited = _signature_of(base).parameters.values()
    passed_on = [p for p in inherited if p.kind is p.KEYWORD_ONLY and p.name not in known]
    return own.replace(parameters=[*parameters[:-1], *passed_on])


def checked(cls: type, init: Callable[..., None], whole: inspect.Signature) -> Callable[..., None]:
    """A constructor of a class that calls ``init`` if the arguments fit the signature ``whole``."""
    signature = whole.replace(parameters=list(whole.parameters.values())[1:])

    @functools.wraps(init)
    def __init__(self: Any, /, *args: Any, **options: Any) -> None:
        inherited = type(self).__init__ is __init__
        check_call((type(self) if inherited else cls).__name__, signature, args, options)
        init(self, *args, **options)

    __init__.__signature__ = whole  # type: ignore[attr-defined]
    return __init__


class _InstanceMethod:
    """A descriptor of a method that can tell access through an instance from access through a class."""

    def __init__(self, function: Any, kind: type, write: str) -> None:
        self._function, self._kind, self._write = function, kind, write
        functools.update_wrapper(self, function)  # type: ignore[arg-type]

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is not None:
            return self._function.__get__(instance, owner)
        function, kind, write = self._function, self._kind, self._write

        @functools.wraps(function)
        def on_class(*args: Any, **options: Any) -> Any:
            if args and isinstance(args[0], kind):  # Compressor.compress(compressor, tensor)
                return function(*args, **options)
            return expect_instance(function.__name__, owner, kind, write)

        return on_class
