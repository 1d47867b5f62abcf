"""The base of compressors that are named after their codecs, such as ``hvd_compress.torch.OneBit``."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, ClassVar

from hvd_compress.codecs.base import Codec
from hvd_compress.codecs.calls import checked


class Named:
    """A mixin, listed before a frontend's ``Compressor``, whose subclasses take a codec's fields by name.

    ``class OneBit(Named, Compressor, codec=hvd_compress.OneBit)`` makes ``OneBit(model, group=64)`` the
    same as ``Compressor(model, hvd_compress.OneBit(group=64))``. The signature, and so ``help()``, lists
    the fields and the compressor's options; errors name the right call.
    """

    _codec: ClassVar[type[Codec]]

    def __init__(self, *args: Any, **options: Any) -> None:
        names = [one.name for one in dataclasses.fields(self._codec) if one.name in options]
        codec = self._codec(**{name: options.pop(name) for name in names})
        super().__init__(*args, codec=codec, **options)  # type: ignore[call-arg]

    def __init_subclass__(cls, codec: type[Codec] | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if codec is None:
            return
        cls._codec = codec
        frontend = next(one for one in cls.__mro__ if not issubclass(one, Named))
        of_codec = [
            inspect.Parameter(
                one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=one.type
            )
            for one in dataclasses.fields(codec)
        ]
        signature = inspect.signature(frontend.__init__)
        known = [one for one in signature.parameters.values() if one.name != "codec"]
        known.sort(key=lambda one: one.kind)
        first = next((i for i, one in enumerate(known) if one.kind is one.KEYWORD_ONLY), len(known))
        whole = signature.replace(parameters=[*known[:first], *of_codec, *known[first:]])
        cls.__init__ = checked(cls, Named.__init__, whole)  # type: ignore[method-assign]
        model = "model, " if len(known[:first]) > 1 else ""
        cls.__doc__ = (
            f"{inspect.getdoc(codec).partition(chr(10))[0]}\n\n"  # type: ignore[union-attr]
            f"The same as ``Compressor({model}hvd_compress.{cls.__name__}(...), ...)``; codec fields are "
            f"passed by name."
        )
