"""The choice of the tensors that are encoded, and of their codecs."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import pytest

from hvd_compress.codecs import ECQ, FP16, Codec, ErrorFeedback, Int8, NoCompression, OneBit
from hvd_compress.codecs.feedback import OFF
from hvd_compress.exchanges.limits import MAX_GATHERED_BYTES, check_gather
from hvd_compress.exchanges.routing import (
    UNCOMPRESSED_ROUTE,
    Route,
    Router,
    check_feedback,
    route_of,
    warn_of_growth,
)

ONE_BIT = Route(OneBit(), ErrorFeedback(), "allgather")


def test_small_empty_and_excluded_tensors_go_uncompressed() -> None:
    router = Router(ONE_BIT, threshold=100, exclude=("head.*", "*.bias"))
    assert router.choose("body.weight", (10, 10), "float32") == ONE_BIT
    assert router.choose("body.weight", (99,), "float32") == UNCOMPRESSED_ROUTE
    assert router.choose("body.bias", (1000,), "float32") == UNCOMPRESSED_ROUTE
    assert router.choose("head.weight", (1000,), "float32") == UNCOMPRESSED_ROUTE
    assert Router(ONE_BIT, threshold=0).choose("empty", (0, 3), "float32") == UNCOMPRESSED_ROUTE
    assert Router(ONE_BIT, threshold=0).choose("scalar", (), "float32") == ONE_BIT


def test_the_first_matching_layer_wins() -> None:
    layers: dict[str, Codec | str | None] = {"a.*": "ecq", "*.weight": Int8("linear"), "z": None}
    router = Router(ONE_BIT, 0, layers=layers)
    assert router.choose("a.weight", (10,), "float32") == Route(ECQ(), ECQ.feedback, "allgather")
    assert router.choose("b.weight", (10,), "float32") == Route(Int8("linear"), OFF, "allgather")
    assert router.choose("z", (10,), "float32") == UNCOMPRESSED_ROUTE
    assert router.choose("other", (10,), "float32") == ONE_BIT


def test_all_layers_take_the_exchange_of_the_route() -> None:
    route = Route(OneBit(), ErrorFeedback(), "two_shot")
    router = Router(route, 0, layers={"a": "ecq", "b": Int8("linear"), "z": None})
    assert router.choose("a", (10,), "float32").exchange == "two_shot"
    assert router.choose("b", (10,), "float32") == Route(Int8("linear"), OFF, "two_shot")
    assert router.choose("other", (10,), "float32") == route
    assert str(route).endswith(" through two_shot")
    assert "through" not in str(router.choose("z", (10,), "float32"))
    with pytest.raises(
        ValueError, match=r"exchange: expected one of 'auto', 'allgather', .* got 'ring'"
    ):
        Route(OneBit(), ErrorFeedback(), "ring")


def test_what_horovod_can_add_itself_goes_dense() -> None:
    assert Route(FP16(), OFF).uncompressed and Route(FP16(), OFF).cast_dtype == "float16"
    assert (
        Route(NoCompression(), OFF).uncompressed and Route(NoCompression(), OFF).cast_dtype is None
    )
    assert not Route(FP16(), ErrorFeedback()).uncompressed
    assert not ONE_BIT.uncompressed


def test_dtypes_that_cannot_be_encoded() -> None:
    assert Router(ONE_BIT).choose("w", (5000,), "float64") == UNCOMPRESSED_ROUTE
    assert Router(ONE_BIT, exclude=("w",)).choose("w", (5000,), "float64") == UNCOMPRESSED_ROUTE
    assert Router(Route(FP16(), OFF)).choose("w", (5000,), "float64").uncompressed


def test_feedback_that_is_unstable_for_a_tensors_size() -> None:
    route = Route(ECQ(levels=1, bucket="tensor"), ErrorFeedback(0.02, 1.0))
    router = Router(route, threshold=0)
    assert router.choose("small", (100,), "float32") == route
    with pytest.raises(ValueError, match=r"large, shape \(100000,\): .*expected alpha <"):
        router.choose("large", (100_000,), "float32")


@pytest.mark.parametrize(
    ("patterns", "got"),
    [
        ({"exclude": ("fc3.*", "fc9.*")}, r"'fc9\.\*'; the nearest names are fc3.weight, conv1"),
        (
            {"layers": {"conv*": None, "cnov*": None}},
            r"'cnov\*'; the nearest names are conv1.weight",
        ),
    ],
)
def test_patterns_that_match_nothing_are_an_error_with_the_nearest_names(
    patterns: dict[str, Any], got: str
) -> None:
    router = Router(ONE_BIT, **patterns)
    with pytest.raises(ValueError, match=f"expected a pattern that matches .*, got {got}"):
        router.check_patterns(["fc3.weight", "conv1.weight"])
    router.check_patterns(["fc3.weight", "fc9.bias", "conv1.weight", "cnov"])


def test_gathers_that_overflow_horovods_counters() -> None:
    check_gather("w", MAX_GATHERED_BYTES // 8, 8)
    with pytest.raises(ValueError, match="w: expected at most 2147483647 bytes in one gather"):
        check_gather("w", MAX_GATHERED_BYTES // 8 + 1, 8)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    (
        ({"threshold": -1}, ValueError, "Compressor.threshold: expected an integer in"),
        ({"threshold": 1.5}, TypeError, "Compressor.threshold: expected an integer in"),
        ({"exclude": "fc3.*"}, TypeError, "Compressor.exclude: expected a sequence of patterns"),
        ({"exclude": (1,)}, TypeError, "Compressor.exclude: expected a sequence of patterns"),
        ({"exclude": None}, TypeError, "Compressor.exclude: expected a sequence of patterns"),
        ({"layers": ["fc3"]}, TypeError, "Compressor.layers: expected codecs by name pattern"),
        ({"layers": {3: None}}, TypeError, "Compressor.layers: expected codecs by name pattern"),
        ({"layers": {"a": "zip"}}, ValueError, "Compressor.layers['a']: expected one of 'onebit'"),
        ({"layers": {"a": OneBit}}, TypeError, "Compressor.layers['a']: expected a codec, a Route"),
    ),
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        Router(ONE_BIT, **arguments)
    assert str(raised.value).startswith(message)
    assert ", got " in str(raised.value)


def test_a_codec_of_ones_own_is_routed_without_feedback() -> None:
    @dataclass(frozen=True)
    class Own(Codec):
        codec_id: ClassVar[int] = 200
        name: ClassVar[str] = "own"
        error: ClassVar[Literal["unbiased", "contractive"]] = "contractive"

    assert Router(ONE_BIT, 0, layers={"a": Own()}).choose("a", (10,), "float32") == Route(
        Own(), OFF, "allgather"
    )


def test_another_route_keeps_thresholds_and_exclusions() -> None:
    router = Router(ONE_BIT, 100, ("head.*",), {"z": None}).with_route(
        Route(Int8(), OFF, "allgather")
    )
    assert router.choose("z", (1000,), "float32") == Route(Int8(), OFF, "allgather")
    assert router.choose("z", (99,), "float32") == UNCOMPRESSED_ROUTE
    assert router.choose("head.w", (1000,), "float32") == UNCOMPRESSED_ROUTE


def test_a_payload_longer_than_its_gradient_is_a_warning() -> None:
    with pytest.warns(
        UserWarning, match=r"norm, shape \(2048,\): OneBit\(group='row'\) takes 16672"
    ):
        warn_of_growth("norm", (2048,), Route(OneBit("row"), ErrorFeedback(), "allgather"), 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_growth("norm", (2048,), Route(OneBit("column"), ErrorFeedback(), "allgather"), 4)
        warn_of_growth("dense", (32, 64), Route(OneBit("row"), ErrorFeedback(), "allgather"), 4)
        warn_of_growth("small", (64,), Route(OneBit("row"), ErrorFeedback(), "allgather"), 4)


def test_a_codec_within_hosts() -> None:
    route = Route(OneBit(), exchange="hierarchical", inner="int8")  # type: ignore[arg-type]
    assert route.inner == Int8() and route.residuals and route != replace(route, inner=None)
    assert str(route).endswith(f" through hierarchical with {Int8()} within hosts")
    assert route_of(Route(OneBit(), inner=Int8()), "hierarchical", "where") == route


@pytest.mark.parametrize(
    ("codec", "exchange", "inner", "message"),
    (
        (OneBit(), "two_shot", Int8(), "expected exchange='hierarchical' .*, got 'two_shot'"),
        (OneBit(), "auto", Int8(), "expected exchange='hierarchical' .*, got 'auto'"),
        (OneBit(), "hierarchical", ECQ(coding="entropy"), "payloads have a fixed size"),
        (OneBit(), "hierarchical", OneBit("row"), "groups are not rows or columns"),
        (NoCompression(), "hierarchical", Int8(), "that is not uncompressed, got NoCompression"),
        (OneBit(), "hierarchical", "none at all", "expected one of"),
    ),
)
def test_what_cannot_be_within_hosts(codec: Codec, exchange: str, inner: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"Route.inner: .*{message}"):
        route_of(Route(codec, inner=inner), exchange, "where")


def test_feedback_has_to_be_stable_within_hosts() -> None:
    route = Route(OneBit(), ErrorFeedback(), "hierarchical", ECQ(1, "linf", "tensor"))
    with pytest.raises(ValueError, match=r"w, .*expected alpha < .* for ECQ\("):
        check_feedback("w", (100_000,), route)
