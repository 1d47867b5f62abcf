"""Which tensors are encoded, and with what."""

from __future__ import annotations

import pytest

from hvd_compress.codecs import ECQ, FP16, Codec, ErrorFeedback, Int8, NoCompression, OneBit
from hvd_compress.codecs.registry import OFF, SCHEMES
from hvd_compress.exchange.routing import DENSE, MAX_GATHERED_BYTES, Route, Router, check_gather

ONE_BIT = Route(OneBit(), ErrorFeedback())


def test_small_empty_and_excluded_tensors_go_dense() -> None:
    router = Router(ONE_BIT, threshold=100, exclude=("head.*", "*.bias"))
    assert router.choose("body.weight", (10, 10), "float32") == ONE_BIT
    assert router.choose("body.weight", (99,), "float32") == DENSE
    assert router.choose("body.bias", (1000,), "float32") == DENSE
    assert router.choose("head.weight", (1000,), "float32") == DENSE
    assert Router(ONE_BIT, threshold=0).choose("empty", (0, 3), "float32") == DENSE
    assert Router(ONE_BIT, threshold=0).choose("scalar", (), "float32") == ONE_BIT


def test_the_first_matching_layer_wins() -> None:
    layers: dict[str, Codec | str | None] = {"a.*": "ecq", "*.weight": Int8("linear"), "z": None}
    router = Router(ONE_BIT, 0, layers=layers)
    assert router.choose("a.weight", (10,), "float32") == Route(ECQ(), SCHEMES["ecq"].feedback)
    assert router.choose("b.weight", (10,), "float32") == Route(Int8("linear"), OFF)
    assert router.choose("z", (10,), "float32") == DENSE
    assert router.choose("other", (10,), "float32") == ONE_BIT


def test_what_horovod_can_add_itself_goes_dense() -> None:
    assert Route(FP16(), OFF).dense and Route(FP16(), OFF).dense_dtype == "float16"
    assert Route(NoCompression(), OFF).dense and Route(NoCompression(), OFF).dense_dtype is None
    assert not Route(FP16(), ErrorFeedback()).dense
    assert not ONE_BIT.dense


def test_dtypes_that_cannot_be_encoded() -> None:
    with pytest.raises(
        TypeError, match="w: expected dtype float32, float16, bfloat16, got float64"
    ):
        Router(ONE_BIT).choose("w", (5000,), "float64")
    assert Router(ONE_BIT, exclude=("w",)).choose("w", (5000,), "float64") == DENSE
    assert Router(Route(FP16(), OFF)).choose("w", (5000,), "float64").dense


def test_feedback_that_is_unstable_for_a_tensors_size() -> None:
    route = Route(ECQ(levels=1, bucket="tensor"), ErrorFeedback(0.02, 1.0))
    router = Router(route, threshold=0)
    assert router.choose("small", (100,), "float32") == route
    with pytest.raises(ValueError, match=r"large, shape \(100000,\): .*expected alpha <"):
        router.choose("large", (100_000,), "float32")


def test_patterns_that_match_nothing_are_found() -> None:
    router = Router(ONE_BIT, exclude=("fc3.*", "fc9.*"), layers={"conv*": None, "cnov*": None})
    assert router.unused_patterns(["fc3.weight", "conv1.weight"]) == ["fc9.*", "cnov*"]


def test_gathers_that_overflow_horovods_counters() -> None:
    check_gather("w", MAX_GATHERED_BYTES // 8, 8)
    with pytest.raises(ValueError, match="w: expected at most 2147483647 bytes in one gather"):
        check_gather("w", MAX_GATHERED_BYTES // 8 + 1, 8)
