"""Codecs of other packages: registered by a call or by an entry point, and held to the contract."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from benchmarks.command_line import compression
from benchmarks.compressions import parse
from benchmarks.predict.arguments import routes
from hvd_compress.codecs import (
    CODECS,
    NoCompression,
    codec_class,
    codec_from_config,
    codec_names,
    register,
)
from hvd_compress.exchanges.routing import route_of
from hvd_compress.testing import check_codec
from tests.stranger import install
from tests.stranger.twobit import TwoBit


@dataclasses.dataclass(frozen=True)
class Halves(NoCompression):
    codec_id: ClassVar[int] = 200
    name: ClassVar[str] = "halves"

    def quantize(self, x: np.ndarray, shape: Any, noise: Any) -> tuple[np.ndarray, np.ndarray]:
        return super().quantize(np.round(x * 2) / np.float32(2), shape, noise)

    def native(self) -> dict[str, int | float]:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    known = dict(CODECS)
    yield
    CODECS.clear()
    CODECS.update(known)
    sys.modules.pop("twobit", None)


def _derived(**attributes: Any) -> Any:
    kind = type("Other", (Halves,), {"__module__": "somebody", **attributes})
    return dataclasses.dataclass(frozen=True)(kind)


@pytest.mark.parametrize(
    ("written", "name"),
    (("Int8", "int8"), ("1-bit", "onebit"), ("power_sgd", "powersgd"), ("NONE", "none")),
)
def test_names_are_found_in_any_spelling(written: str, name: str) -> None:
    assert codec_class("Compressor", "codec", written).name == name


def test_names_that_mean_something_else_are_answered() -> None:
    with pytest.raises(ValueError, match=r"got 'Onebits': did you mean 'onebit'\?$"):
        codec_class("Compressor", "codec", "Onebits")
    with pytest.raises(
        ValueError, match=r"codec: expected a codec's name, got 'auto'.*write Auto\("
    ):
        codec_class("Compressor", "codec", "auto")


def test_an_installed_codec_is_found_by_name_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"Compressor.codec: expected one of .*, got 'twobit'"):
        route_of("twobit", "allgather", "Compressor.codec")
    monkeypatch.syspath_prepend(install(tmp_path / "site"))
    assert "twobit" in codec_names()
    assert "twobit" not in CODECS and "twobit" not in sys.modules, "only a use loads it"

    codec: Any = route_of("twobit", "allgather", "Compressor.codec").codec

    assert str(codec) == "TwoBit(group=512)"
    assert codec_from_config({"codec": "twobit", "group": 64}) == type(codec)(64)
    assert routes(["twobit:group=64"], ["allgather"])[0].codec == type(codec)(64)
    assert compression("twobit:group=64") == "twobit:group=64"
    assert parse("twobit:group=64", {}, "last").split()[0].codec == type(codec)(64)
    assert codec_names().count("twobit") == 1


def test_two_packages_with_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("first", "first:A"), ("second", "second:B")):
        info = tmp_path / f"{name}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {name}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[hvd_compress.codecs]\nours = {value}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=r"one class named 'ours', got (first:A|second:B) and"):
        route_of("ours", "allgather", "Compressor.codec")
    points = tmp_path / "second-1.dist-info" / "entry_points.txt"
    points.write_text("[hvd_compress.codecs]\nint8 = second:B\n")
    with pytest.raises(ValueError, match=r"'int8' for second:B, the name of .*\.Int8"):
        codec_names()


def test_an_entry_point_that_cannot_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = install(tmp_path / "site")
    (tmp_path / "site" / "twobit.py").unlink()
    monkeypatch.syspath_prepend(path)
    with pytest.raises(
        ValueError, match=r"entry point twobit = twobit:TwoBit of .*ModuleNotFoundError"
    ):
        codec_class("test", "codec", "twobit")


def test_names_and_ids_belong_to_one_class() -> None:
    assert register("halves", Halves) is Halves
    register("halves", Halves)  # A notebook's cell that runs again.
    with pytest.raises(ValueError, match=r"'halves' for somebody\.Other, the name of .*\.Halves"):
        register("halves", _derived())
    with pytest.raises(ValueError, match=r"got 200 for somebody\.Other, the id of .*\.Halves"):
        register("other", _derived(name="other"))
    with pytest.raises(ValueError, match=r"got 2 for somebody\.Other, the id of .*\.Int8"):
        register("other", _derived(name="other", codec_id=2))


def test_incomplete_classes() -> None:
    for cls, error, message in (
        (int, TypeError, "a class derived from Codec"),
        (type("Plain", (TwoBit,), {}), ValueError, r"name: expected 'other'"),
        (_derived(name="other", codec_id=256), ValueError, "from 1 to 255, got 256"),
        (_derived(name="other", codec_id=9, error="none"), ValueError, "'unbiased' or"),
        (
            _derived(name="other", codec_id=9, error="unbiased"),
            TypeError,
            "Other.variance_factor, which it does not define",
        ),
        (
            _derived(name="other", codec_id=9, __annotations__={"bits": int}),
            TypeError,
            "a default for every field of .*Other, got none for bits",
        ),
    ):
        with pytest.raises(error, match=message):
            register("other", cls)
    assert "other" not in CODECS


def test_codecs_of_others_pass_the_contract() -> None:
    check_codec(TwoBit())
    check_codec(TwoBit(64))


class _Larger:
    """Decodes to numbers that are too large."""

    def dequantize(self, scales: Any, codes: Any, shape: Any) -> Any:
        return super().dequantize(scales, codes, shape) * np.float32(3)  # type: ignore[misc]


class _Hides:
    """Sends an Inf or a NaN as zero."""

    def quantize(self, x: Any, shape: Any, noise: Any) -> Any:
        return super().quantize(np.nan_to_num(x, posinf=0, neginf=0), shape, noise)  # type: ignore[misc]


class _Writes:
    """Changes its input."""

    def quantize(self, x: Any, shape: Any, noise: Any) -> Any:
        x += 1
        return super().quantize(x, shape, noise)  # type: ignore[misc]


class _Short:
    """Reserves less than it sends."""

    def quantize(self, x: Any, shape: Any, noise: Any) -> Any:
        scales, codes = super().quantize(x, shape, noise)  # type: ignore[misc]
        return scales, codes[1:]


class _Casts:
    """A codec that turns a NaN into an ordinary code."""

    def quantize(self, x: Any, shape: Any, noise: Any) -> Any:
        scales, codes = super().quantize(x, shape, noise)  # type: ignore[misc]
        zero = np.float32(0)
        return scales, codes + (0 * (zero / (zero if not x.any() else 1))).astype(np.uint8)


@pytest.mark.parametrize(
    ("fault", "message"),
    (
        (_Casts, "without a NaN cast to them"),
        (_Larger, "an error of at most"),
        (_Hides, "set a scale to NaN"),
        (_Writes, "leave its input"),
        (_Short, "bytes of codes 1, got 0"),
    ),
)
def test_the_contract_finds_faults(fault: type, message: str) -> None:
    cls: Any = dataclasses.dataclass(frozen=True)(type("Faulty", (fault, TwoBit), {}))
    with pytest.raises(AssertionError, match=message):
        check_codec(cls())


def test_the_contract_finds_a_bias() -> None:
    from hvd_compress.codecs import Ternary

    with pytest.raises(AssertionError, match="no bias"):
        check_codec(Ternary(64, clip=1.0))  # The clipping is not said.
