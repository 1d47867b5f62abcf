"""The factory of the frontends' classes, on a compressor of no framework."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import pydoc
import sys
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from hvd_compress import codecs
from hvd_compress.codecs import CODECS, SCHEMES, Codec, ErrorFeedback, Scheme
from hvd_compress.codecs.calls import expect_instance
from hvd_compress.codecs.docstrings import entries_of
from hvd_compress.codecs.frontends import compressors, signature_of


class Base:
    """Sends nothing.

    Args:
        model: what is trained.
        codec: the codec.
        feedback: its feedback.
        exchange: how payloads
            would travel.
        threads: how many.

    Raises:
        ValueError: never.
    """

    def __init__(
        self,
        model: object,
        codec: Codec,
        feedback: ErrorFeedback,
        *,
        exchange: str = "allgather",
        threads: int | None = None,
    ) -> None:
        self.made_of = (model, codec, feedback, exchange, threads)

    def compress(self, tensor: object) -> object:
        """Does nothing."""
        return (self, tensor)


class Auto(Base):
    """Chooses nothing."""

    def __init__(self, model: object, *, seed: int = 0) -> None:
        super().__init__(model, codecs.NoCompression(), ErrorFeedback(0.0))

    def compress(self, tensor: object) -> object:
        """Does nothing, by way of its base."""
        return super().compress(tensor)


MADE = compressors(__name__, Base, Auto, methods=("compress",), write="compression={}")
globals().update(MADE)
MODEL = object()


@pytest.fixture
def halves() -> Iterator[type[Codec]]:
    """A codec that is registered while the test runs."""

    @dataclasses.dataclass(frozen=True)
    class Halves(codecs.NoCompression):
        """Twice as much.

        Attributes:
            often: how often.
        """

        codec_id: ClassVar[int] = 200
        name: ClassVar[str] = "halves"

        often: int = 2

    CODECS["halves"], SCHEMES["halves"] = Halves, Scheme(Halves, ErrorFeedback())
    yield Halves
    del CODECS["halves"], SCHEMES["halves"]


def test_there_is_a_class_for_each_scheme() -> None:
    assert list(MADE) == [
        "Compression",
        "OneBit",
        "Int8",
        "Ternary",
        "ECQ",
        "QSGD",
        "FP16",
        "BF16",
        "NoCompression",
    ]


def test_fields_and_coefficients_make_codec_and_feedback() -> None:
    made = MADE["Int8"](MODEL, kind="linear", group=64, alpha=0.5, threads=3)
    codec, feedback = codecs.Int8("linear", 64), ErrorFeedback(0.5, 1.0)
    assert made.made_of == (MODEL, codec, feedback, "allgather", 3)
    assert isinstance(made, Base)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_defaults_are_the_papers(scheme: Scheme) -> None:
    cls = MADE[scheme.title or scheme.codec.__name__]
    assert cls(model=MODEL).made_of == (MODEL, scheme.codec(), scheme.feedback, "allgather", None)
    bound = inspect.signature(cls).bind(MODEL)
    bound.apply_defaults()
    assert bound.arguments["alpha"] == scheme.feedback.alpha
    for field in dataclasses.fields(scheme.codec):
        assert bound.arguments[field.name] == field.default


def test_signature_has_names_defaults_and_types() -> None:
    signature = inspect.signature(MADE["OneBit"])
    assert list(signature.parameters) == ["model", "group", "alpha", "beta", "exchange", "threads"]
    threads, alpha = signature.parameters["threads"], signature.parameters["alpha"]
    assert threads.annotation == int | None and threads.default is None
    assert alpha.annotation is float and alpha.kind is alpha.KEYWORD_ONLY
    assert MADE["OneBit"].__init__.__annotations__["return"] is None


def test_subclass_has_its_own_signature() -> None:
    class Mine(MADE["OneBit"]):  # type: ignore[misc]
        def __init__(self, one: int) -> None:
            super().__init__(MODEL, group=one)

    assert list(inspect.signature(Mine).parameters) == ["one"]
    assert Mine(64).made_of[1] == codecs.OneBit(64)


def test_help_shows_the_options() -> None:
    text = pydoc.plain(pydoc.render_doc(MADE["OneBit"]))
    assert "class OneBit(Base)" in text
    assert "OneBit(model: object, *, group: " in text and "exchange: str = 'allgather'" in text
    for line in (
        "1-bit SGD",
        "Sends nothing.",
        "how payloads",
        "would travel.",
        "ValueError: never",
    ):
        assert line in text, text
    arguments = entries_of(MADE["OneBit"], "Args")
    assert list(arguments) == ["model", "group", "alpha", "beta", "exchange", "threads"]


def test_classes_are_found_by_their_names() -> None:
    for name, cls in MADE.items():
        assert (cls.__name__, cls.__qualname__, cls.__module__) == (name, name, __name__)
        assert pickle.loads(pickle.dumps(cls)) is cls
        assert sys.modules[cls.__module__].__dict__[name] is cls


KEYWORDS = "Its keywords: model, group, alpha, beta, exchange, threads"
WRONG: tuple[tuple[Callable[[], Any], str], ...] = (
    (
        lambda: MADE["OneBit"](MODEL, gruop=3),
        f"OneBit: expected 'group', got an unexpected keyword 'gruop'. {KEYWORDS}",
    ),
    (
        lambda: MADE["OneBit"](MODEL, x=3),
        f"OneBit: got an unexpected keyword 'x'. {KEYWORDS}",
    ),
    (lambda: MADE["OneBit"](), "OneBit: expected OneBit(model), got no model"),
    (lambda: MADE["OneBit"](group=64), "OneBit: expected OneBit(model), got no model"),
    (
        lambda: MADE["OneBit"](MODEL, "column"),
        "OneBit: expected OneBit(model), with options by name, got 2 positional arguments. "
        + KEYWORDS,
    ),
    (
        lambda: MADE["OneBit"](MODEL, model=MODEL),
        "OneBit: expected OneBit(model), got multiple values for argument 'model'",
    ),
    (
        lambda: Base(MODEL),  # type: ignore[call-arg]
        "Base: expected Base(model, codec, feedback), got no codec, no feedback",
    ),
    (
        lambda: Auto(MODEL, seeds=1),  # type: ignore[call-arg]
        "Auto: expected 'seed', got an unexpected keyword 'seeds'. Its keywords: model, seed",
    ),
    (
        lambda: MADE["Compression"].by_name("onebit", MODEL, gruop=3),
        f"OneBit: expected 'group', got an unexpected keyword 'gruop'. {KEYWORDS}",
    ),
)


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message[:60] for _, message in WRONG])
def test_constructor_answers_for_itself(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError) as raised:
        call()
    assert str(raised.value) == message


def test_constructor_names_the_subclass_that_inherits_it() -> None:
    class Mine(MADE["OneBit"]):  # type: ignore[misc]
        pass

    with pytest.raises(TypeError, match=r"^Mine: expected Mine\(model\), got no model$"):
        Mine()


@pytest.mark.parametrize("name", ("OneBit", "QSGD"))
def test_class_in_place_of_an_instance(name: str) -> None:
    message = (
        f"compress: expected an instance of a compressor, got the class {name}: write "
        f"compression={name}(model)"
    )
    with pytest.raises(TypeError) as raised:
        MADE[name].compress(1)
    assert str(raised.value) == message


def test_method_on_the_class_takes_an_instance() -> None:
    for made in (MADE["OneBit"](MODEL), Auto(MODEL)):
        assert made.compress(1) == (made, 1)
        assert type(made).compress(made, 1) == (made, 1)
    assert Base.compress.__doc__ == "Does nothing."
    with pytest.raises(TypeError, match=r"the class Auto: write compression=Auto\(model\)"):
        Auto.compress(1)  # type: ignore[call-arg, arg-type]


def test_expected_instance_says_what_to_write() -> None:
    expect_instance("hook", MADE["Int8"](MODEL), Base, "f({})")
    for value, got in ((None, "None"), (3, "an object of type int"), (int, "of type type")):
        with pytest.raises(
            TypeError, match=rf"hook: expected .* {got}: write f\(OneBit\(model\)\)"
        ):
            expect_instance("hook", value, Base, "f({})")


def test_by_name_knows_all_and_auto() -> None:
    by_name = MADE["Compression"].by_name
    assert MADE["Compression"].names == tuple(SCHEMES)
    for name in SCHEMES:
        assert type(by_name(name, MODEL)) in MADE.values()
    assert isinstance(by_name("auto", MODEL, seed=3), Auto)
    with pytest.raises(ValueError, match=r"by_name: expected one of 'onebit', .*, got 'one'"):
        by_name("one", MODEL)


def test_auto_is_known_only_where_there_is_one() -> None:
    without = compressors(__name__, type("Plain", (Base,), {}))["Compression"]
    with pytest.raises(ValueError, match="'none', got 'auto'"):
        without.by_name("auto", MODEL)


def test_scheme_registered_later_works_by_its_name(halves: type[Codec]) -> None:
    made = MADE["Compression"].by_name("halves", MODEL, often=3)
    assert type(made).__name__ == "Halves" and made.made_of[1] == halves(3)  # type: ignore[call-arg]
    assert "often: how often." in str(type(made).__doc__)


def test_field_called_as_an_argument_is_refused(halves: type[Codec]) -> None:
    class Often(Base):
        def __init__(
            self, model: object, codec: Codec, feedback: ErrorFeedback, *, often: int = 1
        ) -> None:
            super().__init__(model, codec, feedback)

    with pytest.raises(TypeError, match=r"Halves: expected fields that Often has no .* got often"):
        signature_of(Often, SCHEMES["halves"])


OF_SCHEMES = list(dict.fromkeys(scheme.codec for scheme in SCHEMES.values()))


@pytest.mark.parametrize("codec", OF_SCHEMES, ids=lambda c: c.__name__)
def test_every_field_of_a_codec_is_documented(codec: type[Codec]) -> None:
    fields = {field.name for field in dataclasses.fields(codec)}
    assert fields == entries_of(codec, "Attributes").keys()
