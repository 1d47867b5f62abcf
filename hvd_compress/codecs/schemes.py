"""Compressors by name: a frontend's compressor with a codec and the error feedback of its paper."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, TypeVar

from hvd_compress.codecs.base import check_choice
from hvd_compress.codecs.feedback import ErrorFeedback
from hvd_compress.codecs.registry import SCHEMES


class Scheme:
    """One entry of :data:`hvd_compress.codecs.SCHEMES`; to be mixed in before a frontend's compressor.

    Takes the codec's fields and ``alpha`` and ``beta`` as keywords, beside the compressor's own, and
    what the compressor wants to know of the model in front.
    """

    scheme: ClassVar[str]

    def __init__(
        self,
        *model: Any,
        alpha: float | None = None,
        beta: float | None = None,
        **options: Any,
    ) -> None:
        scheme = SCHEMES[self.scheme]
        fields = {field.name for field in dataclasses.fields(scheme.codec)}
        codec = scheme.codec(**{name: options.pop(name) for name in fields & options.keys()})
        feedback = ErrorFeedback(
            scheme.feedback.alpha if alpha is None else alpha,
            scheme.feedback.beta if beta is None else beta,
        )
        super().__init__(*model, codec, feedback, **options)  # type: ignore[call-arg]


S = TypeVar("S", bound=Scheme)


def class_of(name: str, base: type[S]) -> type[S]:
    """The class derived from ``base`` for the scheme of that name.

    A registered scheme works by its name before a frontend has a documented class for it.

    Raises:
        ValueError: no such scheme.
    """
    check_choice("Compression", "by_name", name, tuple(SCHEMES))
    documented = (cls for cls in base.__subclasses__() if cls.scheme == name)
    return next(documented, None) or type(name, (base,), {"scheme": name})
